"""One job in virtual time: the production leader, fold, policies and runners; a trainer, and machines that come and go.

Modelled are engines (`engine_model`), the time until a machine runs and has weights, and messages, which take `DELAY_S`
and are never lost. One scenario and one system give one run.

Always true: each response is trained once, and it has as many tokens as were drawn for it (`Report` is made of these).
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import sha256
from random import Random
from typing import Final

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import (
    AnyEntry,
    Attach,
    Done,
    End,
    GroupSubmitted,
    Lead,
    Payload,
    RequestId,
    SdkSender,
    Submit,
)
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, PublishedVersions, Sampling, VersionRule
from tensorhub_common.protocol.rollout.questions import SeedingAnswer, SeedingQuestion, SeedingState
from tensorhub_rollout.core.leader import Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import (
    AbortAnswered,
    AnswerFrame,
    AnswerHeartbeat,
    AnswerReport,
    AssignAnswered,
    EndSeeding,
    EntryFolded,
    FrameCame,
    HeartbeatCame,
    LeaderEffect,
    LeaderInput,
    LoadPrompt,
    Place,
    PromptLoaded,
    ReportCame,
    SendAbort,
    SendAssign,
    StoreEnd,
    VersionsSeen,
    Want,
    Withdraw,
)
from tensorhub_rollout.decisions.decisions import Decisions, PolicyLimits
from tensorhub_rollout.log.fold import GROUPS_MAX, fold
from tensorhub_rollout.log.outcomes import Attached, Ended, Outcome, Refused, Submitted
from tensorhub_rollout.log.state import RolloutState
from tensorhub_rollout.policy.view import Action, MoveAction, PlaceAction
from tensorhub_runner.core.runner_events import (
    AbortCame,
    AnswerAbort,
    AnswerAssign,
    AssignCame,
    FrameAnswered,
    HeartbeatAnswered,
    PreemptionNoticed,
    ReportAnswered,
    RunnerEffect,
    RunnerInput,
    SendFrame,
    SendHeartbeat,
    SendReport,
)
from tensorhub_simulator.engine.agenda import Agenda
from tensorhub_simulator.rollout_performance.config.checks import SECONDS_MAX
from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, ScenarioError
from tensorhub_simulator.rollout_performance.config.spot_trace import SpotChange
from tensorhub_simulator.rollout_performance.job.drive import Drive, Known
from tensorhub_simulator.rollout_performance.measures.ages import AgeCounts
from tensorhub_simulator.rollout_performance.measures.report import Report
from tensorhub_simulator.rollout_performance.measures.tails import StepTail, tail_of
from tensorhub_simulator.rollout_performance.measures.timeline import Doing, Sample, Span, Timeline
from tensorhub_simulator.rollout_performance.models.arrivals import arrivals_s, sites_arrivals_s
from tensorhub_simulator.rollout_performance.models.draws import length_of, prompt_of
from tensorhub_simulator.rollout_performance.models.machine import RESEND_S, Machine, Pace
from tensorhub_simulator.rollout_performance.models.step_progress import StepProgress, StepRecord, StreamProgress
from tensorhub_simulator.rollout_performance.sizing.fleet_size import FleetSize

MODEL: Final = "policy"
LOG: Final = "the-log"
DELAY_S: Final = 0.001
IDLE_LOOK_S: Final = 1.0
"""Policies look when something has changed that they see, and so often for what time alone changes."""
LOOKED_AT_PER_S: Final = 2048
"""In large fleets they look more seldom: so many instances a second."""
SILENCE_S: Final = LeaderLimits().silence_s
"""So long after a machine has gone the leader finds it lost."""
FLEET_LOOK_S: Final = 1.0
"""How often machines are started for what the trainer keeps up with."""
VERSIONS_SHOWN: Final = 8
_ROUNDING: Final = 1e-6


class JobRun:
    """One job with one system; `run` it once."""

    def __init__(self, scenario: Scenario, drive: Drive, timeline: Timeline | None = None) -> None:
        """Begin; a timeline is filled on the way."""
        self._timeline = timeline
        self._scenario, self._drive = scenario, drive
        self._agenda, self._random = Agenda(), Random(f"machines {scenario.seed}")
        self._arrivals = Random(f"arrivals {scenario.seed}")
        self._state = RolloutState("job")
        self._seq = self._n = self._attachment = self._payloads = 0
        self._version, self._versions = 1, PublishedVersions(1, (1,))
        self._machines: dict[str, Machine] = {}
        self._booting: dict[str, float] = {}
        """When each spot machine that has no engine yet was taken."""
        self._number = 0
        self._fetching: dict[str, int] = {}
        """Which version each machine fetches, or has fetched last."""
        self._spare: dict[str, None] = {}
        """The machines of a trace that there are, and that were not taken."""
        self._spot_s, self._made, self._lost, self._responses = 0.0, 0, 0, 0
        self._lengths: dict[RequestId, int] = {}
        self._ages = AgeCounts()
        self._trainer = drive.trainer(scenario)
        known = Known(scenario, self._expected, self._left)
        self._place = None if drive.place is None else drive.place(known)
        self._submitted: list[StepProgress] = []
        """By step."""
        self._progress_of: dict[int, StepProgress] = {}
        """By submission."""
        self._rule = VersionRule(staleness=self._trainer.steps_ahead, on_update=self._trainer.on_update)
        self._steps: list[StepRecord] = []
        self._seeding: SeedingState | None = None
        self._is_seeding = self._is_training = False
        self._waits_since: float | None = None
        self._available = 0
        self._looks_at = math.inf
        """When the policies look next."""
        self._seq += 1
        fold(self._state, self._seq, Lead(1, "manager"))
        self._far = frozenset(f"far-{number}" for number in range(scenario.far.instances if scenario.far else 0))
        """The instances at another site."""
        self._size = None if scenario.spot.delta_from is None else FleetSize(scenario, scenario.spot.delta_from)
        largest = self._trainer.engines + scenario.spot.most + len(self._far)
        self._pace = Pace(scenario.messages)
        self._look_s = max(scenario.messages.look_s, largest / LOOKED_AT_PER_S)
        limits = LeaderLimits(
            silence_s=SECONDS_MAX,
            # A modelled engine that has work makes steps.
            stall_s=SECONDS_MAX,
            gather_s=0.0,
            resend_s=RESEND_S,
            checkpoint_s=SECONDS_MAX,
            look_s=self._look_s,
        )
        # It has listened for long enough that the first silence counts.
        self._leader = Leader(self._state, LOG, limits, -limits.silence_s)
        for part in (2 / 3, 1 / 3):
            self._leader.handle(Tick(), -part * limits.silence_s)
        self._decisions = Decisions(PolicyLimits().without(scenario.terms_off), _raise)
        self._append(Attach("main", MODEL, 0, "nonce", drive.policy))

    def run(self) -> Report:
        """Return what comes of all steps.

        Raises `ScenarioError` where the last instance goes before all is made, and AssertionError where a response is
        lost, or the job hangs.
        """
        self._see_versions()
        if self._drive.has_others:
            for at, count in self._scenario.spot.changes:
                self._agenda.at(at, partial(self._change_available, count))
            for change in self._scenario.spot.recorded:
                self._agenda.at(change.at_s, partial(self._follow_trace, change))
            for name in sorted(self._far):
                self._start(name, is_local=False)
            self._agenda.after(0.0, self._follow_fleet)
        self._agenda.after(0.0, self._begin_step)
        if self._timeline is not None:
            self._agenda.after(0.0, partial(self._sample, self._timeline))
        self._look_later(0.0)
        while not self._is_over:
            assert self._agenda.now < SECONDS_MAX, f"{len(self._progress.open)} responses are open for ever"
            assert self._agenda.step()
        return self._report()

    @property
    def _is_over(self) -> bool:
        return len(self._steps) == self._trainer.steps and bool(self._steps[-1].ended_at)

    def _report(self) -> Report:
        scenario, steps = self._scenario, self._steps
        for machine in [*self._machines.values()]:
            self._end(machine)
        for began_at in self._booting.values():
            self._spot_s += self._agenda.now - began_at
        assert self._responses == self._trainer.steps * self._trainer.groups * self._trainer.group_size
        hours = self._agenda.now / 3600
        cost = hours * self._trainer.engines * scenario.price.reserved + self._spot_s / 3600 * scenario.price.spot
        if scenario.far is not None and self._drive.has_others:
            cost += hours * scenario.far.instances * scenario.far.price
        return Report(
            self._drive.system,
            len(steps),
            self._agenda.now,
            sum(each.tokens for each in steps),
            self._made,
            self._responses,
            sum(each.waited_s for each in steps),
            sum(each.seeded_s for each in steps),
            sum(each.trained_s for each in steps),
            self._spot_s,
            cost,
            self._lost,
            tuple(each.seconds for each in steps),
            tuple(each.tokens for each in steps),
            () if self._trainer.streams else tuple(self._tails()),
            self._ages.found,
            () if self._size is None else tuple(self._size.units_of_steps),
            self._timeline,
        )

    def _tails(self) -> Iterator[StepTail]:
        for progress, record in zip(self._submitted, self._steps, strict=True):
            yield tail_of(progress, record.began_at, self._scenario)

    def _sample(self, seen: Timeline) -> None:
        local = sum(each.is_local for each in self._machines.values())
        made = self._made + sum(each.tokens for each in self._machines.values())
        spot = len(self._machines) - local
        seen.add(Sample(self._agenda.now, spot, len(self._booting), local, made))
        self._agenda.after(seen.every_s, partial(self._sample, seen))

    def _did(self, doing: Doing, seconds: float) -> None:
        """Note what the trainer has done until now."""
        if self._timeline is not None:
            self._timeline.spans.append(Span(self._agenda.now - seconds, self._agenda.now, doing))

    # ------------------------------------------------------------------------------------------ the log

    def _append(self, entry: AnyEntry) -> None:
        self._seq += 1
        outcome = fold(self._state, self._seq, entry).outcome
        if isinstance(outcome, Attached):
            self._attachment = self._seq
        self._tell(EntryFolded(outcome))
        self._note(outcome)

    def _note(self, outcome: Outcome) -> None:
        assert not isinstance(outcome, Refused), outcome
        if isinstance(outcome, Submitted):
            step = self._submitted[-1]
            for of in outcome.opened:
                self._progress_of[of.submission] = step
                step.open.add(of)
                self._lengths[of] = self._length_of(step)
                self._opened(step, of)
                step.submitted += 1
        elif isinstance(outcome, Ended):
            for of in outcome.requests:
                request = self._state.request(of)
                assert request is not None
                assert request.end is not None
                assert request.end.tokens == self._lengths[of], f"{of} has {request.end.tokens} tokens"
                self._progress_of[of.submission].ended(of, request.end.tokens, self._agenda.now)
            self._train()

    def _opened(self, step: StepProgress, of: RequestId) -> None:
        """Note a response that is asked for, the next of a step."""

    def _length_of(self, step: StepProgress) -> int:
        """Return how long the next response of a step will be."""
        return length_of(self._scenario, step.number, step.submitted)

    def _by(self) -> SdkSender:
        self._n += 1
        return SdkSender(self._attachment, self._n)

    def _payload(self, size: int) -> Payload:
        self._payloads += 1
        return Payload(f"{self._payloads:064x}", size)

    # ------------------------------------------------------------------------------------------ the leader

    def _look_later(self, delay_s: float) -> None:
        """Have the policies look at the next of their times after this delay, unless they do before."""
        when = self._look_s * math.ceil((self._agenda.now + delay_s) / self._look_s + _ROUNDING)
        if when < self._looks_at:
            self._looks_at = when
            self._agenda.at(when, partial(self._look, when))

    def _look(self, when: float) -> None:
        if when != self._looks_at:
            return
        self._looks_at = math.inf
        self._tell(Tick())
        # Where nothing is open there is nothing to place, to move or to hold back.
        for wanted in self._wanted() if self._leader.requests else ():
            self._tell(wanted)
        self._look_later(max(0.0, IDLE_LOOK_S - self._look_s))

    def _wanted(self) -> Iterator[Want | Place | Withdraw | EndSeeding]:
        """Yield what the manager's policies want, or what takes their place."""
        if self._place is None:
            yield from self._decisions.look(self._leader, MODEL, self._agenda.now)
        else:
            yield from said(self._place(self._leader.view(MODEL)))

    def _left(self, of: RequestId) -> float:
        response = self._leader.responses.get(of)
        return self._lengths[of] - (0 if response is None else response.count)

    def _expected(self, of: RequestId) -> float:
        expected = self._leader.lengths.estimate(of, now=self._agenda.now)
        return max(1.0, expected.median - expected.made)

    def _tell(self, event: LeaderInput) -> list[LeaderEffect]:
        """Give the leader an event, carry out what it wants, and return its answers."""
        before = self._seen_by_policies(event)
        effects = self._leader.handle(event, self._agenda.now)
        if before is None or before != self._seen_by_policies(event):
            self._look_later(0.0)
        return [each for each in effects if not self._carry_out(each)]

    def _seen_by_policies(self, event: LeaderInput) -> tuple[object, ...] | None:
        """Return what an event may change of all that policies see; None: anything."""
        count = len(self._leader.instances)
        if isinstance(event, Tick):
            return (count,)
        if not isinstance(event, FrameCame | HeartbeatCame | AssignAnswered):
            return None
        instance = self._leader.instances.get(event.runner)
        if instance is None:
            return (count,)
        sizes = len(instance.pending), len(instance.executing)
        return count, instance.version, instance.is_leaving, instance.has_reported, *sizes

    def _hear(self, event: LeaderInput) -> None:
        """Give the leader an event that it answers nothing to."""
        assert not self._tell(event)

    def _carry_out(self, effect: LeaderEffect) -> bool:
        match effect:
            case SendAssign(runner=runner, request=assign):
                self._send(runner, AssignCame(assign))
            case SendAbort(runner=runner, request=abort):
                self._send(runner, AbortCame(abort))
            case LoadPrompt(request=of):
                prompt = bytes(TOKEN_BYTES * self._scenario.lengths.prompt)
                said = PromptLoaded(of, prompt, Sampling(self._scenario.lengths.longest + 1, 7), self._rule)
                self._agenda.after(DELAY_S, partial(self._hear, said))
            case StoreEnd(ended=ended):
                assert ended.reason == "stop", f"{ended.request} ended with {ended.reason}: {ended.error}"
                self._ages.ended(ended.request, effect.runs, ended.tokens)
                entry = End(self._leader.term, (ended,), self._payload(len(effect.tokens)))
                self._agenda.after(DELAY_S, partial(self._append, entry))
            case AnswerFrame() | AnswerHeartbeat() | AnswerReport():
                return False
            case _:
                pass
        return True

    def _send(self, runner: str, event: RunnerInput) -> None:
        machine = self._machines.get(runner)
        if machine is not None:
            self._agenda.after(self._delay_s(runner), partial(self._tell_machine, machine, event))

    def _delay_s(self, name: str) -> float:
        """Return how long a message takes from an instance, or to it."""
        far = self._scenario.far
        return DELAY_S if far is None or name not in self._far else DELAY_S + far.rtt_ms / 2e3

    def _tell_machine(self, machine: Machine, event: RunnerInput) -> None:
        stayed = machine.stays
        machine.tell(event)
        if stayed and machine.is_up and not machine.stays and machine.core.version != self._version:
            self._fetch(machine, self._arrivals_s(1)[0])
        if machine.is_local and machine.core.is_enough and not machine.core.is_leaving:
            self._end_seeding(len(self._steps) - 1)

    def _carry_out_for(self, machine: Machine, effect: RunnerEffect) -> None:
        name, delay_s = machine.name, self._delay_s(machine.name)
        match effect:
            case AnswerAssign(results=results):
                self._agenda.after(delay_s, partial(self._hear, AssignAnswered(name, 1, results)))
            case AnswerAbort(stopped=stopped, forgotten=forgotten):
                self._agenda.after(delay_s, partial(self._hear, AbortAnswered(name, 1, stopped, forgotten)))
            case SendFrame(frame=frame):
                self._ask(machine, FrameCame(name, frame))
            case SendReport(report=report):
                self._ask(machine, ReportCame(name, report))
            case SendHeartbeat(beat=beat):
                self._ask(machine, HeartbeatCame(name, beat))
            case _:
                pass

    def _ask(self, machine: Machine, event: LeaderInput) -> None:
        delay_s = self._delay_s(machine.name)

        def answer() -> None:
            for effect in self._tell(event):
                said: RunnerInput | None = None
                match effect:
                    case AnswerFrame(result=result):
                        said = FrameAnswered(result)
                    case AnswerReport(result=report):
                        said = ReportAnswered(report)
                    case AnswerHeartbeat(result=beat):
                        said = HeartbeatAnswered(beat)
                if said is not None:
                    self._agenda.after(delay_s, partial(self._tell_machine, machine, said))

        self._agenda.after(delay_s, answer)

    def _see_versions(self) -> None:
        self._tell(VersionsSeen(MODEL, self._versions, frozenset({self._version})))

    # ------------------------------------------------------------------------------------------ machines

    def _change_available(self, count: int) -> None:
        self._available = count
        spot = [each for each in self._machines.values() if not each.is_local and each.name not in self._far]
        going = len(spot) + len(self._booting) - count
        for name in [*self._booting][: max(0, going)]:
            self._spot_s += self._agenda.now - self._booting.pop(name)
            going -= 1
        if going > 0:
            for machine in self._random.sample(sorted(spot, key=lambda each: each.name), going):
                self._preempt(machine)
        self._start_wished()

    def _follow_trace(self, change: SpotChange) -> None:
        for name in change.goes:
            self._spare.pop(name, None)
            if name in self._booting:
                self._spot_s += self._agenda.now - self._booting.pop(name)
            elif name in self._machines:
                self._preempt(self._machines[name])
        self._spare |= dict.fromkeys(change.comes)
        self._available += len(change.comes) - len(change.goes)
        self._start_wished()

    def _preempt(self, machine: Machine) -> None:
        notice_s = self._scenario.spot.notice_s
        if notice_s:
            machine.tell(PreemptionNoticed())
        self._agenda.after(notice_s, partial(self._end, machine))

    @property
    def _are_all_gone(self) -> bool:
        """Whether no spot machine is there, nor will be."""
        spot = self._scenario.spot
        times = [*(at for at, _ in spot.changes), *(each.at_s for each in spot.recorded)]
        return self._available <= 0 and self._agenda.now > max(times, default=0.0)

    def _follow_fleet(self) -> None:
        self._start_wished()
        if self._steps and self._progress.open and not (self._machines or self._booting) and self._are_all_gone:
            raise ScenarioError(
                f"{self._scenario.name}: {len(self._progress.open)} responses of step {len(self._steps)} are open, and "
                f"after {self._agenda.now:,.0f} s no instance is left or comes that would generate: have some in "
                f"spot.changes or spot.trace for longer, or in far"
            )
        self._agenda.after(FLEET_LOOK_S, self._follow_fleet)

    def _start_wished(self) -> None:
        """Take as many spot machines as there are, and as the trainer keeps up with (N_prem)."""
        wished = self._available
        if self._seeding is not None and self._seeding.version >= 0:
            wished = min(wished, max(1, self._seeding.remote_max))
        if self._size is not None:
            wished = min(wished, self._size.units)
        spot = sum(not each.is_local and each.name not in self._far for each in self._machines.values())
        for _ in range(wished - spot - len(self._booting)):
            name = self._next_name()
            self._booting[name] = self._agenda.now
            self._agenda.after(self._scenario.spot.boot_s, partial(self._load_first, name))

    def _next_name(self) -> str:
        """Return the name of a machine that there is and that is not taken."""
        if self._spare:
            name = next(iter(self._spare))
            del self._spare[name]
            return name
        self._number += 1
        return f"spot-{self._number}"

    def _load_first(self, name: str) -> None:
        if name in self._booting:
            version = self._version
            self._agenda.after(self._arrivals_s(1)[0], partial(self._run_first, name, version))

    def _arrivals_s(self, readers: int) -> list[float]:
        """Return how long a version takes until each of some readers has it."""
        weights, load_s = self._scenario.weights, self._scenario.spot.load_s
        if weights is None:
            assert load_s is not None
            return [load_s] * readers
        found = arrivals_s(weights, readers)
        self._arrivals.shuffle(found)
        return found

    def _all_arrivals_s(self) -> Iterator[tuple[Machine, float]]:
        """Yield all machines, and how long a version takes until each has it."""
        here = [each for each in self._machines.values() if each.name not in self._far]
        there = [each for each in self._machines.values() if each.name in self._far]
        weights = self._scenario.weights
        if weights is None or not there:
            yield from zip(here, self._arrivals_s(len(here)), strict=True)
            return
        for machines, found in zip(
            (here, there), sites_arrivals_s(weights, len(here), self._scenario.far, len(there)), strict=True
        ):
            self._arrivals.shuffle(found)
            yield from zip(machines, found, strict=True)

    def _resize(self, size: FleetSize) -> None:
        """Take one machine more, or let one go that has given back what it had."""
        before = size.units
        size.step_ended(self._submitted[len(self._steps) - 1], self._steps[-1].trained_s + self._trainer.publish_s)
        spot = [each for each in self._machines.values() if not each.is_local and each.name not in self._far]
        if size.units < before and spot:
            spot[-1].tell(PreemptionNoticed())
            self._agenda.after(self._look_s, partial(self._end_drained, spot[-1]))

    def _end_drained(self, machine: Machine) -> None:
        if machine.is_up and not machine.core.is_drained:
            self._agenda.after(self._look_s, partial(self._end_drained, machine))
            return
        self._end(machine)

    def _run_first(self, name: str, version: int) -> None:
        if name not in self._booting:
            return
        if version != self._version:
            self._load_first(name)
            return
        taken_at = self._booting.pop(name)
        self._start(name, is_local=False)
        self._machines[name].began_at = taken_at

    def _start(self, name: str, *, is_local: bool) -> None:
        machine = self._machines[name] = Machine(
            name,
            self._agenda,
            self._lengths.__getitem__,
            self._carry_out_for,
            self._engine_of(name),
            self._pace,
            is_local,
            is_forgetful=self._drive.is_forgetful,
            used_of=self._used_of,
        )
        self._pace.follow(len(self._machines))
        machine.start(MODEL, self._version)

    def _used_of(self, _of: RequestId, made: int, /) -> int:
        """Return with how many of the tokens that a response has it goes on at an instance that it comes to."""
        return made

    def _fetch(self, machine: Machine, load_s: float) -> None:
        """Have a machine fetch the newest version, unless it stays on its own or does so already."""
        version = self._version
        if machine.stays or self._fetching.get(machine.name) == version:
            return
        self._fetching[machine.name] = version
        self._agenda.after(load_s, partial(machine.stage, version, self._scenario.pause_s))

    def _engine_of(self, name: str) -> EngineCosts:
        far = self._scenario.far
        return far.engine if far is not None and far.engine is not None and name in self._far else self._scenario.engine

    def _end(self, machine: Machine) -> None:
        if not machine.is_up:
            return
        machine.end()
        self._made += machine.tokens
        del self._machines[machine.name]
        self._pace.follow(len(self._machines))
        self._agenda.after(SILENCE_S, partial(self._miss, machine.name))
        if not machine.is_local and machine.name not in self._far:
            self._spot_s += self._agenda.now - machine.began_at
            self._lost += machine.engine.has_work
            if self._timeline is not None and machine.engine.has_work and not self._is_over:
                self._timeline.lost_s.append(self._agenda.now)

    def _miss(self, name: str) -> None:
        """Have the leader find a machine lost: heartbeats come too seldom here to say so."""
        if name in self._leader.instances:
            self._leader.fleet.note_silence(name)
            self._tell(Tick())

    # ------------------------------------------------------------------------------------------ the trainer

    def _begin_step(self) -> None:
        trainer, step = self._trainer, len(self._steps)
        self._steps.append(StepRecord(self._agenda.now))
        seed_s = self._seeds_for_s() if trainer.seeds else 0.0
        if trainer.streams:
            self._begin_stream()
        while not trainer.streams and len(self._submitted) <= min(step + trainer.steps_ahead, trainer.steps - 1):
            self._submit(len(self._submitted))
        if seed_s > 0:
            self._is_seeding = True
            for number in range(trainer.engines):
                self._start(f"local-{step}-{number}", is_local=True)
            if math.isfinite(seed_s):
                self._agenda.after(seed_s, partial(self._end_seeding, step))
        self._train()

    def _seeds_for_s(self) -> float:
        """Return how long the trainer's engines generate in the step that begins; infinite: until they are told."""
        answer = self._asked_seeding()
        self._seeding, is_timed = answer.state, answer.has_others and not answer.is_watched
        assert self._seeding is not None, answer.message
        return self._seeding.seed_s if is_timed else math.inf

    def _begin_stream(self) -> None:
        trainer = self._trainer
        if not self._submitted:
            self._submitted.append(StreamProgress(trainer))
            self._submit_groups(0, range(trainer.groups * (1 + trainer.steps_ahead)))
        stream = self._progress
        assert isinstance(stream, StreamProgress)
        stream.left = trainer.groups * trainer.group_size

    def _submit(self, step: int) -> None:
        """Submit the groups of a step; those of an earlier one go first."""
        self._submitted.append(self._new_step(step))
        self._submit_groups(step, range(self._trainer.groups))

    def _new_step(self, step: int) -> StepProgress:
        return StepProgress(self._trainer, step, submitted_at=self._agenda.now)

    def _submit_groups(self, step: int, numbers: range) -> None:
        names = [(f"s{step}-{number}", prompt_of(self._scenario, step, number)) for number in numbers]
        longest, priority = self._scenario.lengths.longest, -step if self._trainer.steps_ahead else 0
        for first in range(0, len(names), GROUPS_MAX):
            groups = tuple(
                GroupSubmitted(
                    name,
                    sha256(prompt.encode()).hexdigest(),
                    self._trainer.group_size,
                    1,
                    longest + 1,
                    priority=priority,
                )
                for name, prompt in names[first : first + GROUPS_MAX]
            )
            self._append(Submit(self._by(), groups, self._payload(TOKEN_BYTES)))

    @property
    def _progress(self) -> StepProgress:
        """Return the step that is trained."""
        return self._submitted[0 if self._trainer.streams else len(self._steps) - 1]

    def _asked_seeding(self) -> SeedingAnswer:
        trainer = self._trainer
        before = self._steps[-2] if len(self._steps) > 1 else None
        question = SeedingQuestion(
            attachment=self._attachment,
            version=self._version,
            state=self._seeding,
            train_wait_s=0.0 if before is None else before.waited_s,
            seeded_s=0.0 if before is None else before.seeded_s,
            gain=trainer.seed_gain,
            initial_s=trainer.seed_first_s,
        )
        return self._decisions.seeding(self._leader, question, lambda _, version: f"root-{version}", self._agenda.now)

    def _end_seeding(self, step: int) -> None:
        """Give what the trainer's engines have to others; it trains once they have nothing."""
        if not self._seeds_in(step):
            return
        for machine in [each for each in self._machines.values() if each.is_local]:
            machine.tell(PreemptionNoticed())
        self._agenda.after(DELAY_S, partial(self._end_when_drained, step))

    def _seeds_in(self, step: int) -> bool:
        """Tell whether the step is under way, and its seeding not over: all may have ended before its time."""
        return self._is_seeding and step == len(self._steps) - 1

    def _end_when_drained(self, step: int) -> None:
        if not self._seeds_in(step):
            return
        local = [each for each in self._machines.values() if each.is_local]
        if not all(each.core.is_drained for each in local):
            self._agenda.after(self._scenario.messages.look_s, partial(self._end_when_drained, step))
            return
        self._stop_seeding(local)

    def _stop_seeding(self, local: list[Machine]) -> None:
        for machine in local:
            self._end(machine)
        self._is_seeding = False
        self._steps[-1].seeded_s = self._agenda.now - self._steps[-1].began_at
        self._did("seeds", self._steps[-1].seeded_s)
        self._train()

    @property
    def _has_seeded_all(self) -> bool:
        """Whether nothing is left for the trainer's engines to generate, before their time is over."""
        return not self._progress.open and bool(self._progress.ready)

    def _train(self) -> None:
        """Train what there is, where the GPUs are free for it."""
        if not self._steps or self._is_training or self._steps[-1].ended_at:
            return
        if self._is_seeding:
            if self._has_seeded_all:
                self._stop_seeding([each for each in self._machines.values() if each.is_local])
            return
        batch = self._progress.take()
        if not batch:
            if self._waits_since is None and self._progress.open:
                self._waits_since = self._agenda.now
            return
        record = self._steps[-1]
        if self._waits_since is not None:
            record.waited_s += self._agenda.now - self._waits_since
            self._waits_since = None
        self._is_training = True
        tokens = sum(count for _, count in batch)
        seconds = tokens * self._trainer.token_s
        self._agenda.after(seconds, partial(self._trained, tuple(of for of, _ in batch), tokens, seconds))

    def _trained(self, requests: tuple[RequestId, ...], tokens: int, seconds: float) -> None:
        self._did("trains", seconds)
        record = self._steps[-1]
        self._is_training = False
        record.tokens += tokens
        record.trained_s += seconds
        self._responses += len(requests)
        self._append(Done(self._by(), requests))
        for of in requests:
            del self._lengths[of]
            self._ages.trained(of, self._version)
        if self._trainer.streams:
            submitted = self._progress.submitted // self._trainer.group_size
            used = self._responses // self._trainer.group_size
            ahead = self._trainer.groups * (1 + self._trainer.steps_ahead)
            self._submit_groups(0, range(submitted, used + ahead))
        if self._progress.is_over:
            self._agenda.after(self._trainer.publish_s, self._publish)
        else:
            self._train()

    def _publish(self) -> None:
        self._did("publishes", self._trainer.publish_s)
        self._steps[-1].ended_at = self._agenda.now
        self._version += 1
        published = (*self._versions.published, self._version)[-VERSIONS_SHOWN:]
        self._versions = PublishedVersions(self._version, published)
        self._see_versions()
        for machine, load_s in self._all_arrivals_s():
            self._fetch(machine, load_s)
        if self._size is not None:
            self._resize(self._size)
        if not self._is_over:
            self._begin_step()


def said(actions: Iterable[Action]) -> Iterator[Place | Withdraw]:
    """Yield what a leader is told of what is to be placed, to be moved, and to wait."""
    for action in actions:
        if isinstance(action, PlaceAction):
            yield Place(action.request, action.runner)
        else:
            yield Withdraw(action.request, action.target if isinstance(action, MoveAction) else None)


def _raise(what: str, why: Exception) -> None:
    raise AssertionError(f"{what} failed") from why
