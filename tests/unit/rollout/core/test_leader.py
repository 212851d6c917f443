"""What a leader makes of a runner that sends what can't be; tests/unit/simulator/test_rollouts.py has the rest."""

from array import array

import msgspec
import pytest

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import (
    Attach,
    Attempt,
    Checkpoint,
    Done,
    End,
    GroupSubmitted,
    Lead,
    Payload,
    RequestEnded,
    RequestId,
    SdkSender,
    Submit,
)
from tensorhub_common.protocol.rollout.messages import (
    AssignResult,
    Finished,
    FinishReason,
    Frame,
    HeldAttempt,
    PublishedVersions,
    Report,
    RunnerHeartbeat,
    Sampling,
    TokenRun,
    VersionRule,
    attempt_key,
    attempt_of,
)
from tensorhub_common.protocol.rollout.questions import ReadyQuestion
from tensorhub_rollout.answers.sdk import answer_ready, has_ready
from tensorhub_rollout.core.leader import Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import (
    AnswerFrame,
    AnswerHeartbeat,
    AssignAnswered,
    EntryFolded,
    FrameCame,
    HeartbeatCame,
    InstanceLost,
    LeaderEffect,
    Place,
    PrefixLoaded,
    PromptLoaded,
    ReportCame,
    RoomSeen,
    SendAssign,
    StoreEnd,
    StoreTokens,
    VersionsSeen,
    Want,
)
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.state import RolloutState

REQUEST, ATTEMPT = RequestId(3, 0), Attempt(1, 1)
LOG, RUNNER = "log", "runner-0"


def assigned() -> Leader:
    """Return a leader that has assigned its one request to its one runner, and has no answer."""
    state = RolloutState("job")
    group = GroupSubmitted("p", "a" * 64, 1, 1, 4)
    fold(state, 1, Lead(1, "m"))
    fold(state, 2, Attach("main", "policy", 0, "n"))
    fold(state, 3, Submit(SdkSender(2, 1), (group,), Payload("b" * 64, 1)))
    made = Leader(state, LOG, LeaderLimits(gather_s=0.0), 0.0)
    made.handle(VersionsSeen("policy", PublishedVersions(1, (1,))), 0.0)
    made.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, 1, 0, "policy", 8, 1)), 0.0)
    made.handle(ReportCame(RUNNER, Report(LOG, 1, ())), 0.0)
    made.handle(Tick(), 0.1)
    made.handle(Place(REQUEST, RUNNER), 0.1)
    made.handle(PromptLoaded(REQUEST, b"", Sampling(4, 7), VersionRule()), 0.1)
    return made


@pytest.fixture
def leader() -> Leader:
    """Return a leader whose one request runs on its one runner; it may have four tokens."""
    made = assigned()
    made.handle(AssignAnswered(RUNNER, 1, (AssignResult(ATTEMPT, 0),)), 0.1)
    return made


@pytest.mark.parametrize("reason", ["superseded", "failed"])
def test_an_attempt_that_ends_before_its_assign_was_answered_is_over(reason: FinishReason) -> None:
    """The answer is lost, and the frame that says how it ended has no token of it."""
    leader = assigned()
    ended = Frame(LOG, 1, 1, finished=(Finished(ATTEMPT, 0, reason, "no"),))
    leader.handle(FrameCame(RUNNER, ended), 0.1)
    leader.check()
    assert ([*leader.view("policy").waiting], [*leader.placements]) == ([REQUEST], [])


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
    assert (leader.instances, [*leader.view("policy").waiting], leader.responses[REQUEST].count) == ({}, [REQUEST], 0)


def test_tokens_that_differ_from_those_before_lose_the_runner(leader: Leader) -> None:
    taken(leader, frame(0, 2))
    other = frame(0, 2, tokens=array("i", [0, 9]).tobytes())
    assert InstanceLost(RUNNER, "tokens 0 to 2 are not those that came before") in taken(leader, other)
    assert leader.responses[REQUEST].count == 2


