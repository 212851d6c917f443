"""One runner: the attempts that it holds, their tokens, and what the leader has of them. Pure.

Invariants (`check`):
- An attempt runs only once its whole prefix is here, and begins only on a version that its rule allows.
- Tokens of an attempt stay here until a leader says that they may be forgotten.
- An attempt that was stopped or forgotten never begins again, however late its assign comes.
- A token's run names the version that was in the engine's memory at that step.
- While no weights are in memory the engine has no attempt, and what comes goes back to the leader.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import (
    TOKEN_BYTES,
    AbortResult,
    Assign,
    AssignRequest,
    AssignResult,
    EngineStep,
    Finished,
    Frame,
    HeldAttempt,
    HeldState,
    Kv,
    PublishedVersions,
    Report,
    RunEngine,
    RunnerHeartbeat,
    TokenRun,
    attempt_key,
)
from tensorhub_runner.core.runner_events import (
    AbortCame,
    AnswerAbort,
    AnswerAssign,
    AssignCame,
    Begin,
    EngineStepped,
    FrameAnswered,
    HeartbeatAnswered,
    LoadWanted,
    PreemptionNoticed,
    ReportAnswered,
    RunnerEffect,
    RunnerInput,
    SendFrame,
    SendHeartbeat,
    SendReport,
    StepTokens,
    Stop,
    WeightsChanging,
    WeightsComing,
    WeightsLoaded,
)


class RunnerLimits(msgspec.Struct, frozen=True):
    """The bounds of a runner; times in seconds."""

    slots: int = 64
    """How many requests run at once."""
    held_max: int = 1024
    """Limit of the attempts that it holds; what is assigned beyond is refused."""
    flush_s: float = 0.05
    """New tokens are sent so often, or as seldom as the leader of a large fleet asks for."""
    flush_s_max: float = 2.0
    """Limit of what a leader may ask for."""
    heartbeat_s: float = 0.1
    resend_s: float = 0.25
    """What was not answered is sent again."""
    measured_max: int = 8
    """Limit of the engine steps that a heartbeat tells of."""
    progress_min: int = 1
    """An attempt makes as many tokens after a change of weights before the next one."""
    frames_ahead_max: int = 8
    """Limit of the frames without an answer."""
    frame_tokens_max: int = 65_536
    """Limit of the tokens of one frame: half a MiB with their log-probabilities, and NATS takes one."""
    ended_kept_max: int = 65_536
    """Limit of the ended attempts that are remembered, the latest, so that no late assign begins one again."""


@dataclass(slots=True, eq=False)
class Held:
    """One attempt."""

    assign: Assign
    tokens: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    runs: list[TokenRun] = field(default_factory=list)
    began_at: int = 0
    """How many tokens were here when the engine began with it last."""
    is_running: bool = False
    is_stopped: bool = False
    finished: Finished | None = None
    is_finish_sent: bool = False
    sent: int = 0
    """How many tokens are sent or need not be."""

    @property
    def count(self) -> int:
        """How many tokens are here, those of the prefix among them."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def made(self) -> int:
        """How many tokens were made here."""
        return max(0, self.count - self.assign.prefix)

    @property
    def is_whole(self) -> bool:
        """Whether the whole prefix is here."""
        return self.count >= self.assign.prefix

    @property
    def waits(self) -> bool:
        """Whether it is to begin."""
        return self.is_whole and not (self.is_running or self.is_stopped or self.finished is not None)

    @property
    def state(self) -> HeldState:
        """What a report says of it."""
        if self.finished is not None:
            return "finished"
        return "stopped" if self.is_stopped else "running"


