"""What a leader says of a group's responses: their states, what they wait for, and why they were placed where."""

import pytest
from tests.unit.rollout.one_response import REQUEST, TOKENS_MAX, Job, ended

from tensorhub_common.errors import BadCommand
from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import (
    AnyEntry,
    Attempt,
    Cancel,
    Done,
    GroupSubmitted,
    Lead,
    Payload,
    RequestId,
    SdkSender,
    Submit,
)
from tensorhub_common.protocol.rollout.messages import (
    AbortResult,
    Finished,
    HeldAttempt,
    PublishedVersions,
    RunnerHeartbeat,
    Sampling,
    VersionRule,
)
from tensorhub_common.protocol.rollout.questions import WHY_CHARS_MAX, RequestWhy, WhyAnswer, WhyQuestion
from tensorhub_rollout.answers import why
from tensorhub_rollout.answers.why import ENDED, GROUPS_NAMED_MAX, why_of
from tensorhub_rollout.core.leader_events import (
    AbortAnswered,
    EntryFolded,
    HeartbeatCame,
    Place,
    PromptLoaded,
    RoomSeen,
    VersionsSeen,
    Withdraw,
)
from tensorhub_rollout.core.open_requests import ENDED_MAX
from tensorhub_rollout.policy.arrival import Held

OTHER = RequestId(3, 0)


@pytest.fixture
def job() -> Job:
    return Job()


def take(job: Job, entry: AnyEntry, now: float) -> None:
    job.leader.handle(EntryFolded(job.fold(entry)), now)


def asked(job: Job, now: float, group: str = "p-17", index: int | None = 1, held: Held | None = None) -> WhyAnswer:
    return why_of(job.leader, WhyQuestion(group, index), lambda _: held, lambda *_: None, now)


def told(job: Job, now: float, held: Held | None = None) -> RequestWhy:
    """Return what is said of the second request."""
    (found,) = asked(job, now, held=held).requests
    return found


def waits_for(job: Job, held: Held | None = None) -> str:
    found = told(job, 3.0, held)
    assert (found.state, found.attempts) == ("waiting", ())
    return str(found.waits_for)


def submit(job: Job, *groups: GroupSubmitted, n: int = 2) -> None:
    take(job, Submit(SdkSender(2, n), groups, Payload("d" * 64, 1)), 1.0)


# ---------------------------------------------------------------------------------------------- attempts


def test_a_moved_request_tells_each_attempt_with_its_reasons_and_how_long_it_took(job: Job) -> None:
    job.runner("one", 1.5)
    job.runner("other", 1.5)
    first = job.place("one", 2.0, "one is done soonest")
    job.tokens("one", first, 0, 3, 3.0)
    job.leader.handle(Withdraw(REQUEST, "other", "other is done sooner"), 3.5)
    assert told(job, 3.6).waits_for == "one stops it, and then it goes to other"
    job.leader.handle(AbortAnswered("one", 1, (AbortResult(first, 3),), ()), 4.0)
    found = told(job, 6.0)
    assert (found.consumer, found.index, found.state, found.tokens) == ("main", 1, "pending", 3)
    assert found.waits_for == "its prompt is being read"
    before, now = found.attempts
    assert (before.instance, before.attempt, before.end) == ("one", Attempt(1, 1), "stopped")
    assert (before.placed_s_ago, before.lasted_s, before.first_token_s) == (4.0, 2.0, 1.0)
    assert (before.tokens_from, before.tokens_to) == (0, 3)
    assert (before.reason, before.withdrawn_why) == ("one is done soonest", "other is done sooner")
    assert (now.instance, now.end, now.placed_s_ago, now.lasted_s, now.first_token_s) == ("other", None, 2.0, 2.0, None)
    assert (now.reason, now.withdrawn_why) == ("other is done sooner", "")


def test_what_is_pending_waits_for_its_context_or_a_slot_and_what_executes_for_nothing(job: Job) -> None:
    job.runner("one", 1.5)
    attempt = job.place("one", 2.0)
    assert told(job, 2.5).waits_for == "its first token from one, which computes its context"
    beat(job, "one", 1, 2.5)
    job.leader.handle(Place(OTHER, "one"), 2.6)
    assert "2 requests are on its 1 slots" in str(told(job, 2.6).waits_for)
    job.tokens("one", attempt, 0, 2, 3.0)
    found = told(job, 3.5)
    assert (found.state, found.waits_for, found.tokens) == ("executing", None, 2)


def test_a_whole_group_is_told_in_order_with_what_is_expected_of_its_lengths(job: Job) -> None:
    job.runner("one", 1.5)
    attempt = job.place("one", 2.0)
    job.tokens("one", attempt, 0, 2, 3.0)
    answer = asked(job, 3.5, index=None)
    assert [(each.index, each.state) for each in answer.requests] == [(0, "waiting"), (1, "executing")]
    (unborn, growing) = [each.expected for each in answer.requests]
    assert unborn is not None
    assert growing is not None
    assert (unborn.knowledge, growing.knowledge) == ("running", "running")
    assert 2 <= growing.median <= growing.p90 <= TOKENS_MAX


def test_an_ended_request_tells_its_attempts_until_it_is_done(job: Job) -> None:
    job.runner("one", 1.5)
    attempt = job.place("one", 2.0, "one is free")
    job.tokens("one", attempt, 0, 4, 3.0, Finished(attempt, 4, "stop"))
    take(job, ended(attempt, 4), 4.0)
    found = told(job, 5.0)
    assert (found.state, found.ended_by, found.tokens, found.expected) == ("ended", "stop", 4, None)
    assert found.waits_for == "its trainer's done()"
    (only,) = found.attempts
    assert (only.instance, only.reason, only.end, only.lasted_s, only.placed_s_ago) == (
        "one",
        "one is free",
        "completed",
        1.0,
        3.0,
    )
    take(job, Done(SdkSender(2, 2), (REQUEST,)), 6.0)
    assert told(job, 6.0) == RequestWhy("main", 1, "ended", 0, ENDED)
    assert job.leader.open_requests.ended == {}
    take(job, Cancel(SdkSender(2, 3), ("p-17",)), 7.0)
    take(job, Done(SdkSender(2, 4), (OTHER,)), 7.0)
    assert asked(job, 7.0, index=None).is_done