def placed_again(leader: Leader, number: int, now: float) -> Attempt:
    """Have the runner back after it was lost, and the request on it once more."""
    leader.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, number, 0, "policy", 8, 1)), now)
    leader.handle(ReportCame(RUNNER, Report(LOG, number, ())), now)
    leader.handle(Place(REQUEST, RUNNER), now)
    leader.handle(PromptLoaded(REQUEST, b"", Sampling(4, 7), VersionRule(on_update="restart")), now)
    (attempt,) = leader.placements
    held = leader.responses[REQUEST].count
    leader.handle(AssignAnswered(RUNNER, number, (AssignResult(attempt, held),)), now)
    return attempt


def said_by(attempt: Attempt, number: int, start: int, *tokens: int, finished: tuple[Finished, ...] = ()) -> FrameCame:
    columns = (array("q", [each]).tobytes() for each in (attempt_key(attempt), start, len(tokens)))
    attempts, starts, counts = columns
    body = array("i", tokens).tobytes()
    return FrameCame(RUNNER, Frame(LOG, number, 1, attempts, starts, counts, body, body, (), finished))


def test_only_attempts_one_after_the_other_without_a_token_count(leader: Leader) -> None:
    """Four fail, one makes a token, and then it takes five more."""
    effects: list[LeaderEffect] = []
    for number in range(2, 11):
        assert not [each for each in effects if isinstance(each, StoreEnd)]
        attempt = placed_again(leader, number, number / 10)
        if number == 5:
            leader.handle(said_by(attempt, number, 0, 5), number / 10)
        effects = leader.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, number + 1, 0, "policy", 8, 1)), number / 10)
    (end,) = [each for each in effects if isinstance(each, StoreEnd)]
    assert (end.ended.reason, end.ended.tokens) == ("failed", 1)
    assert end.ended.error == (
        "5 attempts one after the other made no token; the last one: runner-0 was lost: it began anew"
    )


def test_requests_that_are_lost_together_fail_none_for_the_other_and_are_tried_alone() -> None:
    state = RolloutState("job")
    fold(state, 1, Lead(1, "m"))
    fold(state, 2, Attach("main", "policy", 0, "n"))
    fold(state, 3, Submit(SdkSender(2, 1), (GroupSubmitted("p", "a" * 64, 2, 1, 4),), Payload("b" * 64, 1)))
    leader = Leader(state, LOG, LeaderLimits(gather_s=0.0, attempts_max=2), 0.0)
    one, other = RequestId(3, 0), RequestId(3, 1)
    tried: list[list[RequestId]] = []
    takes_more: list[bool] = []
    ends: list[LeaderEffect] = []
    for number in range(1, 7):
        now = number / 10
        leader.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, number, 0, "policy", 8, 1)), now)
        leader.handle(ReportCame(RUNNER, Report(LOG, number, ())), now)
        now += 0.05
        leader.handle(Tick(), now)
        for of in (one, other):
            leader.handle(Place(of, RUNNER), now)
            leader.handle(PromptLoaded(of, b"", Sampling(4, 7), VersionRule()), now)
        leader.check()
        tried.append([each.request for each in leader.placements.values()])
        takes_more.append(leader.view("policy").instances[0].takes_more)
        if tried[-1] == [other]:
            (attempt,) = leader.placements
            leader.handle(said_by(attempt, number, 0, 5), now)
        ends += leader.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, number + 1, 0, "policy", 8, 1)), now)
    assert tried == [[one, other], [one, other], [one], [one], [other], [other]]
    assert takes_more == [True, True, False, False, False, True], "one has failed, and the other has made a token"
    (end,) = [each for each in ends if isinstance(each, StoreEnd)]
    assert (end.ended.request, end.ended.reason) == (one, "failed")


