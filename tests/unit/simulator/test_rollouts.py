"""Rollouts under faults: manager, runner and log together, by seeds; each planted bug is found."""

import pytest

from tensorhub_simulator.rollouts.bugs import BUGS, planted
from tensorhub_simulator.rollouts.invariants import check
from tensorhub_simulator.rollouts.run import first_failure, run
from tensorhub_simulator.rollouts.world import Chances, RolloutWorld

RARE = ("forgotten-early", "older-checkpoint", "later-end", "pinned-judged-early")
"""Bugs that some hundred seeds don't meet, and a minute or more of them."""


@pytest.mark.long
def test_what_must_hold_holds_under_faults() -> None:
    assert first_failure(range(1, 41)) is None


def test_a_prompt_that_kills_each_engine_fails_alone() -> None:
    world = RolloutWorld(3, groups=3, poisoned=1, chances=Chances(moved=0.0))
    world.run(lambda: world.is_over, 120.0)
    check(world)
    assert world.failed.keys() == world.poisoned
    assert len(world.failed) == 4
    assert all("5 attempts one after the other made no token" in str(error) for error in world.failed.values())


@pytest.mark.parametrize("holds", [True, False])
def test_the_last_instance_with_a_version_is_lost_and_what_is_for_that_alone_goes_on_where_it_is_held(
    holds: bool,  # noqa: FBT001 (both are one scene)
) -> None:
    calm = Chances(lost=0.0, doubled=0.0, late=0.0, moved=0.0, pinned=1.0, retained=0.0, killed_at_end=0.0, holds=holds)
    world = RolloutWorld(5, runners=1, groups=1, chances=calm)
    world.run(lambda: world.made > 0, 30.0)
    world.publish()
    if holds:
        world.run(lambda: bool(world.hub.copies), 5.0)
    assert len(world.ended) < len(world.opened)
    world.kill(world.runners[0])
    world.run(lambda: world.is_over, 60.0)
    check(world)
    gone = [error for error in world.failed.values() if "the hub does not have it" in str(error)]
    assert bool(gone) is not holds, "without a hold its requests fail"
    world.run(lambda: not world.hub.hold.versions, 10.0)
    assert not world.hub.copies


def test_one_seed_is_one_history() -> None:
    first, second = run(7), run(7)
    assert (first.entries, first.yielded, first.agenda.steps) == (second.entries, second.yielded, second.agenda.steps)
    assert first.entries != run(8).entries


@pytest.mark.slow
def test_what_must_hold_holds_for_two_thousand_seeds() -> None:
    assert first_failure(range(1, 2001)) is None


@pytest.mark.long
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug not in RARE])
def test_a_planted_bug_is_found(bug: str) -> None:
    with planted(bug):
        assert first_failure(range(1, 501)) is not None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", RARE)
def test_a_planted_bug_that_needs_a_rare_interleaving_is_found(bug: str) -> None:
    with planted(bug):
        assert first_failure(range(1, 5001)) is not None
