"""What is new of responses that are followed: from where the asker is, as far as an answer has room."""

import pytest

from tensorhub_common.protocol.rollout.entries import Attach, GroupSubmitted, Payload, RequestId, SdkSender, Submit
from tensorhub_common.protocol.rollout.questions import FOLLOW_BYTES_MAX, FollowedPlace, FollowQuestion
from tensorhub_rollout.answers.following import Following
from tensorhub_rollout.core.responses import Response
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.state import RolloutState


def state_of(*groups: tuple[str, int]) -> RolloutState:
    state = RolloutState("job")
    fold(state, 1, Attach("main", "policy", 0, "n"))
    said = tuple(GroupSubmitted(name, "0" * 64, size, 1, 8) for name, size in groups)
    fold(state, 2, Submit(SdkSender(1, 1), said, Payload("0" * 64, 1)))
    return state


def response(count: int) -> Response:
    return Response(bytearray(range(4 * count)), bytearray(4 * count))


def question(*places: tuple[str, int, int], attachment: int = 1) -> FollowQuestion:
    return FollowQuestion(attachment, 2, tuple(FollowedPlace(*each) for each in places))


def test_tokens_come_from_where_the_asker_is() -> None:
    following = Following(state_of(("a", 2), ("b", 1)), question(("b", 0, 1), ("a", 1, 0), ("a", 0, 3)))
    assert following.answer({}).rows == ()
    found = following.answer({RequestId(2, 0): response(3), RequestId(2, 1): response(2), RequestId(2, 2): response(4)})
    assert [(row.place, row.tokens) for row in found.rows] == [(0, bytes(range(4, 16))), (1, bytes(range(8)))]
    assert [len(row.logprobs) for row in found.rows] == [12, 8]


def test_what_the_leader_does_not_hold_yet_is_nothing_new() -> None:
    """A leader that has just begun holds fewer tokens than the one before had told."""
    following = Following(state_of(("a", 1)), question(("a", 0, 5)))
    assert following.answer({RequestId(2, 0): response(3)}).rows == ()


def test_what_is_not_there_has_no_row() -> None:
    following = Following(state_of(("a", 1)), question(("a", 1, 0), ("x", 0, 0)))
    assert following.answer({RequestId(2, 0): response(3)}) == type(following.answer({}))()


def test_another_attachment_ends_it() -> None:
    state = state_of(("a", 1))
    following = Following(state, question(("a", 0, 0)))
    assert Following(state, question(("a", 0, 0), attachment=7)).answer({}).error == "StaleSender"
    fold(state, 3, Attach("main", "policy", 0, "m"))
    assert following.answer({RequestId(2, 0): response(3)}).error == "StaleSender"


@pytest.mark.parametrize("count", [FOLLOW_BYTES_MAX // 16, FOLLOW_BYTES_MAX // 8, FOLLOW_BYTES_MAX])
def test_an_answer_has_room_for_so_much_and_the_next_one_goes_on(count: int) -> None:
    state = state_of(*((name, 1) for name in "abc"))
    held = {RequestId(2, number): Response(bytearray(4 * count), bytearray(4 * count)) for number in range(3)}
    have, answers = dict.fromkeys("abc", 0), 0
    while any(each < count for each in have.values()):
        rows = Following(state, question(*((name, 0, at) for name, at in have.items()))).answer(held).rows
        assert rows
        assert sum(len(row.tokens) + len(row.logprobs) for row in rows) <= FOLLOW_BYTES_MAX
        for row in rows:
            have["abc"[row.place]] += len(row.tokens) // 4
        answers += 1
    assert answers >= 3 * 8 * count // FOLLOW_BYTES_MAX