def test_after_a_restart_checkpoints_begin_anew(leader: Leader) -> None:
    taken(leader, frame(0, 3))
    (kept,) = [each for each in leader.handle(Tick(), 0.4 + 2.0) if isinstance(each, StoreTokens)]
    fold(leader.state, 4, Checkpoint(1, RUNNER, (kept.part,), Payload("c" * 64, 12)))
    leader.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, 1, 1, "policy", 8, 1)), 2.4)
    leader.handle(said_by(ATTEMPT, 1, 3, finished=(Finished(ATTEMPT, 3, "restart"),)), 2.4)
    attempt = placed_again(leader, 2, 2.5)
    leader.handle(said_by(attempt, 2, 0, 9, 9, 9, 9), 2.5)
    (again,) = [each for each in leader.handle(Tick(), 4.6) if isinstance(each, StoreTokens)]
    assert (again.part.attempt, again.part.start, again.part.stop) == (attempt, 0, 4)


def test_after_a_restart_and_a_move_checkpoints_have_nothing_of_what_was_dropped(leader: Leader) -> None:
    """The log has three tokens of before the restart; the attempt that is kept next began behind two of after it."""
    taken(leader, frame(0, 3))
    (kept,) = [each for each in leader.handle(Tick(), 0.4 + 2.0) if isinstance(each, StoreTokens)]
    fold(leader.state, 4, Checkpoint(1, RUNNER, (kept.part,), Payload("c" * 64, 12)))
    leader.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, 1, 1, "policy", 8, 1)), 2.4)
    leader.handle(said_by(ATTEMPT, 1, 3, finished=(Finished(ATTEMPT, 3, "restart"),)), 2.4)
    attempt = placed_again(leader, 2, 2.5)
    leader.handle(said_by(attempt, 2, 0, 9, 9), 2.5)
    moved = placed_again(leader, 3, 2.6)
    leader.handle(said_by(moved, 3, 2, 9, 9), 2.6)
    (again,) = [each for each in leader.handle(Tick(), 4.7) if isinstance(each, StoreTokens)]
    assert (again.part.attempt, again.part.start, again.part.stop) == (moved, 0, 4)


def test_tokens_of_a_retired_version_that_come_after_the_rewind_are_not_wanted(leader: Leader) -> None:
    """They were under way when the leader heard of it, or it had finished with them."""
    leader.handle(VersionsSeen("policy", PublishedVersions(2, (), ((1, 1),))), 0.11)
    attempts, starts, counts = (array("q", [each]).tobytes() for each in (attempt_key(ATTEMPT), 0, 2))
    body = array("i", [5, 6]).tobytes()
    run = (ATTEMPT, TokenRun(0, 1, "root", RUNNER, ATTEMPT))
    late = Frame(LOG, 1, 1, attempts, starts, counts, body, body, (run,), (Finished(ATTEMPT, 2, "stop"),))
    effects = leader.handle(FrameCame(RUNNER, late), 0.12)
    leader.check()
    assert not [each for each in effects if isinstance(each, StoreEnd)]
    assert leader.responses[REQUEST].count == 0
    assert [*leader.view("policy").waiting] == [REQUEST]


def test_a_request_whose_prompt_is_being_read_while_its_tokens_are_retired_begins_anew(leader: Leader) -> None:
    taken(leader, frame(0, 3))
    leader.responses[REQUEST].add_run(TokenRun(0, 1, "root", RUNNER, ATTEMPT))
    leader.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, 2, 0, "policy", 8, 3)), 0.2)
    leader.handle(ReportCame(RUNNER, Report(LOG, 2, ())), 0.2)
    leader.handle(Place(REQUEST, RUNNER), 0.2)
    leader.handle(VersionsSeen("policy", PublishedVersions(2, (3,), ((1, 2),))), 0.21)
    leader.handle(PromptLoaded(REQUEST, b"", Sampling(4, 7), VersionRule()), 0.22)
    leader.check()
    assert (leader.responses[REQUEST].count, [*leader.view("policy").waiting]) == (0, [REQUEST])