class Runner:
    """The runner of one engine under one incarnation."""

    def __init__(
        self,
        name: str,
        model: str,
        incarnation: int,
        limits: RunnerLimits,
        now: float,
        *,
        is_local: bool = False,
        keeps_versions: bool = False,
    ) -> None:
        """Hold nothing yet.

        `is_local`: the engine is the trainer's own. `keeps_versions`: the version that a leader wants is loaded.
        """
        self.name, self.model, self.incarnation, self.limits = name, model, incarnation, limits
        self._is_local, self._keeps_versions = is_local, keeps_versions
        self.log = ""
        """The latest log that a leader has named; empty before the first. Later ones are higher as text."""
        self.term = 0
        """The highest that was heard."""
        self.version: int | None = None
        """What is in the engine's memory; None while it changes, and while nothing is."""
        self.is_changing = False
        self.root = ""
        self._engine: RunEngine | None = None
        self.version_wanted: int | None = None
        """What the leader wants to be in memory, and kept there; None: the newest."""
        self.versions = PublishedVersions(0)
        self.steps = 0
        self.is_leaving = False
        self.is_enough = False
        """Whether a leader has said that a trainer's own engine may stop."""
        self._comes_at: float | None = None
        """When the next version is here, as it was told last."""
        self.wants_load = False
        self.held: dict[Attempt, Held] = {}
        self._running: dict[Attempt, Held] = {}
        """Of these, what the engine makes tokens of."""
        self._waiting: dict[Attempt, Held] = {}
        """And what is to begin: all events ask for both, and few change much of them."""
        self._may_have_news = False
        """Whether something may be to be sent; False: nothing is."""
        self._ended: dict[Attempt, None] = {}
        self._frame = 0
        self._made_forgotten = 0
        """Tokens that were made here of attempts that are forgotten."""
        self._measured: list[EngineStep] = []
        """Since the last heartbeat."""
        self._unanswered: dict[int, tuple[float, list[tuple[Attempt, int]]]] = {}
        """Frames without an answer: when each was sent, and where its rows began."""
        self._flush_s = limits.flush_s
        self._flushed_at = self._beaten_at = now - 3600.0
        self._effects: list[RunnerEffect] = []
        self._now = now
        self._handlers: Final[Mapping[type, Callable[[Any], None]]] = {
            AbortCame: self._abort,
            AssignCame: self._assign,
            EngineStepped: self._stepped,
            FrameAnswered: self._frame_answered,
            HeartbeatAnswered: self._heartbeat_answered,
            LoadWanted: self._load_wanted,
            PreemptionNoticed: self._preemption_noticed,
            ReportAnswered: self._report_answered,
            WeightsChanging: self._weights_changing,
            WeightsComing: self._weights_coming,
            WeightsLoaded: self._weights_loaded,
        }

    # ------------------------------------------------------------------------------------------ machine

    def handle(self, event: RunnerInput, now: float) -> list[RunnerEffect]:
        """Take one event and say what to do. `Begin` and `Stop` come before the next step of the engine."""
        self._now = now
        if not isinstance(event, Tick):
            self._handlers[type(event)](event)
        self._begin_waiting()
        self._on_time()
        effects, self._effects = self._effects, []
        return effects

    def deadline(self) -> float:
        """Return when time alone changes something."""
        times = [self._beaten_at + self.limits.heartbeat_s]
        if self._has_news():
            times.append(self._flushed_at + self._flush_s)
        times += [sent_at + self.limits.resend_s for sent_at, _ in self._unanswered.values()]
        return min(times)

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        running = [each for each in self.held.values() if each.is_running]
        assert self._running == {attempt: each for attempt, each in self.held.items() if each.is_running}
        assert self._waiting == {attempt: each for attempt, each in self.held.items() if each.waits}
        assert self._may_have_news or not self._has_news()
        assert len(running) <= self.limits.slots
        assert all(each.is_whole and each.finished is None and not each.is_stopped for each in running)
        assert not running or self.version is not None or self.is_changing
        assert not self.held.keys() & self._ended.keys()
        assert len(self._unanswered) <= self.limits.frames_ahead_max
        for held in self.held.values():
            assert held.sent <= held.count
            assert len(held.tokens) == len(held.logprobs)

    @property
    def is_drained(self) -> bool:
        """Whether nothing of it runs or waits here, and a leader has all tokens."""
        return all(each.state != "running" for each in self.held.values()) and not (
            self._has_news() or self._unanswered
        )

    @property
    def may_load(self) -> bool:
        """Whether weights may change now.

        What must end on its version has ended, and what began last has made a token: versions that come faster than
        prompts are computed would else keep it from ever making one.
        """
        return not self._is_kept and not any(
            each.assign.rule.on_update == "finish" or each.count < each.began_at + self.limits.progress_min
            for each in self._running.values()
        )

    @property
    def _is_kept(self) -> bool:
        """Whether the version in memory is to stay, whatever is published; a retired one is of no use."""
        wanted = self.version_wanted
        return wanted is not None and wanted == self.version and not self.versions.is_retired(wanted)

    # ------------------------------------------------------------------------------------------ metrics

    # A thread of the metrics page reads these while the event loop goes on, so they copy what they walk through.

    @property
    def frames(self) -> int:
        """How many frames were sent."""
        return self._frame

    @property
    def unanswered(self) -> int:
        """How many of these have no answer yet."""
        return len(self._unanswered)

    @property
    def tokens(self) -> int:
        """How many tokens were made here."""
        return self._made_forgotten + sum(each.made for each in list(self.held.values()))

    def states(self) -> Counter[str]:
        """Return how many attempts are running, waiting, stopped and finished."""
        found = Counter(running=0, waiting=0, stopped=0, finished=0)
        for each in list(self.held.values()):
            is_waiting = each.state == "running" and not each.is_running
            found["waiting" if is_waiting else each.state] += 1
        return found

    # ------------------------------------------------------------------------------------------ the leader

    def _hears(self, log: str, term: int, incarnation: int) -> bool:
        """Tell whether a message is from the highest leader that was heard, and for this process."""
        if log != self.log or incarnation != self.incarnation or term < self.term:
            return False
        self._hear_term(term)
        return True

    def _hear_term(self, term: int) -> None:
        if term > self.term:
            self.term = term
            self._report()

    def _assign(self, event: AssignCame) -> None:
        request: AssignRequest = event.request
        if not self._hears(request.log, request.term, request.incarnation):
            return
        self._see(request.versions)
        self._effects.append(AnswerAssign(tuple(self._take(each) for each in request.assigns)))

    def _take(self, assign: Assign) -> AssignResult:
        attempt = assign.attempt
        if attempt in self._ended:
            return AssignResult(attempt, 0, "the attempt ended before its assign came")
        held = self.held.get(attempt)
        if held is None:
            if self.is_leaving or len(self.held) >= self.limits.held_max:
                return AssignResult(attempt, 0, "the machine goes away" if self.is_leaving else "there is no room")
            held = self.held[attempt] = Held(assign, runs=list(assign.runs))
        if not held.is_whole and assign.start <= held.count:
            skip = TOKEN_BYTES * (held.count - assign.start)
            held.tokens += assign.tokens[skip:]
            held.logprobs += assign.logprobs[skip:]
            held.sent = held.count
        if held.waits:
            self._waiting[attempt] = held
        return AssignResult(attempt, min(held.count, assign.prefix))

    def _abort(self, event: AbortCame) -> None:
        request = event.request
        if not self._hears(request.log, request.term, request.incarnation):
            return
        stopped = []
        for attempt in request.stop:
            held = self.held.get(attempt)
            if held is not None and held.is_whole:
                self._leave(attempt, held)
                self._waiting.pop(attempt, None)
                held.is_stopped = True
                stopped.append(AbortResult(attempt, held.count))
            else:
                self._forget(attempt)
                stopped.append(AbortResult(attempt, None))
        for attempt in request.forget:
            self._forget(attempt)
        self._effects.append(AnswerAbort(tuple(stopped), request.forget))

    def _leave(self, attempt: Attempt, held: Held) -> None:
        if held.is_running:
            held.is_running = False
            del self._running[attempt]
            self._effects.append(Stop(attempt))

    def _finish(self, held: Held, finished: Finished) -> None:
        """Note how an attempt that does not run any more has ended."""
        held.finished = finished
        self._waiting.pop(finished.attempt, None)
        self._may_have_news = True

    def _forget(self, attempt: Attempt) -> None:
        held = self.held.pop(attempt, None)
        if held is not None:
            self._leave(attempt, held)
            self._waiting.pop(attempt, None)
            self._made_forgotten += held.made
        self._ended[attempt] = None
        if len(self._ended) > self.limits.ended_kept_max:
            del self._ended[next(iter(self._ended))]

    def _heartbeat_answered(self, event: HeartbeatAnswered) -> None:
        if event.result.log > self.log:
            self._serve(event.result.log)
            return
        if event.result.log < self.log or event.result.term < self.term:
            return
        self._flush_s = max(self.limits.flush_s, min(event.result.flush_s, self.limits.flush_s_max))
        is_new = event.result.term > self.term
        self._hear_term(event.result.term)
        self._see(event.result.versions)
        wanted = event.result.version_wanted
        if wanted is not None and self._keeps_versions:
            self.version_wanted = None if wanted == "newest" else wanted
        self.is_enough = self.is_enough or event.result.is_enough
        if event.result.wants_report and not is_new:
            self._report()

    def _serve(self, log: str) -> None:
        """Go over to a log: the job is new to this runner, or was made anew, and knows no attempt of the one before."""
        for attempt in [*self.held]:
            self._forget(attempt)
        self._ended.clear()
        self._unanswered.clear()
        self.log, self.term, self.versions, self.version_wanted = log, 0, PublishedVersions(0), None
        self._beat()

    def _see(self, versions: PublishedVersions) -> None:
        if versions.seq < self.versions.seq:
            return
        self.versions = versions
        if self.version is not None and versions.is_retired(self.version):
            # The trainer has gone back behind what runs here.
            for attempt, held in self.held.items():
                if held.is_running:
                    self._supersede(attempt, held)

    def _report(self) -> None:
        held = tuple(
            HeldAttempt(each.assign.request, attempt, each.count, each.state)
            for attempt, each in self.held.items()
            if each.is_whole
        )
        self._effects.append(SendReport(Report(self.log, self.incarnation, held)))

    def _report_answered(self, event: ReportAnswered) -> None:
        if event.result.log != self.log or event.result.term < self.term:
            return
        self._hear_term(event.result.term)
        for attempt in event.result.forget:
            self._forget(attempt)
        self._resend(event.result.resend)

    # ------------------------------------------------------------------------------------------ the engine

    def _begin_waiting(self) -> None:
        """Have attempts begin while there are slots; one whose rule forbids the version goes back to the leader."""
        if self.version is None:
            if not self.is_changing:
                self._supersede_all()
            return
        if self.wants_load and not self._is_kept:
            return
        free = self.limits.slots - len(self._running)
        if free <= 0 or not self._waiting:
            return
        for attempt, held in [*self._waiting.items()]:
            if free <= 0:
                break
            if not self._is_allowed(held):
                self._finish(held, Finished(attempt, held.count, "superseded"))
                continue
            free -= 1
            self._begin(attempt, held)

    def _begin(self, attempt: Attempt, held: Held) -> None:
        """Have the engine go on behind the tokens that are here, unless no token may follow them."""
        reason = held.assign.sampling.ended_by(held.tokens)
        if reason is not None:
            self._finish(held, Finished(attempt, held.count, reason))
            return
        held.is_running, held.began_at = True, held.count
        self._running[attempt] = held
        self._waiting.pop(attempt, None)
        self._add_run(held)
        self._effects.append(Begin(attempt, held.assign.prompt, bytes(held.tokens), held.assign.sampling))

    def _supersede(self, attempt: Attempt, held: Held) -> None:
        """Give an attempt back that its version rule does not let begin, or go on."""
        self._leave(attempt, held)
        self._finish(held, Finished(attempt, held.count, "superseded"))

    def _supersede_all(self) -> None:
        """Give back all that could go on here: without weights nothing does."""
        for attempt, held in self.held.items():
            if held.is_running or held.waits:
                self._supersede(attempt, held)

    def _is_allowed(self, held: Held) -> bool:
        """Tell whether an attempt may make its next token on the version in memory.

        The rule of age is of the first token, and of one on an older version than that of the token before it.
        """
        assert self.version is not None
        rule = held.assign.rule
        if held.count and rule.pinned is None and all(run.version <= self.version for run in held.runs[-1:]):
            return not self.versions.is_retired(self.version)
        return rule.allows(self.version, self.versions)

    def _add_run(self, held: Held, *, is_kept: bool = False) -> None:
        """Begin a run behind the tokens that are here; one that got no token is replaced."""
        assert self.version is not None
        while held.runs and held.runs[-1].start >= held.count:
            held.runs.pop()
        kv: Kv = "kept" if is_kept else "recomputed" if held.count else "fresh"
        attempt = held.assign.attempt
        held.runs.append(TokenRun(held.count, self.version, self.root, self.name, attempt, kv, self._engine))

    def _stepped(self, event: EngineStepped) -> None:
        self.steps += 1
        self._may_have_news = True
        self._measure(event)
        for made in event.made:
            held = self._running.get(made.attempt)
            # The engine had begun the step before it was told to leave the attempt.
            if held is None:
                continue
            if not held.tokens and self.version is not None and not self._is_allowed(held):
                self._supersede(made.attempt, held)
            else:
                self._made(held, made)

    def _measure(self, event: EngineStepped) -> None:
        """Keep how long a step took that made one token of each running attempt, and computed no prompt."""
        if len(self._measured) >= self.limits.measured_max:
            return
        going_on = [
            held
            for made in event.made
            if (held := self.held.get(made.attempt)) is not None
            and made.tokens
            and len(held.tokens) > TOKEN_BYTES * held.began_at
        ]
        if not going_on or len(going_on) < len(self._running):
            return
        context = sum(len(each.tokens) + len(each.assign.prompt) for each in going_on) // TOKEN_BYTES
        self._measured.append(EngineStep(len(going_on), context / len(going_on), event.seconds))

    def _made(self, held: Held, made: StepTokens) -> None:
        if made.is_current and held.runs[-1].kv == "kept":
            # The cache had no room for it, and it was computed again.
            self._add_run(held)
        held.tokens += made.tokens
        held.logprobs += made.logprobs
        if made.finished is not None:
            held.is_running = False
            del self._running[made.attempt]
            held.finished = msgspec.structs.replace(made.finished, tokens=held.count)

    def _load_wanted(self, _: LoadWanted) -> None:
        self.wants_load = True

    def _weights_changing(self, _: WeightsChanging) -> None:
        self.version, self.is_changing = None, True

    def _weights_coming(self, event: WeightsComing) -> None:
        self._comes_at = self._now + event.loads_in_s

    def _weights_loaded(self, event: WeightsLoaded) -> None:
        self._comes_at = None
        self.version, self.root, self._engine = event.version, event.root, event.engine
        self.wants_load = self.is_changing = False
        if self.version is None:
            # The leader is to know before it places anew what goes back.
            self._supersede_all()
            self._beat()
            return
        for attempt, held in self.held.items():
            if not held.is_running:
                continue
            if not self._is_allowed(held):
                self._supersede(attempt, held)
            elif held.assign.rule.on_update == "restart" and held.count:
                self._leave(attempt, held)
                self._finish(held, Finished(attempt, held.count, "restart"))
            elif held.assign.rule.on_update == "keep" and held.count:
                self._add_run(held, is_kept=True)
            else:
                # What the engine has cached of it is of the version before.
                self._leave(attempt, held)
                self._begin(attempt, held)

    def _preemption_noticed(self, _: PreemptionNoticed) -> None:
        self.is_leaving = True
        self._beat()

    # ------------------------------------------------------------------------------------------ frames

    def _has_news(self) -> bool:
        self._may_have_news = self._may_have_news and any(
            each.sent < each.count or (each.finished is not None and not each.is_finish_sent)
            for each in self.held.values()
        )
        return self._may_have_news

    def _on_time(self) -> None:
        if self._now - self._beaten_at >= self.limits.heartbeat_s:
            self._beat()
        for number, (sent_at, rows) in [*self._unanswered.items()]:
            if self._now - sent_at >= self.limits.resend_s:
                del self._unanswered[number]
                self._resend(rows)
        is_due = bool(self.log) and self._now - self._flushed_at >= self._flush_s
        if is_due and len(self._unanswered) < self.limits.frames_ahead_max and self._has_news():
            self._flush()

    def _beat(self) -> None:
        self._beaten_at = self._now
        # A transfer that stands still or has failed tells nothing: its last guess would hold for ever.
        comes_in_s = None if self._comes_at is None or self._comes_at < self._now else self._comes_at - self._now
        beat = RunnerHeartbeat(
            self.log,
            self.incarnation,
            self.steps,
            self.model,
            self.limits.slots,
            self.version,
            self.is_leaving,
            tuple(self._measured),
            self._is_local,
            self._keeps_versions,
            comes_in_s,
        )
        self._measured.clear()
        self._effects.append(SendHeartbeat(beat))

    def _flush(self) -> None:
        """Send all new tokens as one frame."""
        self._flushed_at = self._now
        self._frame += 1
        attempts, starts, counts = array("q"), array("q"), array("q")
        tokens, logprobs, runs, finished = bytearray(), bytearray(), list[tuple[Attempt, TokenRun]](), list[Finished]()
        rows: list[tuple[Attempt, int]] = []
        room = self.limits.frame_tokens_max
        for attempt, held in self.held.items():
            sent, count = held.sent, len(held.tokens) // TOKEN_BYTES
            stop = min(count, sent + room)
            if sent < stop:
                first, last = TOKEN_BYTES * sent, TOKEN_BYTES * stop
                attempts.append(attempt_key(attempt))
                starts.append(sent)
                counts.append(stop - sent)
                tokens += held.tokens[first:last]
                logprobs += held.logprobs[first:last]
                if held.runs and held.runs[-1].start >= sent:
                    runs += [(attempt, run) for run in held.runs if sent <= run.start < stop]
                rows.append((attempt, sent))
                room -= stop - sent
                sent = held.sent = stop
            if sent == count and held.finished is not None and not held.is_finish_sent:
                held.is_finish_sent = True
                finished.append(held.finished)
                rows.append((attempt, count))
        self._unanswered[self._frame] = (self._now, rows)
        frame = Frame(
            self.log,
            self.incarnation,
            self._frame,
            attempts.tobytes(),
            starts.tobytes(),
            counts.tobytes(),
            bytes(tokens),
            bytes(logprobs),
            tuple(runs),
            tuple(finished),
        )
        self._effects.append(SendFrame(frame))

    def _frame_answered(self, event: FrameAnswered) -> None:
        result = event.result
        if result.log != self.log or result.term < self.term:
            return
        self._hear_term(result.term)
        self._unanswered.pop(result.number, None)
        self._resend(result.resend)
        if result.wants_report:
            self._report()

    def _resend(self, rows: list[tuple[Attempt, int]] | tuple[tuple[Attempt, int], ...]) -> None:
        """Send the tokens of attempts again from these places on, and how they finished."""
        for attempt, start in rows:
            held = self.held.get(attempt)
            if held is not None:
                held.sent = min(held.sent, start)
                held.is_finish_sent = False
                self._may_have_news = True
