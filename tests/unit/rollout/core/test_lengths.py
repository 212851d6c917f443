"""What a leader expects of the lengths of its requests: from what has ended, what runs, and what it is."""

from collections import Counter

import pytest

from tensorhub_common.protocol.rollout.entries import (
    Attach,
    Attempt,
    End,
    GroupSubmitted,
    Lead,
    Payload,
    RequestEnded,
    RequestId,
    SdkSender,
    Submit,
)
from tensorhub_rollout.core.lengths import KEPT_S, LENGTH_LIMITS, ResponseLengths
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.state import RolloutState
from tensorhub_rollout.policy.lengths import Knowledge

SAME, OTHER = "a" * 64, "b" * 64
FIRST, SECOND, THIRD = (RequestId(3, index) for index in range(3))
LATER, ELSE = RequestId(4, 0), RequestId(4, 1)


@pytest.fixture
def state() -> RolloutState:
    """A group of three; then one of the same content, and another."""
    made = RolloutState("job")
    fold(made, 1, Lead(1, "m"))
    fold(made, 2, Attach("main", "policy", 0, "n"))
    fold(made, 3, Submit(SdkSender(2, 1), (GroupSubmitted("p", SAME, 3, 1, 4096),), Payload("c" * 64, 1)))
    groups = GroupSubmitted("q", SAME, 1, 1, 4096), GroupSubmitted("r", OTHER, 1, 1, 4096)
    fold(made, 4, Submit(SdkSender(2, 2), groups, Payload("d" * 64, 1)))
    return made


def no_tokens(_: RequestId) -> int:
    return 0


def end(state: RolloutState, of: RequestId, tokens: int, reason: str = "stop") -> None:
    ended = RequestEnded(of, Attempt(1, 1), reason, tokens)  # type: ignore[arg-type]
    fold(state, state.seq + 1, End(1, (ended,), Payload(f"{state.seq:064d}", 1)))


def test_what_has_ended_tells_of_all_of_its_content_and_at_once(state: RolloutState) -> None:
    """What was cancelled or has failed tells nothing of a length."""
    book = ResponseLengths(state, no_tokens)
    assert book.estimate(FIRST, 0.0).median == pytest.approx(LENGTH_LIMITS.tokens_first)
    end(state, FIRST, 2000)
    book.ended(FIRST)
    for of in (SECOND, LATER):
        assert book.estimate(of, 0.0).knowledge is Knowledge.FINISHED
        assert book.estimate(of, 0.0).median > 1000
    assert book.estimate(ELSE, 0.0).knowledge is Knowledge.ALIKE, "its prompt is as long"
    end(state, SECOND, 1, "failed")
    book.ended(SECOND)
    assert book.estimate(THIRD, 0.0).median > 1000


def test_what_was_cut_off_is_longer_than_it_came_to_be_and_none_longer_than_it_may(state: RolloutState) -> None:
    book, other = (ResponseLengths(state, no_tokens) for _ in range(2))
    end(state, FIRST, 300, "length")
    book.ended(FIRST)
    cut = book.estimate(SECOND, 0.0).median
    assert cut > 300
    assert book.estimate(SECOND, 0.0).quantile(0.999) <= 4096
    assert other.estimate(SECOND, 0.0).knowledge is Knowledge.JOB


def test_what_a_response_has_made_is_not_taken_for_a_sibling(state: RolloutState) -> None:
    held = Counter({FIRST: 3000})
    of_three = ResponseLengths(state, held.__getitem__).estimate(FIRST, 0.0)
    of_one = ResponseLengths(state, Counter({LATER: 3000}).__getitem__).estimate(LATER, 0.0)
    fresh = ResponseLengths(state, no_tokens).estimate(FIRST, 0.0)
    assert of_three.mean == pytest.approx(of_one.mean, rel=1e-4) == pytest.approx(fresh.mean, rel=1e-4)
    assert of_three.median > 3000


def test_a_leader_begins_with_what_has_ended_before_it(state: RolloutState) -> None:
    end(state, FIRST, 2000)
    assert ResponseLengths(state, no_tokens).estimate(SECOND, 0.0).knowledge is Knowledge.FINISHED


def test_what_runs_counts_for_its_group_from_the_next_look_and_what_it_has_at_once(state: RolloutState) -> None:
    held = Counter[RequestId]()
    book = ResponseLengths(state, held.__getitem__)
    before = book.estimate(SECOND, 0.0)
    held[FIRST] = 3000
    assert book.estimate(FIRST, 0.0).made == 3000
    assert book.estimate(FIRST, 0.0).median > 3000
    assert book.estimate(SECOND, KEPT_S / 2) == before
    after = book.estimate(SECOND, KEPT_S)
    assert (after.knowledge, after.made) == (Knowledge.RUNNING, 0)
    assert after.median > before.median