def test_an_adopted_attempt_is_kept_whole_where_the_log_has_an_earlier_one(leader: Leader) -> None:
    """The leader before may have begun the response anew in between: nothing says that the log's tokens are of it."""
    taken(leader, frame(0, 3))
    (kept,) = [each for each in leader.handle(Tick(), 0.4 + 2.0) if isinstance(each, StoreTokens)]
    fold(leader.state, 4, Checkpoint(1, RUNNER, (kept.part,), Payload("c" * 64, 12)))
    fold(leader.state, 5, Lead(2, "m"))
    new = Leader(leader.state, LOG, LeaderLimits(gather_s=0.0), 3.0)
    later, other = Attempt(1, 7), "runner-1"
    new.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, 1, 0, "policy", 8, 1)), 3.0)
    new.handle(ReportCame(RUNNER, Report(LOG, 1, (HeldAttempt(REQUEST, later, 2, "stopped"),))), 3.0)
    new.handle(said_by(later, 1, 0, 9, 9), 3.0)
    new.handle(HeartbeatCame(other, RunnerHeartbeat(LOG, 1, 0, "policy", 8, 1)), 3.1)
    new.handle(ReportCame(other, Report(LOG, 1, ())), 3.1)
    new.handle(Tick(), 3.15)
    new.handle(Place(REQUEST, other), 3.2)
    new.handle(PromptLoaded(REQUEST, b"", Sampling(4, 7), VersionRule()), 3.2)
    (moved,) = new.placements
    new.handle(AssignAnswered(other, 1, (AssignResult(moved, 2),)), 3.2)
    attempts, starts, counts = (array("q", [each]).tobytes() for each in (attempt_key(moved), 2, 1))
    body = array("i", [9]).tobytes()
    new.handle(FrameCame(other, Frame(LOG, 1, 1, attempts, starts, counts, body, body)), 3.2)
    said = [*new.handle(Tick(), 5.2), *new.handle(Tick(), 5.25)]
    (again,) = [each for each in said if isinstance(each, StoreTokens)]
    assert (again.part.attempt, again.part.start, again.part.stop) == (moved, 0, 3)


def test_a_runner_that_is_heard_by_a_frame_is_waited_for(leader: Leader) -> None:
    """Its first heartbeat to a new leader may be late; its report counts before that."""
    new = Leader(leader.state, LOG, LeaderLimits(gather_s=0.1), 1.0)
    (asked,) = new.handle(FrameCame(RUNNER, frame(0, 3)), 1.05)
    assert isinstance(asked, AnswerFrame)
    assert asked.result.wants_report
    new.handle(Tick(), 1.2)
    assert [*new.view("policy").waiting] == []
    new.handle(ReportCame(RUNNER, Report(LOG, 1, (HeldAttempt(REQUEST, ATTEMPT, 3, "running"),))), 1.21)
    new.handle(Tick(), 1.25)
    assert ([*new.view("policy").waiting], [*new.placements]) == ([], [ATTEMPT])


def test_a_prefix_that_is_read_twice_takes_no_token_away(leader: Leader) -> None:
    taken(leader, frame(0, 3))
    leader.handle(PrefixLoaded(REQUEST, b"", b"", ()), 0.12)
    assert leader.responses[REQUEST].count == 3


def test_an_attempt_is_one_number_in_a_frame_in_the_order_of_attempts() -> None:
    attempts = [Attempt(0, 1), Attempt(0, 2**32 - 1), Attempt(1, 0), Attempt(2**31 - 1, 5)]
    keys = [attempt_key(each) for each in attempts]
    assert keys == sorted(keys)
    assert [attempt_of(each) for each in keys] == attempts
    for beyond in (Attempt(2**31, 0), Attempt(0, 2**32)):
        with pytest.raises(ValueError, match="does not fit a frame"):
            attempt_key(beyond)


