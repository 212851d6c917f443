"""Where a fold begins: what is said of log and snapshots by nodes of which one may have slept."""

from typing import cast

import pytest

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogGap, LogShorter
from tensorhub_common.catalog.snapshot import Snapshot, encode
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.jetstream.job_log import LogExtent
from tensorhub_common.jetstream.snapshot_store import SnapshotIndex, SnapshotRecord
from tensorhub_common.log_follower import restore
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, LevelUnknown
from tensorhub_registry.core.job_health import advice_on

NOBODY = cast("Bus", None)


def extent(first: int, last: int) -> LogExtent:
    return LogExtent(first=first, last=last, created="then", nbytes=0, bytes_max=0)


def index(seq: int) -> SnapshotIndex:
    return SnapshotIndex("then", SnapshotRecord(seq, 0.0, "0" * 64, 0, 0, 1))


class Nodes:
    """What is answered to each question in turn; the last answer stays."""

    def __init__(self, extents: list[LogExtent], indices: list[SnapshotIndex | None]) -> None:
        self.extents, self.indices = extents, indices
        self.asked = 0
        self.body = b""
        """Of each snapshot."""

    def put_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nodes = self

        class Log:
            def __init__(self, *_: object) -> None: ...

            async def extent(self) -> LogExtent:
                nodes.asked += 1
                return nodes.extents.pop(0) if len(nodes.extents) > 1 else nodes.extents[0]

        class Kept:
            def __init__(self, *_: object) -> None: ...

            async def index(self, _: str) -> SnapshotIndex | None:
                return nodes.indices.pop(0) if len(nodes.indices) > 1 else nodes.indices[0]

            async def read(self, _: SnapshotRecord) -> bytes:
                return nodes.body

        monkeypatch.setattr(restore, "JobLog", Log)
        monkeypatch.setattr(restore, "SnapshotStore", Kept)
        monkeypatch.setattr(restore, "LOOK_AGAIN_S", 0.0)


async def test_what_does_not_fit_together_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """First the log's end is old, then the log is trimmed and its snapshot not there yet; then all is well."""
    nodes = Nodes([extent(1, 5), extent(9, 20), extent(1, 20)], [index(10), None])
    nodes.put_in_place(monkeypatch)
    assert await restore.newest_snapshot(NOBODY, "job", 0) == (None, extent(1, 20))
    assert nodes.asked == 3


@pytest.mark.parametrize(
    ("stands", "kept", "error"), [(extent(1, 5), index(10), LogShorter), (extent(9, 20), None, LogGap)]
)
async def test_what_stays_so_is_an_error(
    monkeypatch: pytest.MonkeyPatch, stands: LogExtent, kept: SnapshotIndex | None, error: type[Exception]
) -> None:
    nodes = Nodes([stands], [kept])
    nodes.put_in_place(monkeypatch)
    with pytest.raises(error):
        await restore.newest_snapshot(NOBODY, "job", 0)
    assert nodes.asked == restore.LOOKS_MAX


async def test_a_snapshot_of_a_newer_release_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log was trimmed behind it. Not a backup of the snapshots mends that, but the release that wrote them."""
    nodes = Nodes([extent(9, 20)], [index(10)])
    nodes.put_in_place(monkeypatch)
    nodes.body = encode(Snapshot(10, 1.0, Catalog("job", seq=10, level=NEWEST_LEVEL + 1)))
    with pytest.raises(LevelUnknown, match=f"level {NEWEST_LEVEL + 1}") as found:
        await restore.newest_snapshot(NOBODY, "job", 0)
    assert advice_on(found.value).startswith("run the release that raised it")
