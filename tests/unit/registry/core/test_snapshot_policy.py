"""When a snapshot is due, and which entries of the log must stay."""

import pytest

from tensorhub_registry.core.snapshot_policy import (
    LOG_KEEP_ENTRIES_MIN,
    LOG_KEEP_S_MIN,
    SNAPSHOT_ENTRIES_MAX,
    SNAPSHOT_LOG_BYTES_MAX,
    SNAPSHOTS_PER_LOG_MIN,
    SnapshotPolicy,
)


def pace(*marks: tuple[int, float]) -> SnapshotPolicy:
    made = SnapshotPolicy()
    for seq, time in marks:
        made.stored(seq, time)
    return made


@pytest.mark.parametrize(
    ("entries", "nbytes", "due"),
    [
        (SNAPSHOT_ENTRIES_MAX - 1, 1, False),
        (SNAPSHOT_ENTRIES_MAX, 1, True),
        (1, SNAPSHOT_LOG_BYTES_MAX, True),
        (0, SNAPSHOT_LOG_BYTES_MAX, False),
    ],
)
def test_it_is_due_by_entries_or_by_bytes(entries: int, nbytes: int, *, due: bool) -> None:
    """And more often in a small log."""
    made = pace((100, 1.0))
    made.log_bytes = nbytes
    assert made.is_due(100 + entries) is due
    small = SnapshotPolicy(bytes_max=64 * 1024)
    small.log_bytes = 64 * 1024 // SNAPSHOTS_PER_LOG_MIN
    assert small.is_due(5)


def test_none_is_made_that_is_larger_than_what_it_sums_up() -> None:
    made = pace((100, 1.0))
    made.nbytes, made.log_bytes = 5_000, 4_999
    assert not made.is_due(100 + SNAPSHOT_ENTRIES_MAX)
    made.log_bytes += 1
    assert made.is_due(100 + SNAPSHOT_ENTRIES_MAX)


def test_a_full_log_wants_one_at_once_but_no_second_of_the_same() -> None:
    made = pace((100, 1.0))
    made.is_full = True
    assert made.is_due(101)
    made.took(101)
    made.stored(101, 2.0)
    assert made.is_due(101), "it stands, and nothing was trimmed behind it"
    made.made_room(101)
    made.is_full = True
    assert not made.is_due(101), "nothing more can be gained"
    assert made.is_due(102)


def test_what_failed_is_due_again_and_what_was_kept_does_not_count_again() -> None:
    """At once, with no further entry; also where a snapshot must be no larger than what it sums up."""
    made = pace((100, 1.0))
    made.nbytes = made.log_bytes = 5_000
    made.took(100 + SNAPSHOT_ENTRIES_MAX)
    made.log_bytes += 150
    assert not made.is_due(100 + SNAPSHOT_ENTRIES_MAX + 1)
    made.failed()
    assert made.is_due(100 + SNAPSHOT_ENTRIES_MAX + 1)
    assert made.log_bytes == 5_150
    made = pace((100, 1.0))
    made.log_bytes = SNAPSHOT_LOG_BYTES_MAX
    made.took(200)
    made.stored(200, 2.0)
    made.failed()
    assert not made.is_due(201), "it was kept, and only the trim behind it failed"


NOW = 1e6
FAR = 10**9
YOUNG, OLD = NOW - 1, NOW - LOG_KEEP_S_MIN


@pytest.mark.parametrize(
    ("marks", "newer", "older", "last_event", "fullness", "first"),
    [
        ([(FAR, 0.0)], FAR, None, FAR, 0.8, 0),
        ([(50_000, OLD), (70_000, OLD + 1), (90_000, YOUNG)], 90_000, 70_000, FAR, 0.1, 50_001 - LOG_KEEP_ENTRIES_MIN),
        ([(70_000, YOUNG)], 90_000, 70_000, FAR, 0.1, 0),
        ([(70_000, NOW)], 90_000, 70_000, FAR, 0.6, 70_001),
        ([(90_000, NOW)], 90_000, None, FAR, 1.0, 90_001),
        ([(90_000, NOW)], 90_000, 90_000, 12, 0.6, 12),
        ([(90_000, NOW)], 90_000, 90_000, 12, 1.0, 12),
    ],
    ids=["one snapshot alone", "young entries", "none is old", "tight", "full", "last event", "last event, full"],
)
def test_which_entry_is_the_first_that_stays(
    marks: list[tuple[int, float]], newer: int, older: int | None, last_event: int, fullness: float, first: int
) -> None:
    """Nothing goes that is behind one snapshot alone; the last event stays, against which the next one is published."""
    assert pace(*marks).first_kept(newer, older, last_event, NOW, fullness) == first