def test_payloads_are_full_while_what_has_ended_is_not_done_and_nothing_else_can_begin() -> None:
    state = RolloutState("job")
    limits = LeaderLimits(gather_s=0.0)
    first, second = (GroupSubmitted(name, "a" * 64, 1, 1, 4) for name in ("p", "q"))
    fold(state, 1, Lead(1, "m"))
    fold(state, 2, Attach("main", "policy", 0, "n"))
    fold(state, 3, Submit(SdkSender(2, 1), (first, second), Payload("b" * 64, 1)))
    leader = Leader(state, LOG, limits, 0.0)
    asked = ReadyQuestion(2, 3)

    def is_full(now: float) -> bool:
        leader.handle(Tick(), now)
        return answer_ready(state, asked, {}, {}, is_full=leader.open_requests.is_full()).is_full

    leader.handle(RoomSeen(100), 0.1)
    assert not is_full(10.0)
    end = End(1, (RequestEnded(REQUEST, ATTEMPT, "stop", 4),), Payload("c" * 64, 70))
    leader.handle(EntryFolded(fold(state, 4, end).outcome), 11.0)
    assert is_full(20.0)
    # The next leader does not know yet what runners have.
    successor = Leader(state, LOG, limits, 20.0)
    successor.handle(RoomSeen(100), 20.0)
    assert not successor.open_requests.is_full()
    successor.handle(Tick(), 21.0)
    assert successor.open_requests.is_full()
    # Another consumer that has something which is not done may make room, and one that has nothing can't.
    fold(state, 5, Attach("other", "policy", 0, "o"))
    assert is_full(30.0)
    state.consumers["other"].ended[6] = [RequestId(6, 0)]
    assert not is_full(40.0)
    state.consumers["other"].ended.clear()
    assert is_full(50.0)
    fold(state, 7, Done(SdkSender(2, 2), (REQUEST,)))
    # At once, and not only when the leader looks the next time.
    assert not answer_ready(state, asked, {}, {}, is_full=leader.open_requests.is_full()).is_full


def test_groups_begin_one_by_one_until_payloads_have_no_room_and_what_has_begun_goes_on() -> None:
    """A policy that saw room for all of them asks for all at once; a group of which one request has ended has begun."""
    state = RolloutState("job")
    groups = tuple(GroupSubmitted(name, "a" * 64, 2, 1, 4) for name in ("p", "q", "r"))
    fold(state, 1, Lead(1, "m"))
    fold(state, 2, Attach("main", "policy", 0, "n"))
    fold(state, 3, Submit(SdkSender(2, 1), groups, Payload("b" * 64, 1)))
    # So one request of the first group has ended, and the other one waits.
    fold(state, 4, End(1, (RequestEnded(RequestId(3, 0), ATTEMPT, "stop", 4),), Payload("c" * 64, 9)))
    leader = Leader(state, LOG, LeaderLimits(gather_s=0.0), 0.0)
    leader.handle(VersionsSeen("policy", PublishedVersions(1, (1,))), 0.0)
    leader.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, 1, 0, "policy", 8, 1)), 0.0)
    leader.handle(ReportCame(RUNNER, Report(LOG, 1, ())), 0.0)
    leader.handle(Tick(), 0.1)
    # 10 bytes are there, 32 are for the rest of the first group, and 64 for each of the others; 70 are the bound.
    leader.handle(RoomSeen(100), 0.1)
    for index in (2, 4, 1):
        leader.handle(Place(RequestId(3, index), RUNNER), 0.1)
    placed = {of.index for of, request in leader.requests.items() if request.placement is not None}
    assert placed == {2, 1}
    assert [of.index for of in leader.view("policy").waiting] == [3]
    assert not leader.open_requests.is_full()
    # There is more room, and before the next look a submission takes it.
    leader.handle(RoomSeen(200), 0.1)
    assert [of.index for of in leader.view("policy").waiting] == [3, 4, 5]
    fold(state, 5, Submit(SdkSender(2, 2), (GroupSubmitted("s", "a" * 64, 1, 1, 4),), Payload("d" * 64, 80)))
    leader.handle(Place(RequestId(3, 4), RUNNER), 0.1)
    assert leader.requests[RequestId(3, 4)].placement is None
    # An operator takes the limit away.
    leader.handle(RoomSeen(0), 0.1)
    assert [of.index for of in leader.view("policy").waiting] == [3, 4, 5]


