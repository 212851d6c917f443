"""What an answer means when the connection broke between the question and it."""

import pytest

from tensorhub._agent.calls import AgentCall, PublishRequest, ReadRequest, ReleaseRequest, UnpublishRequest
from tensorhub_common.errors import NotPublished, VersionConflict
from tensorhub_common.protocol.worker import Done, ReadCall


@pytest.mark.parametrize(
    ("wanted", "before", "now", "answer"),
    [
        (7, None, 7, 7),
        (7, None, None, None),
        (7, None, 6, None),
        (None, None, 3, 3),
        (None, 3, 4, 4),
        (None, 3, 3, None),
        (None, None, None, None),
    ],
)
def test_a_publication_is_settled_by_what_the_shard_holds(
    wanted: int | None, before: int | None, now: int | None, answer: int | None
) -> None:
    done = PublishRequest(wanted).settled(before, now)
    assert (done.version if done else None) == answer


def test_a_publication_that_came_to_its_end_meanwhile_excuses_the_conflict() -> None:
    conflict = VersionConflict("version 4 is published: unpublish 4 first")
    assert PublishRequest(None).excused(conflict, before=None, now=4) == Done(call=0, version=4)
    assert PublishRequest(5).excused(conflict, before=None, now=4) is None


def test_unpublish_is_never_settled_but_asked_again_for_the_memory_may_still_drain() -> None:
    assert UnpublishRequest().settled(3, None) is None
    assert UnpublishRequest().excused(NotPublished("nothing"), 3, None) == Done(call=0)
    assert UnpublishRequest().excused(VersionConflict("other"), 3, None) is None


def test_an_update_answers_what_the_first_time_brought() -> None:
    nothing_newer = Done(call=1)
    assert ReadRequest("newer").answered(nothing_newer, before=3, now=4).version == 4
    assert ReadRequest("newer").answered(nothing_newer, before=4, now=4).version is None
    assert ReadRequest("newer").answered(nothing_newer, before=4, now=None).version is None


def test_patience_shrinks_by_the_time_that_was_spent() -> None:
    frame = ReadRequest("newer", wait_s=5).frame(1, 2, left_s=7, spent_s=3)
    assert frame == ReadCall(call=1, handle=2, timeout_s=7, want="newer", wait_s=2)
    assert ReadRequest("newer", wait_s=5).frame(1, 2, left_s=1, spent_s=9) == ReadCall(
        call=1, handle=2, timeout_s=1, want="newer", wait_s=0
    )


@pytest.mark.parametrize("question", [UnpublishRequest(), ReleaseRequest()])
def test_after_these_a_shard_holds_nothing(question: AgentCall) -> None:
    assert question.holds(Done(call=1), 5) is None


def test_an_answer_without_a_version_leaves_what_the_shard_holds() -> None:
    assert ReadRequest("newer").holds(Done(call=1), 5) == 5
    assert ReadRequest(6).holds(Done(call=1, version=6), 5) == 6
