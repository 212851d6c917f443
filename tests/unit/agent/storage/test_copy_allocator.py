"""Which of memory and disk a copy takes."""

from pathlib import Path

import pytest

from tensorhub_agent.runtime.troubles import TROUBLES
from tensorhub_agent.storage.copy_allocator import CopyPlacement, candidates, no_room
from tensorhub_agent.storage.incarnation import IncarnationCounter
from tensorhub_agent.storage.shard_store import CopyQuota

NOTHING = CopyQuota(0, 0)


@pytest.mark.parametrize(
    ("nbytes", "taken", "expected"),
    [
        (10, NOTHING, (CopyPlacement.MEMORY, CopyPlacement.DISK)),
        (11, NOTHING, (CopyPlacement.DISK,)),
        (1, CopyQuota(10, 0), (CopyPlacement.DISK,)),
        (10, CopyQuota(1, 0), (CopyPlacement.DISK,)),
        (10, CopyQuota(0, 91), (CopyPlacement.MEMORY,)),
        (101, NOTHING, ()),
        (1, CopyQuota(10, 100), ()),
        # A limit that was lowered, or copies that an earlier run left: there may be more than it says.
        (0, CopyQuota(11, 101), ()),
    ],
)
def test_memory_comes_first_and_neither_takes_more_than_its_limit(
    nbytes: int, taken: CopyQuota, expected: tuple[CopyPlacement, ...]
) -> None:
    limits = CopyQuota(10, 100)
    assert candidates(nbytes, limits, taken) == expected
    assert limits.total_bytes == 110
    if not expected:
        why = no_room(nbytes, limits, taken)
        assert "TENSORHUB_CACHE_DISK_BYTES" in why
        assert f"{taken.memory_bytes} of 10" in why


def test_a_full_disk_keeps_no_agent_from_joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    incarnation = IncarnationCounter(tmp_path)
    first = incarnation.next()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        second = incarnation.next()
        (trouble,) = TROUBLES.told()
    assert second > first
    assert (trouble.kind, "make room there" in trouble.why) == ("no-room-for-state", True)
    assert incarnation.next() > second
    assert TROUBLES.told() == ()