def pinned(
    version: int,
    *,
    published: tuple[int, ...],
    holding: int | None,
    gather_s: float = 0.0,
    available: tuple[int, ...] = (),
    requests: int = 1,
) -> Leader:
    """Return a leader whose requests are for a version alone, with one runner that has `holding`."""
    state = RolloutState("job")
    fold(state, 1, Lead(1, "m"))
    fold(state, 2, Attach("main", "policy", 0, "n"))
    group = GroupSubmitted("p", "a" * 64, requests, 1, 4, version=version)
    fold(state, 3, Submit(SdkSender(2, 1), (group,), Payload("b" * 64, 1)))
    made = Leader(state, LOG, LeaderLimits(gather_s=gather_s), 0.0)
    made.handle(VersionsSeen("policy", PublishedVersions(1, published), frozenset(available)), 0.0)
    assert not [each for each in holds(made, holding, 0.0) if isinstance(each, StoreEnd)], "no runner has reported yet"
    made.handle(ReportCame(RUNNER, Report(LOG, 1, ())), 0.0)
    return made


def holds(leader: Leader, version: int | None, now: float, *, keeps_versions: bool = False) -> list[LeaderEffect]:
    beat = RunnerHeartbeat(LOG, 1, 0, "policy", 8, version, keeps_versions=keeps_versions)
    effects = leader.handle(HeartbeatCame(RUNNER, beat), now)
    leader.check()
    return effects


def errors(effects: list[LeaderEffect]) -> list[str | None]:
    return [each.ended.error for each in effects if isinstance(each, StoreEnd)]


GONE = (
    "it was for version 1 alone, which no instance holds: the newest is 2, and the hub does not have it "
    "(`retain` or `pin` keeps a version)"
)


def test_what_waits_for_a_version_fails_once_the_last_instance_goes_on_from_it() -> None:
    leader = pinned(1, published=(1, 2), holding=1)
    assert errors(leader.handle(Tick(), 0.1)) == []
    assert [*leader.view("policy").first_waiting(9)] == [REQUEST]
    assert errors(holds(leader, None, 0.2)) == [GONE]
    assert [*leader.view("policy").first_waiting(9)] == []


def wanted(effects: list[LeaderEffect]) -> list[int | str | None]:
    return [each.result.version_wanted for each in effects if isinstance(each, AnswerHeartbeat)]


def test_what_the_hub_still_has_is_waited_for_where_an_instance_can_load_it() -> None:
    leader = pinned(1, published=(1, 2), holding=2, available=(1, 2), gather_s=0.2)
    assert errors(holds(leader, 2, 0.1, keeps_versions=True)) == []
    assert leader.view("policy").instances[0].keeps_versions is False, "no reports are in yet"
    assert wanted(holds(leader, 2, 0.3, keeps_versions=True)) == [None], "no policy has said anything yet"
    view = leader.view("policy")
    assert (view.demand, view.newest, view.available) == ({1: 1}, 2, frozenset({1, 2}))
    assert [*view.first_waiting(9)] == []
    leader.handle(Want(RUNNER, 1), 0.4)
    assert leader.view("policy").instances[0].takes_more is False, "it is about to change"
    assert wanted(holds(leader, None, 0.5, keeps_versions=True)) == [1]
    assert wanted(holds(leader, 1, 0.6, keeps_versions=True)) == [1]
    assert [*leader.view("policy").first_waiting(9)] == [REQUEST]
    gone = leader.handle(VersionsSeen("policy", PublishedVersions(2, (1, 2)), frozenset({2})), 0.7)
    assert errors(gone) == [], "the instance has it"
    leader.handle(Want(RUNNER, "newest"), 0.8)
    assert errors(holds(leader, 2, 0.9, keeps_versions=True)) == [GONE]


def test_a_version_that_is_being_loaded_counts_as_there_also_where_its_source_has_left() -> None:
    leader = pinned(1, published=(1, 2), holding=2, available=(1, 2), gather_s=0.1)
    holds(leader, 2, 0.1, keeps_versions=True)
    leader.handle(Want(RUNNER, 1), 0.2)
    holds(leader, None, 0.3, keeps_versions=True)
    assert errors(leader.handle(VersionsSeen("policy", PublishedVersions(2, (1, 2)), frozenset({2})), 0.4)) == []
    assert errors(holds(leader, 2, 0.5, keeps_versions=True)) == [GONE], "it could not be loaded"


