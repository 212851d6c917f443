"""What a caller is told whose read ran out of time: what was missing, and what to do."""

from tensorhub_agent.core.operations.timeout_errors import MissingShards, not_in_time
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.errors import RoundTimeout, VersionUnavailable
from tensorhub_common.protocol.log.commands import VersionRequest

KEY = ShardKey("policy", "engine", 1)


def told(want: VersionRequest = "latest", missing: tuple[int, ...] = (), *, is_joining: bool = True) -> tuple[str, str]:
    return not_in_time(KEY, want, missing, is_joining=is_joining)


def test_siblings_that_did_not_join_are_named_without_the_caller() -> None:
    error, message = told(missing=(0, 1, 3))
    assert error == RoundTimeout.__name__
    assert message.startswith("shard 1 of policy/engine: shards [0, 3] of the replica did not join the round")


def test_where_all_have_joined_the_version_is_missing() -> None:
    assert told(12) == (
        VersionUnavailable.__name__,
        "version 12 of model 'policy' has no live holder within the bound: has a trainer published it?",
    )
    assert told("latest", (1,)) == (
        VersionUnavailable.__name__,
        "no version of model 'policy' was to be had within the bound: has a trainer published one?",
    )


def test_a_planner_that_does_not_answer_is_named() -> None:
    """And not the bound, of which there may have been enough."""
    error, message = not_in_time(KEY, 12, (), is_joining=False, unplanned="the planner is away")
    assert error == RoundTimeout.__name__
    assert message == (
        "policy/engine could not be filled within the bound, for it got no plan: the planner is away. "
        "See that tensorhub-planner runs ('tensorhub doctor'), then call again"
    )


def test_it_was_waited_for_those_who_never_came() -> None:
    absent = MissingShards()
    assert absent.of((0, 2)) == (0, 2), "nobody has said anything yet"
    absent.heard((1, 2))
    absent.heard((2,))
    assert absent.of((0, 1, 2)) == (2,), "0 and 1 came, and have left"
    absent.heard((0,))
    assert absent.of((0,)) == (0,), "each was there once, but never all of them"
    absent.heard(())
    absent.heard((0,))
    assert absent.of((0,)) == (), "who left after all were there has kept nobody waiting"


def test_who_was_being_filled_needs_more_time() -> None:
    error, message = told(12, (0,), is_joining=False)
    assert error == RoundTimeout.__name__
    assert message == "policy/engine could not be filled within the bound: allow more time"
