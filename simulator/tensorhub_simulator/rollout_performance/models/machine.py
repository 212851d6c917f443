"""One instance: a production runner with a modelled engine, from when its process runs until its machine goes.

What a policy acts on goes to the leader as soon as in production: first tokens, ends, the last tokens of what was
stopped, a new version. Tokens of responses that go on, and heartbeats, go more seldom (`Pace`). What a machine that
goes without notice had not told of its responses is what it made after the last frame that production would have sent.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, Finished
from tensorhub_rollout.core.leader import LeaderLimits
from tensorhub_rollout.policy.plateau import SAMPLES_MIN
from tensorhub_runner.core.runner import Held, Runner, RunnerLimits
from tensorhub_runner.core.runner_events import (
    AbortCame,
    Begin,
    EngineStepped,
    FrameAnswered,
    HeartbeatAnswered,
    LoadWanted,
    ReportAnswered,
    RunnerEffect,
    RunnerInput,
    SendFrame,
    SendHeartbeat,
    StepTokens,
    Stop,
    WeightsChanging,
    WeightsLoaded,
)
from tensorhub_simulator.engine.agenda import Agenda
from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts
from tensorhub_simulator.rollout_performance.config.scenario import Messages
from tensorhub_simulator.rollout_performance.models.engine_model import EngineModel, Made

PRODUCTION: Final = RunnerLimits()
FRAMES_PER_S: Final = LeaderLimits().frames_per_s_max
MESSAGES_PER_S: Final = 128
"""Limit of the heartbeats of a whole fleet, and of the frames that tell of mere progress."""
MEASURED_OFTEN: Final = 2 * SAMPLES_MIN
"""Until it has told of so many steps a machine of a small fleet has heartbeats as often as in production."""
RESEND_S: Final = 5.0
HELD_AHEAD: Final = 64
"""Attempts that a runner holds beside those that run."""
LEAST_S: Final = 1e-6
"""Two looks at one machine are at least so far apart."""


@dataclass(slots=True)
class Pace:
    """How often each machine of a fleet tells what."""

    messages: Messages
    heartbeat_s: float = 0.0
    progress_s: float = 0.0
    """Tokens where nothing began or ended."""
    frames_s: float = 0.0
    """All others."""

    def __post_init__(self) -> None:
        """Begin with no machine."""
        self.follow(0)

    @property
    def is_small(self) -> bool:
        """Whether the fleet may have heartbeats as often as is said."""
        return self.heartbeat_s <= self.messages.heartbeat_s

    def follow(self, instances: int) -> None:
        """Take the size of the fleet."""
        said = self.messages
        # As a leader asks for with its answers to heartbeats.
        asked = max(PRODUCTION.flush_s, min(instances / FRAMES_PER_S, PRODUCTION.flush_s_max))
        self.frames_s = asked if said.frames_s is None else said.frames_s
        self.progress_s = max(said.progress_s, self.frames_s, instances / MESSAGES_PER_S)
        self.heartbeat_s = max(said.heartbeat_s, instances / MESSAGES_PER_S)


class _PacedRunner(Runner):
    """Production's runner, whose frames may be made to come sooner or later."""

    is_awaited: bool = False
    """Whether a leader waits for what it has to send: it was told to stop something, or gave something back."""

    def _abort(self, event: AbortCame) -> None:
        super()._abort(event)
        self.is_awaited = True

    def _finish(self, held: Held, finished: Finished) -> None:
        super()._finish(held, finished)
        self.is_awaited = True

    def flush_every(self, seconds: float) -> None:
        """Send new tokens so often from now on."""
        self._flush_s = seconds

    @property
    def flushed_at(self) -> float:
        """Return when tokens were last sent."""
        return self._flushed_at


@dataclass(slots=True)
class _Again:
    """What an attempt makes again."""

    left: int
    """Tokens."""
    shows_first: bool
    """Whether the leader is to be told of one that it has not, so that it knows that it runs."""