def test_what_waits_for_a_version_fails_where_the_last_instance_is_lost_with_it() -> None:
    leader = pinned(1, published=(1, 2), holding=1, requests=2)
    leader.handle(Tick(), 0.1)
    leader.handle(Place(REQUEST, RUNNER), 0.1)
    lost = [*leader.handle(Tick(), 0.3), *leader.handle(Tick(), 0.5), *leader.handle(Tick(), 0.7)]
    assert [each.runner for each in lost if isinstance(each, InstanceLost)] == [RUNNER]
    assert errors(lost) == [GONE, GONE], "the one that was placed there, and the one that waited for it"


def test_what_is_for_a_version_that_the_trainer_has_gone_back_behind_fails_at_once() -> None:
    leader = pinned(2, published=(1, 2), holding=2, available=(1, 2))
    leader.handle(Tick(), 0.1)
    rewound = leader.handle(VersionsSeen("policy", PublishedVersions(2, (1,), ((2, 2),)), frozenset({1})), 0.2)
    assert errors(rewound) == ["it was for version 2 alone, which the trainer has gone back behind"]
    assert leader.view("policy").demand == {}
    leader = pinned(2, published=(2,), holding=2, available=(2,))
    leader.handle(Tick(), 0.1)
    nothing_left = leader.handle(VersionsSeen("policy", PublishedVersions(2, (), ((1, 2),)), frozenset()), 0.2)
    assert errors(nothing_left) == ["it was for version 2 alone, which the trainer has gone back behind"]


def test_where_instances_follow_the_newest_version_alone_what_is_for_an_older_one_fails() -> None:
    leader = pinned(1, published=(1, 2), holding=2, available=(1, 2), gather_s=0.1)
    (failed,) = errors(leader.handle(Tick(), 0.2))
    assert str(failed).endswith("the newest is 2, and these instances follow the newest one alone")


def test_what_comes_back_for_a_version_that_is_gone_meanwhile_fails() -> None:
    leader = pinned(1, published=(1, 2), holding=1)
    leader.handle(Tick(), 0.1)
    leader.handle(Place(REQUEST, RUNNER), 0.1)
    assert errors(holds(leader, 2, 0.2)) == [], "its attempt is under way"
    (failed,) = errors(leader.handle(PromptLoaded(REQUEST, b"", Sampling(4, 7), VersionRule(1)), 0.2))
    assert failed == GONE


def test_a_new_leader_fails_nothing_before_it_knows_who_has_what() -> None:
    leader = pinned(1, published=(1, 2), holding=None, gather_s=0.5)
    assert errors(leader.handle(Tick(), 0.2)) == []
    holds(leader, 1, 0.4)
    assert errors(leader.handle(Tick(), 0.6)) == []
    assert [*leader.view("policy").first_waiting(9)] == [REQUEST]


def test_what_waits_for_a_version_to_come_is_shown_to_no_policy_and_waits() -> None:
    leader = pinned(3, published=(1, 2), holding=2)
    assert errors(leader.handle(Tick(), 0.1)) == []
    assert [*leader.view("policy").first_waiting(9)] == []
    holds(leader, 3, 0.2)
    assert [*leader.view("policy").first_waiting(9)] == [REQUEST]


def test_the_larger_the_fleet_the_more_seldom_frames_are_asked_for() -> None:
    state = RolloutState("job")
    fold(state, 1, Lead(1, "m"))
    leader = Leader(state, LOG, LeaderLimits(frames_per_s_max=100), 0.0)
    asked = []
    for number in range(50):
        (answer,) = leader.handle(HeartbeatCame(f"r{number}", RunnerHeartbeat(LOG, 1, 0, "policy", 8, 1)), 0.0)
        assert isinstance(answer, AnswerHeartbeat)
        asked.append(answer.result.flush_s)
    assert (asked[0], asked[-1]) == (0.01, 0.5)


def test_nothing_is_placed_on_an_engine_without_a_slot() -> None:
    leader = assigned()
    leader.handle(HeartbeatCame("none", RunnerHeartbeat(LOG, 1, 0, "policy", 0, 1)), 0.0)
    leader.handle(ReportCame("none", Report(LOG, 1, ())), 0.0)
    takes = {each.runner: each.takes_more for each in leader.view("policy").instances}
    assert takes == {RUNNER: True, "none": False}


