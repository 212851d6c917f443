"""What a leader makes of a runner that sends what can't be; tests/unit/simulator/test_rollouts.py has the rest."""

from array import array

import pytest

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import (
    Attach,
    Attempt,
    GroupSubmitted,
    Lead,
    Payload,
    RequestId,
    SdkSender,
    Submit,
)
from tensorhub_common.protocol.rollout.messages import (
    AssignResult,
    Frame,
    PublishedVersions,
    Report,
    RunnerHeartbeat,
    Sampling,
    VersionRule,
    attempt_key,
    attempt_of,
)
from tensorhub_rollout.core.fold import fold
from tensorhub_rollout.core.leader import Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import (
    AnswerFrame,
    AssignAnswered,
    FrameCame,
    HeartbeatCame,
    InstanceLost,
    LeaderEffect,
    Place,
    PromptLoaded,
    ReportCame,
    StoreTokens,
    VersionsSeen,
)
from tensorhub_rollout.core.state import RolloutState

REQUEST, ATTEMPT = RequestId(3, 0), Attempt(1, 1)
LOG, RUNNER = "log", "runner-0"


@pytest.fixture
def leader() -> Leader:
    """Return a leader whose one request runs on its one runner; it may have four tokens."""
    state = RolloutState("job")
    group = GroupSubmitted("p", "a" * 64, 1, 1, 4)
    for seq, entry in enumerate(
        (Lead(1, "m"), Attach("main", "policy", 0, "n"), Submit(SdkSender(2, 1), (group,), Payload("b" * 64, 1))), 1
    ):
        fold(state, seq, entry)
    made = Leader(state, LOG, LeaderLimits(gather_s=0.0), 0.0)
    made.handle(VersionsSeen(PublishedVersions(1, (1,))), 0.0)
    made.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, 1, 0, 8, 1)), 0.0)
    made.handle(ReportCame(RUNNER, Report(LOG, 1, ())), 0.0)
    made.handle(Tick(), 0.1)
    made.handle(Place(REQUEST, RUNNER), 0.1)
    made.handle(PromptLoaded(REQUEST, b"", Sampling(4, 7), VersionRule()), 0.1)
    made.handle(AssignAnswered(RUNNER, 1, (AssignResult(ATTEMPT, 0),)), 0.1)
    return made


def frame(start: int, count: int, *, tokens: bytes | None = None, starts: bytes | None = None) -> Frame:
    body = array("i", range(count)).tobytes()
    attempts, begins, counts = (array("q", [each]).tobytes() for each in (attempt_key(ATTEMPT), start, count))
    begins = begins if starts is None else starts
    return Frame(LOG, 1, 1, attempts, begins, counts, body if tokens is None else tokens, body)


def taken(leader: Leader, said: Frame) -> list[LeaderEffect]:
    effects = leader.handle(FrameCame(RUNNER, said), 0.11)
    leader.check()
    return effects


def test_tokens_are_held_in_order_and_what_begins_behind_them_is_asked_for_again(leader: Leader) -> None:
    (gap,) = taken(leader, frame(1, 1))
    assert isinstance(gap, AnswerFrame)
    assert gap.result.resend == ((ATTEMPT, 0),)
    taken(leader, frame(0, 3))
    assert leader.responses[REQUEST].count == 3
    (kept,) = [each for each in leader.handle(Tick(), 9.0) if isinstance(each, StoreTokens)]
    assert (kept.part.start, kept.part.stop, len(kept.tokens)) == (0, 3, 12)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (frame(0, 5), "it made more than 4 tokens of a response"),
        (frame(0, 2, tokens=b"1234"), "its frame 1 can't be read"),
        (frame(-1, 2), "its frame 1 can't be read"),
        (frame(0, 2, starts=b""), "its frame 1 can't be read"),
        (frame(0, 2, starts=b"123"), "its frame 1 can't be read"),
    ],
)
def test_a_runner_that_sends_what_can_not_be_is_lost_and_its_request_waits(
    leader: Leader, said: Frame, why: str
) -> None:
    assert InstanceLost(RUNNER, why) in taken(leader, said)
    assert (leader.instances, [*leader.waiting()], leader.responses[REQUEST].count) == ({}, [REQUEST], 0)


def test_tokens_that_differ_from_those_before_lose_the_runner(leader: Leader) -> None:
    taken(leader, frame(0, 2))
    other = frame(0, 2, tokens=array("i", [0, 9]).tobytes())
    assert InstanceLost(RUNNER, "tokens 0 to 2 are not those that came before") in taken(leader, other)
    assert leader.responses[REQUEST].count == 2


def test_an_attempt_is_one_number_in_a_frame_in_the_order_of_attempts() -> None:
    attempts = [Attempt(0, 1), Attempt(0, 2**32 - 1), Attempt(1, 0), Attempt(2**31 - 1, 5)]
    keys = [attempt_key(each) for each in attempts]
    assert keys == sorted(keys)
    assert [attempt_of(each) for each in keys] == attempts
    for beyond in (Attempt(2**31, 0), Attempt(0, 2**32)):
        with pytest.raises(ValueError, match="does not fit a frame"):
            attempt_key(beyond)
