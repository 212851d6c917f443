"""Following one log: from the newest snapshot, again after a gap, and from older entries for its target."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import cast

import pytest

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogGap, LogShorter, NoAnswer
from tensorhub_common.catalog.snapshot import Snapshot
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.jetstream.job_log import LogExtent
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.log_follower.follower import LogFollower

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
