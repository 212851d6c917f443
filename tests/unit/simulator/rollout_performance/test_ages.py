"""How old tokens and responses are when they are trained."""

from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import TokenRun
from tensorhub_simulator.rollout_performance.measures.ages import AgeCounts, Ages


def run(start: int, version: int) -> TokenRun:
    return TokenRun(start, version, f"root-{version}", "r0", Attempt(1, 1))


def test_a_response_is_as_old_as_its_oldest_token_and_tokens_have_their_own_age() -> None:
    """Six tokens of version 3 and four of version 5, and ten of version 5, trained where 5 and 6 are the newest."""
    counts = AgeCounts()
    assert counts.found == Ages()
    counts.ended(RequestId(1, 0), [run(0, 3), run(6, 5)], 10)
    counts.ended(RequestId(1, 1), [run(0, 5)], 10)
    counts.trained(RequestId(1, 0), 5)
    counts.trained(RequestId(1, 1), 6)
    assert counts.found == Ages((6 * 2 + 10 * 1) / 20, 1.5, 2, 0.5)


def test_two_attempts_on_one_version_are_no_mixture() -> None:
    counts = AgeCounts()
    counts.ended(RequestId(1, 0), [run(0, 3), run(6, 3)], 10)
    counts.trained(RequestId(1, 0), 3)
    assert counts.found == Ages(0.0, 0.0, 0, 0.0)
