"""How many deleted jobs are remembered, and for how long."""

from tensorhub_registry.jobs.deletion import TOMBSTONE_S, TOMBSTONES_MAX, expired_tombstones

NOW = 1_000_000_000.0


def test_the_last_deleted_ones_are_remembered() -> None:
    """One more than may be: the one that was deleted first goes."""
    tombstones = [(NOW - number, f"job-{number}") for number in range(TOMBSTONES_MAX + 1)]
    assert expired_tombstones(tombstones[:-1], NOW) == []
    assert expired_tombstones(tombstones, NOW) == [f"job-{TOMBSTONES_MAX}"]


def test_none_is_remembered_for_ever() -> None:
    """At its age it goes, however few there are; a clock that is behind keeps it."""
    assert expired_tombstones([(NOW - TOMBSTONE_S, "a"), (NOW - TOMBSTONE_S - 1, "b"), (NOW + 60, "c")], NOW) == ["b"]