def test_the_attempts_of_the_latest_ended_requests_are_remembered_and_older_ends_are_told(job: Job) -> None:
    for n in range(2, 2 + ENDED_MAX // 128 + 1):
        submit(job, GroupSubmitted(f"g-{n}", "e" * 64, 128, 1, TOKENS_MAX), n=2 * n)
        take(job, Cancel(SdkSender(2, 2 * n + 1), (f"g-{n}",)), 2.0)
    assert len(job.leader.open_requests.ended) == ENDED_MAX
    oldest, latest = (asked(job, 3.0, f"g-{n}").requests[0] for n in (2, 2 + ENDED_MAX // 128))
    assert (oldest.ended_by, oldest.waits_for) == ("cancelled", ENDED)
    assert (latest.ended_by, latest.waits_for) == ("cancelled", "its trainer's done()")


def test_a_leader_that_took_over_knows_no_reason_of_the_one_before(job: Job) -> None:
    job.runner("one", 1.5)
    attempt = job.place("one", 2.0, "one is free")
    job.fold(Lead(2, "other"))
    job.lead(5.0)
    job.runner("one", 5.0, held=(HeldAttempt(REQUEST, attempt, 0, "running"),))
    (only,) = told(job, 6.0).attempts
    assert (only.attempt, only.reason) == (attempt, "it ran there when this manager began to lead")


def test_an_answer_is_no_larger_than_a_message(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "WHY_BYTES_MAX", 1)
    told = asked(job, 0.2, index=None)
    assert [each.index for each in told.requests] == [0]
    assert told.left_out == 1


def test_long_reasons_are_cut(job: Job) -> None:
    job.runner("one", 1.5)
    job.place("one", 2.0, "x" * 10_000)
    assert told(job, 3.0).attempts[0].reason == "x" * WHY_CHARS_MAX


# ---------------------------------------------------------------------------------------------- what waits


def test_a_held_request_tells_which_instance_it_waits_for_and_when_its_version_comes(job: Job) -> None:
    job.runner("one", 1.5)
    said = "it waits for runner-3, which has the next version in about 2.1 s and is then done soonest"
    assert waits_for(job, Held(2.0, "runner-3", 2.12)) == said
    assert "fewer requests are pending on one" in waits_for(job, Held(2.0, "one", 0.0))


def beat(job: Job, runner: str, slots: int, now: float) -> None:
    job.leader.handle(HeartbeatCame(runner, RunnerHeartbeat("log", 1, 0, "policy", slots, 5)), now)


def test_without_an_instance_or_room_or_a_version_it_says_so(job: Job) -> None:
    assert waits_for(job) == "the manager has just begun to lead, and waits for all instances to say what they have"
    job.leader.handle(Tick(), 1.0)
    assert waits_for(job) == "no instance takes requests of model 'policy'"
    job.runner("one", 1.5)
    beat(job, "one", 1, 1.6)
    assert waits_for(job) == "it is placed at one of the next looks, or once fewer requests are pending"
    job.leader.handle(Place(OTHER, "one"), 2.0)
    assert waits_for(job) == "no instance has room: 1 of them may run it, and all of their slots are taken"
    job.leader.handle(PromptLoaded(OTHER, b"", Sampling(TOKENS_MAX, 7), VersionRule()), 2.0)
    job.leader.handle(VersionsSeen("policy", PublishedVersions(2, (5, 6))), 2.1)
    assert waits_for(job) == "no instance has a version on which it may begin"


def test_while_payloads_are_full_only_what_has_begun_goes_on(job: Job) -> None:
    submit(job, GroupSubmitted("later", "e" * 64, 1, 1, TOKENS_MAX))
    job.runner("one", 1.5)
    job.leader.handle(RoomSeen(100), 1.9)
    job.place("one", 2.0)
    (found,) = asked(job, 3.0, "later", 0).requests
    assert "payloads are nearly full" in str(found.waits_for)
    (found,) = asked(job, 3.0, "p-17", 0).requests
    assert "payloads" not in str(found.waits_for)


def test_one_for_a_version_alone_says_that_no_instance_has_it(job: Job) -> None:
    submit(job, GroupSubmitted("pinned", "e" * 64, 1, 1, TOKENS_MAX, version=6))
    job.runner("one", 1.5)
    (found,) = asked(job, 3.0, "pinned", 0).requests
    said = "it is for version 6 alone, which no instance that takes requests has: none is told to load it yet"
    assert found.waits_for == said


# ---------------------------------------------------------------------------------------------- errors


def test_an_unknown_group_is_told_with_a_few_that_are_open(job: Job) -> None:
    submit(job, *(GroupSubmitted(f"g-{number}", "e" * 64, 1, 1, TOKENS_MAX) for number in range(20)))
    with pytest.raises(BadCommand) as caught:
        asked(job, 1.0, "p-18")
    said = str(caught.value)
    assert said.startswith("job 'run-7' has no group 'p-18': not done yet are p-17, g-0, ")
    assert said.endswith(f"and {21 - GROUPS_NAMED_MAX} more")
    with pytest.raises(BadCommand, match="group 'p-17' has responses 0 to 1, and no 2"):
        asked(job, 1.0, index=2)
