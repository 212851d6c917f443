"""One job in virtual time: the production leader, fold, policies and runners; a trainer, and machines that come and go.

Modelled are engines (`engine_model`), the time until a machine runs and has weights, and messages, which take `DELAY_S`
and are never lost. One scenario and one system give one run.

Always true: each response is trained once, and it has as many tokens as were drawn for it (`Report` is made of these).
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import (
    End,
    RequestId,
)
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, PublishedVersions, Sampling, VersionRule
from tensorhub_common.protocol.rollout.questions import SeedingAnswer, SeedingQuestion
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
from tensorhub_rollout.log.outcomes import Outcome
from tensorhub_rollout.policy.view import Action, MoveAction, PlaceAction
from tensorhub_runner.core.runner_events import (
    AbortCame,
    AnswerAbort,
    AnswerAssign,
    AssignCame,
    FrameAnswered,
    HeartbeatAnswered,
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
from tensorhub_simulator.rollout_performance.job.drive import Drive, Known
from tensorhub_simulator.rollout_performance.job.fleet import DELAY_S, Fleet
from tensorhub_simulator.rollout_performance.job.log import MODEL, JobLog
from tensorhub_simulator.rollout_performance.measures.report import Report
from tensorhub_simulator.rollout_performance.measures.tails import tail_of
from tensorhub_simulator.rollout_performance.measures.timeline import Timeline
from tensorhub_simulator.rollout_performance.models.machine import RESEND_S, Machine, Pace

LOG: Final = "the-log"
IDLE_LOOK_S: Final = 1.0
"""Policies look when something has changed that they see, and so often for what time alone changes."""
LOOKED_AT_PER_S: Final = 2048
"""In large fleets they look more seldom: so many instances a second."""
FLEET_LOOK_S: Final = 1.0
"""How often machines are started for what the trainer keeps up with."""
VERSIONS_SHOWN: Final = 8
_ROUNDING: Final = 1e-6


class JobRun:
    """One job with one system; `run` it once."""

    def __init__(self, scenario: Scenario, drive: Drive, timeline: Timeline | None = None) -> None:
        """Begin; a timeline is filled on the way."""
        self._scenario, self._drive, self._timeline = scenario, drive, timeline
        self._agenda = Agenda()
        self._versions = PublishedVersions(1, (1,))
        self._fetching: dict[str, int] = {}
        """Which version each machine fetches, or has fetched last."""
        self._looks_at = math.inf
        """When the policies look next."""
        limits = drive.trainer(scenario)
        largest = limits.engines + scenario.spot.most + (scenario.far.instances if scenario.far else 0)
        self._look_s = max(scenario.messages.look_s, largest / LOOKED_AT_PER_S)
        self._rule = VersionRule(staleness=limits.steps_ahead, on_update=limits.on_update)
        self._log = JobLog(self._folded)
        self._leader = self._new_leader()
        self._decisions = Decisions(PolicyLimits().without(scenario.terms_off), _raise)
        self._fleet = Fleet(
            scenario,
            self._agenda,
            self._look_s,
            make=self._new_machine,
            wished=self._wished_of,
            fetch=self._fetch,
            missed=self._miss,
            timeline=timeline,
        )
        self._trainer = drive.loop(
            scenario, limits, self._agenda, self._log, self._fleet, self._asked_seeding, self._published, timeline
        )
        known = Known(scenario, self._expected, self._left, lambda: self._agenda.now)
        self._place = None if drive.place is None else drive.place(known)
        self._log.attach(drive.policy)

    def _new_leader(self) -> Leader:
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
        leader = Leader(self._log.state, LOG, limits, -limits.silence_s)
        for part in (2 / 3, 1 / 3):
            leader.handle(Tick(), -part * limits.silence_s)
        return leader

    def _folded(self, outcome: Outcome) -> None:
        self._tell(EntryFolded(outcome))
        self._trainer.note(outcome)

    def run(self) -> Report:
        """Return what comes of all steps.

        Raises `ScenarioError` where the last instance goes before all is made, and AssertionError where a response is
        lost, or the job hangs.
        """
        self._see_versions()
        if self._drive.has_others:
            self._fleet.begin()
            self._agenda.after(0.0, self._follow_fleet)
        self._agenda.after(0.0, self._trainer.begin_step)
        if self._timeline is not None:
            self._agenda.after(0.0, partial(self._fleet.sample, self._timeline))
        self._look_later(0.0)
        while not self._trainer.is_over:
            assert self._agenda.now < SECONDS_MAX, f"{len(self._trainer.progress.open)} responses are open for ever"
            assert self._agenda.step()
        return self._report()

    def _report(self) -> Report:
        scenario, trainer, fleet = self._scenario, self._trainer, self._fleet
        limits, steps = trainer.limits, trainer.steps
        fleet.end_all()
        assert trainer.trained == limits.steps * limits.groups * limits.group_size
        hours = self._agenda.now / 3600
        cost = hours * limits.engines * scenario.price.reserved + fleet.spot_s / 3600 * scenario.price.spot
        if scenario.far is not None and self._drive.has_others:
            cost += hours * scenario.far.instances * scenario.far.price
        tails = (tail_of(made, each.began_at, scenario) for made, each in zip(trainer.submitted, steps, strict=True))
        return Report(
            self._drive.system,
            len(steps),
            self._agenda.now,
            sum(each.tokens for each in steps),
            fleet.made,
            trainer.trained,
            sum(each.waited_s for each in steps),
            sum(each.seeded_s for each in steps),
            sum(each.trained_s for each in steps),
            fleet.spot_s,
            cost,
            fleet.lost,
            tuple(each.seconds for each in steps),
            tuple(each.tokens for each in steps),
            () if limits.streams else tuple(tails),
            trainer.ages.found,
            () if trainer.size is None else tuple(trainer.size.units_of_steps),
            self._timeline,
        )

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
        return self._trainer.lengths[of] - (0 if response is None else response.count)

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
                self._trainer.ages.ended(ended.request, effect.runs, ended.tokens)
                entry = End(self._leader.term, (ended,), self._log.payload(len(effect.tokens)))
                self._agenda.after(DELAY_S, partial(self._log.append, entry))
            case AnswerFrame() | AnswerHeartbeat() | AnswerReport():
                return False
            case _:
                pass
        return True

    def _send(self, runner: str, event: RunnerInput) -> None:
        machine = self._fleet.machines.get(runner)
        if machine is not None:
            self._agenda.after(self._fleet.delay_s(runner), partial(self._tell_machine, machine, event))

    def _tell_machine(self, machine: Machine, event: RunnerInput) -> None:
        stayed = machine.stays
        machine.tell(event)
        if stayed and machine.is_up and not machine.stays and machine.core.version != self._fleet.version:
            self._fleet.fetch_alone(machine)
        if machine.is_local and machine.core.is_enough and not machine.core.is_leaving:
            self._trainer.has_enough()

    def _carry_out_for(self, machine: Machine, effect: RunnerEffect) -> None:
        name, delay_s = machine.name, self._fleet.delay_s(machine.name)
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
        delay_s = self._fleet.delay_s(machine.name)

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

    def _published(self, version: int) -> None:
        self._versions = PublishedVersions(version, (*self._versions.published, version)[-VERSIONS_SHOWN:])
        self._see_versions()
        self._fleet.publish(version)

    def _see_versions(self) -> None:
        self._tell(VersionsSeen(MODEL, self._versions, frozenset({self._versions.published[-1]})))

    def _asked_seeding(self, question: SeedingQuestion) -> SeedingAnswer:
        return self._decisions.seeding(self._leader, question, lambda _, version: f"root-{version}", self._agenda.now)

    # ------------------------------------------------------------------------------------------ machines

    def _follow_fleet(self) -> None:
        self._fleet.start_wished()
        steps = self._trainer.steps
        if steps and self._trainer.progress.open and self._fleet.are_all_gone:
            raise ScenarioError(
                f"{self._scenario.name}: {len(self._trainer.progress.open)} responses of step {len(steps)} are open, "
                f"and after {self._agenda.now:,.0f} s no instance is left or comes that would generate: have some in "
                f"spot.changes or spot.trace for longer, or in far"
            )
        self._agenda.after(FLEET_LOOK_S, self._follow_fleet)

    def _wished_of(self, available: int) -> int:
        return self._trainer.wished(available)

    def _new_machine(self, name: str, costs: EngineCosts, pace: Pace, is_local: bool, /) -> Machine:  # noqa: FBT001 (a callback)
        return Machine(
            name,
            self._agenda,
            self._trainer.lengths.__getitem__,
            self._carry_out_for,
            costs,
            pace,
            is_local,
            is_forgetful=self._drive.is_forgetful,
            used_of=self._used_of,
        )

    def _used_of(self, _of: RequestId, made: int, /) -> int:
        """Return with how many of the tokens that a response has it goes on at an instance that it comes to."""
        return made

    def _fetch(self, machine: Machine, load_s: float) -> None:
        """Have a machine fetch the newest version, unless it stays on its own or does so already."""
        version = self._fleet.version
        if machine.stays or self._fetching.get(machine.name) == version:
            return
        self._fetching[machine.name] = version
        self._agenda.after(load_s, partial(machine.stage, version, self._scenario.pause_s))

    def _miss(self, name: str) -> None:
        """Have the leader find a machine lost: heartbeats come too seldom here to say so."""
        if name in self._leader.instances:
            self._leader.fleet.note_silence(name)
            self._tell(Tick())


def said(actions: Iterable[Action]) -> Iterator[Place | Withdraw]:
    """Yield what a leader is told of what is to be placed, to be moved, and to wait."""
    for action in actions:
        if isinstance(action, PlaceAction):
            yield Place(action.request, action.runner)
        else:
            yield Withdraw(action.request, action.target if isinstance(action, MoveAction) else None)


def _raise(what: str, why: Exception) -> None:
    raise AssertionError(f"{what} failed") from why
