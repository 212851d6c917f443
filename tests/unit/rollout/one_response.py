"""A leader whose one group has two requests, driven by hand: what is placed, made and ended of the second one."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from tests.unit.span_places import place_at

from tensorhub_common.machine import Tick
from tensorhub_common.observability.trace_context import SpanRecord, TraceContext
from tensorhub_common.protocol.rollout.entries import (
    AnyEntry,
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
from tensorhub_common.protocol.rollout.messages import (
    AssignResult,
    Finished,
    Frame,
    HeldAttempt,
    PublishedVersions,
    Report,
    RunnerHeartbeat,
    Sampling,
    TokenRun,
    VersionRule,
    attempt_key,
)
from tensorhub_rollout.answers.response_story import spans_of, story_of
from tensorhub_rollout.core.leader import Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import (
    AssignAnswered,
    FrameCame,
    HeartbeatCame,
    Place,
    PromptLoaded,
    ReportCame,
    VersionsSeen,
)
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.outcomes import Outcome
from tensorhub_rollout.log.state import RolloutState

REQUEST = RequestId(3, 1)
ROOT, CAUSE = place_at(0xAAAA, 0xA1), place_at(0xBBBB, 0xB1)
LOG, TOKENS_MAX = "log", 8
CLOCK_NS = 1_000_000_000_000
"""What is added to the leader's time."""


def frame_of(
    runner: str,
    attempt: Attempt,
    start: int,
    tokens: Sequence[int],
    version: int | None = None,
    finished: Finished | None = None,
) -> FrameCame:
    """Return a frame with tokens of one attempt. `version`: they begin a run on it; None: the run goes on."""
    attempts, starts, counts = (array("q", [each]).tobytes() for each in (attempt_key(attempt), start, len(tokens)))
    body = array("i", tokens).tobytes()
    runs = () if version is None else ((attempt, TokenRun(start, version, "root", runner, attempt)),)
    ends = () if finished is None else (finished,)
    return FrameCame(runner, Frame(LOG, 1, 1, attempts, starts, counts, body, body, runs, ends))


@dataclass
class Job:
    """A leader whose one group has two requests, and the entries that it has folded. One version is published."""

    newest: int = 5
    """That version, which instances have."""
    state: RolloutState = field(default_factory=lambda: RolloutState("run-7"))
    seq: int = 0
    leader: Leader = field(init=False)

    def __post_init__(self) -> None:
        self.fold(Lead(1, "m"))
        self.fold(Attach("main", "policy", 0, "n"))
        group = GroupSubmitted("p-17", "a" * 64, 2, 1, TOKENS_MAX)
        self.fold(Submit(SdkSender(2, 1), (group,), Payload("b" * 64, 1)))
        self.lead(0.0)

    def lead(self, now: float) -> None:
        self.leader = Leader(self.state, LOG, LeaderLimits(gather_s=0.0, silence_s=100.0), now)
        self.leader.handle(VersionsSeen("policy", PublishedVersions(1, (self.newest,))), now)

    def fold(self, entry: AnyEntry) -> Outcome:
        self.seq += 1
        return fold(self.state, self.seq, entry).outcome

    def runner(self, runner: str, now: float, incarnation: int = 1, held: tuple[HeldAttempt, ...] = ()) -> None:
        beat = RunnerHeartbeat(LOG, incarnation, 0, "policy", 8, self.newest)
        self.leader.handle(HeartbeatCame(runner, beat), now)
        self.leader.handle(ReportCame(runner, Report(LOG, incarnation, held)), now)
        self.leader.handle(Tick(), now + 0.05)

    def place(self, runner: str, now: float, reason: str = "", of: RequestId = REQUEST) -> Attempt:
        self.leader.handle(Place(of, runner, reason), now)
        prompt = PromptLoaded(of, b"", Sampling(TOKENS_MAX, 7), VersionRule(), newest=self.newest)
        self.leader.handle(prompt, now)
        placement = self.leader.requests[of].placement
        assert placement is not None
        result = AssignResult(placement.attempt, placement.began_at)
        self.leader.handle(AssignAnswered(runner, 1, (result,)), now)
        return placement.attempt

    def tokens(
        self, runner: str, attempt: Attempt, start: int, number: int, now: float, finished: Finished | None = None
    ) -> None:
        self.leader.handle(frame_of(runner, attempt, start, range(number), self.newest, finished), now)

    def spans(
        self, now: float, *, submitted: float | None = 1.0, cause: TraceContext | None = None
    ) -> list[SpanRecord]:
        story = story_of(self.leader, REQUEST, now)
        assert story is not None
        taken_ns = None if submitted is None else ns(submitted)
        return list(spans_of(story, ROOT, cause, taken_ns, ns(now), CLOCK_NS, ids()))


def ns(at: float) -> int:
    return int(at * 1e9) + CLOCK_NS


def ids() -> Callable[[], str]:
    numbers = count(1)
    return lambda: f"{next(numbers):016x}"


def ended(attempt: Attempt, tokens: int) -> End:
    return End(1, (RequestEnded(REQUEST, attempt, "stop", tokens),), Payload("c" * 64, 9))
