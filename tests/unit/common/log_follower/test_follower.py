"""Following one log: where a fold begins, again after a gap, and when a job that was set aside is tried again.

What is said of log and snapshots comes from nodes of which one may have slept.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import cast

import pytest

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogGap, LogShorter, NoAnswer
from tensorhub_common.catalog.snapshot import Snapshot, encode
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.jetstream.snapshot_store import SnapshotIndex, SnapshotRecord
from tensorhub_common.jetstream.stream_log import LogExtent
from tensorhub_common.log_follower import restore
from tensorhub_common.log_follower.follower import LogFollower
from tensorhub_common.log_follower.set_aside import RetryLimits, SetAside, set_aside
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
        monkeypatch.setattr(restore, "JobLog", lambda *_: self)
        monkeypatch.setattr(restore, "SnapshotStore", lambda *_: self)
        monkeypatch.setattr(restore, "LOOK_AGAIN_S", 0.0)

    async def extent(self) -> LogExtent:
        self.asked += 1
        return self.extents.pop(0) if len(self.extents) > 1 else self.extents[0]

    async def index(self, _: str) -> SnapshotIndex | None:
        return self.indices.pop(0) if len(self.indices) > 1 else self.indices[0]

    async def read(self, _: SnapshotRecord) -> bytes:
        return self.body


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


END = LogShorter("the end of a test")
EXTENT = LogExtent(1, 9, "", 0, 0)


class Scene:
    """A log of nine entries of which those before `first` are gone, snapshots, and a target that notes what it gets."""

    def __init__(self, snapshots: list[int | Exception | None], older: int = 0) -> None:
        self.snapshots, self.older, self.first = snapshots, older, 1
        self.folded_seq = 0
        self.taken: list[int] = []
        self.starts: list[int] = []
        self.states: list[bool] = []
        self.at: dict[int, Callable[[], None]] = {}

    def restore(self, snapshot: Snapshot, _: LogExtent) -> int:
        self.folded_seq = snapshot.seq
        return snapshot.seq + 1 - self.older

    async def take(self, entry: StoredEntry) -> None:
        self.taken.append(entry.seq)
        self.folded_seq = max(self.folded_seq, entry.seq)

    async def newest(self, _: object, __: str, beyond: int) -> tuple[Snapshot | None, LogExtent]:
        found = self.snapshots.pop(0)
        if isinstance(found, Exception):
            raise found
        return None if found is None else Snapshot(found, 0.0, Catalog("j")), EXTENT

    async def follow(self, start: int, **_: object) -> AsyncGenerator[StoredEntry, None]:
        self.starts.append(start)
        for seq in range(start, 10):
            self.at.pop(seq, lambda: None)()
            if seq < self.first:
                raise LogGap(f"entry {seq} is gone")
            yield StoredEntry(seq, 0.0, "", {}, b"")
        raise END

    async def run(self, monkeypatch: pytest.MonkeyPatch) -> Exception:
        """Follow until something is raised."""
        monkeypatch.setattr("tensorhub_common.log_follower.restore.newest_snapshot", self.newest)
        monkeypatch.setattr("tensorhub_common.log_follower.follower.JobLog", lambda *_: self)
        follower = LogFollower(
            cast("Bus", None),
            "j",
            self,
            burst=2,
            retry_s=0.0,
            on_read_state=lambda why: self.states.append(why is None),
        )
        async with asyncio.timeout(60):
            try:
                await follower.run()
            except (LogGap, LogShorter) as why:
                return why


def trim(scene: Scene, first: int) -> Callable[[], None]:
    return lambda: setattr(scene, "first", first)


async def test_without_a_snapshot_it_reads_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the snapshots could not be read for a while, which it reports."""
    scene = Scene([NoAnswer("later"), None])
    assert await scene.run(monkeypatch) is END
    assert (scene.starts, scene.taken, scene.states) == ([1], list(range(1, 10)), [False, True])


async def test_a_snapshot_is_followed_from_behind_it_or_from_older_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    for older, first in ((0, 6), (3, 3)):
        scene = Scene([5], older)
        assert await scene.run(monkeypatch) is END
        assert (scene.starts, scene.taken) == ([first], list(range(first, 10)))


async def test_older_entries_that_are_gone_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene([5, None], older=3)
    scene.first = 6
    assert await scene.run(monkeypatch) is END
    assert (scene.starts, scene.taken) == ([3, 6], [6, 7, 8, 9])


@pytest.mark.parametrize("snapshot", [7, None])
async def test_a_gap_is_bridged_by_a_later_snapshot_or_ends_it(
    monkeypatch: pytest.MonkeyPatch, snapshot: int | None
) -> None:
    scene = Scene([None, snapshot])
    scene.at[4] = trim(scene, 6)
    ended = await scene.run(monkeypatch)
    if snapshot is None:
        assert isinstance(ended, LogGap)
        assert scene.taken == [1, 2, 3]
    else:
        assert ended is END
        assert (scene.starts, scene.taken) == ([1, 8], [1, 2, 3, 8, 9])


LIMITS = RetryLimits(first_s=5.0, max_s=600.0)


def again(before: SetAside | None, seq: int, now: float, *, has_recovered: bool = False) -> SetAside:
    return set_aside(before, seq, now, LIMITS, has_recovered=has_recovered)


def test_a_job_that_fails_at_each_try_is_tried_ever_more_rarely() -> None:
    aside = again(None, 7, 0.0)
    waits = [aside.wait_s]
    for number in range(11):
        aside = again(aside, 8 + number, aside.again_at + 1.0)
        assert aside.since == 0.0
        assert aside.again_at == sum(waits) + number + 1 + aside.wait_s
        waits.append(aside.wait_s)
    assert waits == [*(5.0 * 2**n for n in range(7)), *[600.0] * 5]


def test_a_job_that_recovered_begins_again() -> None:
    aside = again(again(None, 7, 0.0), 7, 6.0)
    assert (aside.failures, aside.wait_s) == (2, 10.0)
    later = aside.again_at + aside.wait_s
    assert [aside.has_lasted(now) for now in (later - 0.1, later)] == [False, True]
    assert again(aside, 8, later, has_recovered=True) == SetAside(8, later, 1, 5.0, later + 5.0)


@pytest.mark.parametrize("failures", [64, 100_000])
def test_no_number_of_failures_is_too_many_and_one_that_got_less_far_keeps_where_it_failed(failures: int) -> None:
    assert again(SetAside(7, 0.0, failures, 600.0, 0.0), 7, 0.0).wait_s == LIMITS.max_s
    assert again(again(None, 7, 0.0), 0, 5.0).seq == 7, "its log can't be read at all now"