def test_a_long_prompt_leaves_room_for_the_tokens_that_are_to_follow_it() -> None:
    """Each part of a prefix carries the prompt: with a token a part, a move would take as many messages as tokens."""
    state = RolloutState("job")
    fold(state, 1, Lead(1, "m"))
    fold(state, 2, Attach("main", "policy", 0, "n"))
    group = GroupSubmitted("p", "a" * 64, 1, 100_000, 20_000)
    fold(state, 3, Submit(SdkSender(2, 1), (group,), Payload("b" * 64, 1)))
    limits = LeaderLimits(gather_s=0.0)
    leader = Leader(state, LOG, limits, 0.0)
    leader.handle(VersionsSeen("policy", PublishedVersions(1, (1,))), 0.0)
    leader.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, 1, 0, "policy", 8, 1)), 0.0)
    held = bytes(4 * 10_000)
    leader.handle(ReportCame(RUNNER, Report(LOG, 1, ())), 0.0)
    leader.handle(Tick(), 0.1)
    leader.handle(Place(REQUEST, RUNNER), 0.1)
    leader.handle(PromptLoaded(REQUEST, bytes(4 * 100_000), Sampling(20_000, 7), VersionRule()), 0.1)
    leader.handle(AssignAnswered(RUNNER, 1, (AssignResult(ATTEMPT, 0),)), 0.1)
    attempts, starts, counts = (array("q", [each]).tobytes() for each in (attempt_key(ATTEMPT), 0, 10_000))
    run = TokenRun(0, 1, "root", RUNNER, ATTEMPT)
    leader.handle(FrameCame(RUNNER, Frame(LOG, 1, 1, attempts, starts, counts, held, held, ((ATTEMPT, run),))), 0.1)
    assert leader.responses[REQUEST].count == 10_000
    leader.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, 2, 0, "policy", 8, 1)), 0.2)
    leader.handle(ReportCame(RUNNER, Report(LOG, 2, ())), 0.2)
    leader.handle(Place(REQUEST, RUNNER), 0.2)
    effects = leader.handle(PromptLoaded(REQUEST, bytes(4 * 100_000), Sampling(20_000, 7), VersionRule()), 0.2)
    (assign,) = [part for each in effects if isinstance(each, SendAssign) for part in each.request.assigns]
    assert (assign.prefix, len(assign.tokens) // 4) == (10_000, limits.prefix_tokens_min)


def test_the_rate_of_an_instance_that_came_anew_counts_what_it_made_itself(leader: Leader) -> None:
    taken(leader, frame(0, 3))
    leader.handle(Tick(), 2.0)
    leader.handle(HeartbeatCame(RUNNER, RunnerHeartbeat(LOG, 2, 0, "policy", 8, 1)), 2.1)
    leader.handle(Tick(), 4.0)
    assert leader.instances[RUNNER].tokens_per_s == 0


def test_what_is_open_is_counted_of_the_groups_that_are_asked_about() -> None:
    state = RolloutState("job")
    fold(state, 1, Lead(1, "m"))
    fold(state, 2, Attach("main", "policy", 0, "n"))
    groups = tuple(GroupSubmitted(name, "a" * 64, 2, 1, 4) for name in ("over", "open"))
    fold(state, 3, Submit(SdkSender(2, 1), groups, Payload("b" * 64, 1)))
    fold(state, 4, End(1, tuple(RequestEnded(RequestId(3, index), None, "failed", 0, "no") for index in range(2))))
    said = {
        asked: answer_ready(state, ReadyQuestion(2, 4, groups=asked), {}, {}).open
        for asked in (None, (), ("over",), ("open", "over"), ("unknown",))
    }
    assert said == {None: 2, (): 0, ("over",): 0, ("open", "over"): 2, ("unknown",): 0}
    behind = ReadyQuestion(2, 4, 4, RequestId(3, 1))
    assert not has_ready(state, behind)
    assert has_ready(state, msgspec.structs.replace(behind, groups=("over",)))