@dataclass(slots=True, eq=False)
class Machine:
    """What runs on it, until `is_up` is false."""

    name: str
    agenda: Agenda
    length_of: Callable[[RequestId], int]
    """How long a response will be, in tokens."""
    carry_out: Callable[["Machine", RunnerEffect], None]
    costs: EngineCosts
    pace: Pace
    is_local: bool
    is_forgetful: bool
    """Whether tokens leave it only once their response ends: what makes others compute again."""
    used_of: Callable[[RequestId, int], int]
    """With how many of the tokens that a response comes with it goes on; the others are made again."""
    began_at: float = 0.0
    is_up: bool = True
    tokens: int = 0
    """What its engine has made."""
    core: _PacedRunner = field(init=False)
    engine: EngineModel[Attempt] = field(init=False)
    _staged: int | None = None
    _pause_s: float = 0.0
    _is_changing: bool = False
    _begun: set[Attempt] = field(default_factory=set)
    """Attempts that have made a token."""
    _has_fresh: bool = False
    """Whether something runs, or is to, that has made no token."""
    _has_told: bool = True
    """Whether the leader was told of all first tokens and ends, and of what it waits for."""
    _is_known: bool = False
    """Whether the leader knows what it holds."""
    _told_version: int | None = None
    """The version that the last heartbeat told of."""
    _known_version: int | None = None
    """The same of the last one that was answered."""
    _measured: int = 0
    """How many steps its heartbeats have told of."""
    _kept: dict[Attempt, int] = field(default_factory=dict)
    """Tokens that a forgetful one has not told of."""
    _again: dict[Attempt, _Again] = field(default_factory=dict)
    """Attempts that make tokens again which the leader has already."""
    _due_at: float = math.inf
    """When time alone changes something."""
    _wakes_at: float = math.inf
    """When it looks next: not after that."""

    def start(self, model: str, version: int) -> None:
        """Run, with a version in memory."""
        now = self.agenda.now
        slots, pace = self.costs.slots, self.pace
        limits = RunnerLimits(
            slots=slots,
            held_max=2 * slots + HELD_AHEAD,
            flush_s=pace.frames_s,
            heartbeat_s=pace.messages.heartbeat_s,
            resend_s=RESEND_S,
        )
        self.core = _PacedRunner(self.name, model, 1, limits, now, is_local=self.is_local, keeps_versions=True)
        self.engine = EngineModel(self.costs, now)
        self.began_at = now
        self.tell(WeightsLoaded(version, f"root-{version}"))

    def tell(self, event: RunnerInput) -> None:
        """Give the runner an event, after all that its engine has made until now."""
        if not self.is_up:
            return
        if not isinstance(event, FrameAnswered | HeartbeatAnswered | ReportAnswered):
            # No answer asks for more tokens than have been sent.
            self._make(self.agenda.now)
            self._flush_when_due()
        self._give(event)
        if isinstance(event, HeartbeatAnswered):
            self._known_version = self._told_version
        self._flush_when_due()
        self._is_known = self._is_known or isinstance(event, ReportAnswered)
        self._beat_when_useful()
        self._load_if_staged()
        self._wake_later()

    def end(self) -> None:
        """Go without a word: what was made since the last frame was due is lost."""
        if not self.is_up:
            return
        now, last, every_s = self.agenda.now, self.core.flushed_at, self.pace.frames_s
        due_at = last + every_s * math.floor((now - last) / every_s)
        if due_at > last:
            self._make(due_at)
            self.core.flush_every(0.0)
            self._give(Tick())
        self.core.flush_every(math.inf)
        self._make(now)
        self.is_up = False

    def _make(self, until: float) -> None:
        while (made := self.engine.advance(until)) is not None:
            self._has_told = self._has_told and not made.ended and self._begun.issuperset(made.requests)
            self._begun.update(made.requests)
            self._has_fresh = bool(self.engine.waiting) or not self._begun.issuperset(self.engine.running)
            self._begun -= made.ended
            self._give(self._stepped(made))

    def _flush_when_due(self) -> None:
        """Tell of mere progress at the pace of the fleet, of all others sooner."""
        self._has_told = self._has_told and not self.core.is_awaited
        self.core.flush_every(self.pace.progress_s if self._has_told else self.pace.frames_s)

    def _beat_when_useful(self) -> None:
        """Beat at the pace of the fleet, sooner where the leader is to learn the version, and not at all without work.

        Whether one without work lives the leader is told otherwise here (`JobRun._miss`), and it learns versions of
        the hub with its next request. One that stays on its version is told to go on by the answer to a heartbeat.
        """
        if self.core.version not in (None, self._known_version):
            self._beat_every(PRODUCTION.heartbeat_s)
        elif self._is_known and not (self.core.held or self.is_local or self.stays):
            self._beat_every(math.inf)
        elif self._measured < MEASURED_OFTEN and self.pace.is_small:
            self._beat_every(PRODUCTION.heartbeat_s)
        else:
            self._beat_every(self.pace.heartbeat_s)

    def _beat_every(self, seconds: float) -> None:
        if self.core.limits.heartbeat_s != seconds:
            self.core.limits = msgspec.structs.replace(self.core.limits, heartbeat_s=seconds)

    @property
    def stays(self) -> bool:
        """Whether it keeps its version, and so fetches no newer one."""
        return self.core.version is not None and self.core.version == self.core.version_wanted

    def stage(self, version: int, pause_s: float) -> None:
        """Have a version beside the engine's; it takes its place as soon as the runner lets it."""
        if self.is_up and version != self.core.version:
            self._staged = version
            self._pause_s = pause_s
            self.tell(LoadWanted())

    def _load_if_staged(self) -> None:
        if self._staged is None or self._is_changing or not self.core.may_load:
            return
        version, self._staged, self._is_changing = self._staged, None, True
        self.engine.pause(self.agenda.now + self._pause_s)
        self._give(WeightsChanging())

        def loaded() -> None:
            self._is_changing = False
            # The leader learns its version from a heartbeat.
            self._beat_every(PRODUCTION.heartbeat_s)
            self.tell(WeightsLoaded(version, f"root-{version}"))

        self.agenda.after(self._pause_s, loaded)

    def _give(self, event: RunnerInput) -> None:
        for effect in self.core.handle(event, self.agenda.now):
            match effect:
                case Begin(attempt=attempt, prompt=prompt, tokens=tokens):
                    made, of = len(tokens) // TOKEN_BYTES, self.core.held[attempt].assign.request
                    used, length = self.used_of(of, made), self.length_of(of)
                    self._kept.pop(attempt, None)
                    if used < made:
                        self._again[attempt] = _Again(made - used, shows_first=length > made + 1)
                    self._has_fresh = True
                    self.engine.begin(attempt, len(prompt) // TOKEN_BYTES + used, length - used, self.agenda.now)
                case Stop(attempt=attempt):
                    self.engine.stop(attempt)
                    self._kept.pop(attempt, None)
                    self._again.pop(attempt, None)
                    self._begun.discard(attempt)
                case SendFrame():
                    self._has_told, self.core.is_awaited = True, False
                    self.core.flush_every(self.pace.progress_s)
                    self.carry_out(self, effect)
                case SendHeartbeat(beat=beat):
                    self._told_version = beat.version if beat.log else None
                    self._measured += len(beat.measured)
                    self.carry_out(self, effect)
                case _:
                    self.carry_out(self, effect)

    def _stepped(self, made: Made[Attempt]) -> EngineStepped:
        self.tokens += made.tokens * len(made.requests)
        if self.is_forgetful or self._again or made.ended:
            rows = [self._row(attempt, made.tokens, is_last=attempt in made.ended) for attempt in made.requests]
        else:
            body = bytes(TOKEN_BYTES * made.tokens)
            rows = [StepTokens(attempt, body, body) for attempt in made.requests]
        return EngineStepped(tuple(rows), made.step_s)

    def _row(self, attempt: Attempt, count: int, *, is_last: bool) -> StepTokens:
        if self.is_forgetful:
            # The first token shows that it runs.
            is_first = attempt not in self._kept
            kept = self._kept.get(attempt, 0) + count
            count = kept if is_last else min(1, count) if is_first else 0
            self._kept[attempt] = kept - count
        if attempt in self._again:
            count = self._new_of(attempt, count)
        body = bytes(TOKEN_BYTES * count)
        return StepTokens(attempt, body, body, Finished(attempt, 0, "stop") if is_last else None)

    def _new_of(self, attempt: Attempt, count: int) -> int:
        """Return how many of an attempt's tokens the leader is told of, where some are made again."""
        again = self._again[attempt]
        # The first token shows that it runs.
        shown = min(1, count) if again.shows_first else 0
        left = count - shown
        again.left, left = max(0, again.left - left), max(0, left - again.left)
        again.shows_first = again.shows_first and not shown
        if not again.left:
            del self._again[attempt]
        return shown + left

    def _wake_later(self) -> None:
        times = [self.core.deadline()]
        ends_at = self.engine.next_at()
        if ends_at is not None and not self._is_changing:
            times.append(ends_at)
            if self._has_fresh:
                # First tokens go with the next frame.
                frame_at = self.core.flushed_at + self.pace.frames_s
                times.append(max(self.engine.next_step_at(), frame_at))
        self._due_at = max(min(times), self.agenda.now + LEAST_S)
        if self._due_at < self._wakes_at:
            self._wake_at(self._due_at)

    def _wake_at(self, when: float) -> None:
        self._wakes_at = when

        def wake() -> None:
            if when != self._wakes_at or not self.is_up:
                return
            self._wakes_at = math.inf
            if self._due_at > when:
                self._wake_at(self._due_at)
            else:
                self.tell(Tick())

        self.agenda.at(when, wake)
