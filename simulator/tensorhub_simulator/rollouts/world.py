"""A whole job of rollouts in virtual time: managers, runners with fake engines, a trainer, and a network that loses.

All that decides is the production core. The log, the network, the engines and the faults are modelled. One seed gives
one history.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256
from random import Random
from typing import Final

import msgspec

from tensorhub._rollouts.collector import Collector
from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout import payloads
from tensorhub_common.protocol.rollout.entries import (
    AnyEntry,
    Attach,
    Attempt,
    Cancel,
    Checkpoint,
    Done,
    End,
    GroupSubmitted,
    Lead,
    Payload,
    PolicyName,
    RequestId,
    SdkSender,
    Submit,
)
from tensorhub_common.protocol.rollout.messages import (
    TOKEN_BYTES,
    AssignResult,
    Finished,
    HeartbeatResult,
    OnUpdate,
    Sampling,
    TokenRun,
    VersionRule,
)
from tensorhub_common.protocol.rollout.payloads import SubmittedPrompt, SubmittedPrompts
from tensorhub_common.protocol.rollout.questions import EndedRequest, ReadyQuestion
from tensorhub_rollout.answers.sdk import answer_ready
from tensorhub_rollout.core.leader import Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import (
    AbortAnswered,
    AnswerFrame,
    AnswerHeartbeat,
    AnswerReport,
    AssignAnswered,
    BusChanged,
    EntryFolded,
    FrameCame,
    HeartbeatCame,
    InstanceLost,
    LeaderEffect,
    LeaderInput,
    LoadPrefix,
    LoadPrompt,
    Place,
    PrefixLoaded,
    PromptLoaded,
    ReportCame,
    RoomSeen,
    SendAbort,
    SendAssign,
    StoreEnd,
    StoreTokens,
    VersionsSeen,
    Withdraw,
)
from tensorhub_rollout.decisions.decisions import Decisions, Engines, PolicyLimits
from tensorhub_rollout.decisions.version_holds import HoldWord
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.outcomes import (
    Acknowledged,
    Attached,
    Cancelled,
    Ended,
    Kept,
    Leads,
    Outcome,
    Refused,
    Submitted,
)
from tensorhub_rollout.log.state import RolloutState, decode_state, encode_state
from tensorhub_rollout.policy.activation import ActivationLimits
from tensorhub_rollout.policy.placing import ARRIVAL
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.retention import RetentionLimits
from tensorhub_runner.core.runner import Runner, RunnerLimits
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
    WeightsLoaded,
)
from tensorhub_simulator.engine.agenda import Agenda
from tensorhub_simulator.rollouts.hold_rules import HoldRules
from tensorhub_simulator.rollouts.hub import Hub
from tensorhub_simulator.rollouts.model import STOP, TOKENS_MAX, token_of
from tensorhub_simulator.rollouts.processes import ManagerProcess, Process, RunnerProcess, Written

LOG: Final = "the-log"
MODEL: Final = "policy"
SEED: Final = 7
STALENESS: Final = 2
NAME: Final = "main"
STEP_S: Final = 0.02
LOOK_S: Final = 0.02
LOAD_S: Final = 0.05
STEPS: Final = StepModel(STEP_S, 0.0, 0.0)
OVERWRITTEN_S: Final = (0.05, 0.5, 3.0)
"""How long a trainer takes from the end of a version to the next, where it has one memory."""
HEARD_S: Final = 1.5
"""Within this a leader that runs has heard what a runner has, though messages get lost."""
HOLD_S: Final = 8
"""So long a hold lasts: less than the longest stop."""
POLICIES: Final = PolicyLimits(activation=ActivationLimits(turn_s=1.0))
MOVES_MAX: Final = 20
"""So often a policy may move a request from one instance to another: more is to and fro."""


class Chances(msgspec.Struct, frozen=True):
    """How often what goes wrong does; times in seconds."""

    lost: float = 0.02
    doubled: float = 0.02
    late: float = 0.01
    late_s: float = 1.5
    moved: float = 0.01
    """Of placements, at each look of the policy."""
    submits: float = 0.2
    """At each look of the trainer, as the next."""
    pinned: float = 0.25
    """Of groups, those that are for one of the last three versions alone."""
    retained: float = 0.4
    """Of versions, those of which the hub keeps a copy."""
    holds: bool = True
    """Whether managers have the hub hold versions that requests are for alone."""
    hold_late: float = 0.1
    """Of holds, those that come late."""
    acknowledges: float = 0.5
    whole_groups: float = 0.5
    """Of the trainer's batches, those that are of whole groups."""
    prefill_steps_max: int = 10
    """Steps of an engine until the first token of what it begins, at most; each request has its own number."""
    told_late: float = 0.3
    """Of responses that stop: the engine says so a step after the last token."""
    killed_at_end: float = 0.01
    """Of ends that a leader writes, those after which it is killed at once."""
    survives: float = 0.5
    """Of entries under way, when their sender is killed."""


class RolloutWorld:
    """One job, from its first submission until all of its requests have ended and are done."""

    def __init__(
        self,
        seed: int,
        *,
        managers: int = 2,
        runners: int = 3,
        groups: int = 6,
        poisoned: int = 0,
        on_update: OnUpdate = "continue",
        age_max: int | None = None,
        payload_bytes_max: int = 0,
        mapped_memories: int = 0,
        policy: PolicyName = "arrival",
        chances: Chances | None = None,
    ) -> None:
        self.random, self.agenda = Random(seed), Agenda()
        self.payload_bytes_max = payload_bytes_max
        """How many bytes payloads may have together; 0: any number. Then the trainer takes whole groups alone."""
        self.mapped_memories = mapped_memories
        """How many memories the trainer has, where runners map them: they have to let go of an only one first. 0: each
        runner has its own."""
        self.policy = policy
        self.chances = chances or Chances()
        self.hold_rules = HoldRules(seed, POLICIES.retention.versions_max)
        self.on_update, self.age_max = on_update, age_max
        self.entries: list[AnyEntry] = []
        self.truth = RolloutState("job")
        self.payloads: dict[str, list[Written]] = {}
        self.managers = [ManagerProcess(f"manager-{number}") for number in range(managers)]
        self.runners = [RunnerProcess(f"runner-{number}") for number in range(runners)]
        self.hub = Hub(MODEL)
        self.collector = Collector()
        """What the trainer's SDK has of this attachment."""
        self.seeds: dict[RequestId, int] = {}
        self.opened: list[RequestId] = []
        self.ended: list[RequestId] = []
        self.yielded: list[tuple[int, RequestId]] = []
        self.done: list[RequestId] = []
        self.poisoned: set[RequestId] = set()
        """Requests that kill each engine that begins them."""
        self.pinned: dict[RequestId, int] = {}
        """Requests that are for one version alone."""
        self.failed: dict[RequestId, str | None] = {}
        self.cancelled: set[RequestId] = set()
        self.responses: dict[RequestId, Written] = {}
        self.made = 0
        """Tokens that engines made."""
        self.moves: Counter[RequestId] = Counter()
        """How often a policy has moved each request."""
        self._attempts: dict[RequestId, Attempt] = {}
        """The highest attempt of each request that the log has counted."""
        self._superseded: set[Attempt] = set()
        """Attempts that runners gave back because of their rule."""
        self._makers: dict[tuple[RequestId, int], tuple[RunnerProcess, int, int]] = {}
        """Who has the token of a request at a place: the runner, its life, and how often it had been stopped."""
        self._cut_until = self._stored_at = self._seen_at = 0.0
        self._seen: VersionsSeen | None = None
        self._lost: set[tuple[str, int]] = set()
        """Runners with their lives that a leader has ever taken for lost."""
        self._groups_left, self._poisoned = groups, poisoned
        self._group = self._attachment = self._n = self._term = 0
        for manager in self.managers:
            self.start_manager(manager)
        for runner in self.runners:
            self.start_runner(runner)
        self._attach()
        self._trainer_look()
        self._elect()

    # ------------------------------------------------------------------------------------------ time

    def run(self, until: Callable[[], bool], within_s: float) -> None:
        """Let things happen until it is so. Raises AssertionError where it is not within this virtual time."""
        end = self.agenda.now + within_s
        while not until():
            assert self.agenda.now < end, f"it did not come true within {within_s:g} s: {self.story()}"
            assert self.agenda.step()

    def story(self) -> str:
        """Say what is still open, for a failed run."""
        left = [of for of in self.opened if of not in self.ended]
        leaders = [each.name for each in self.managers if each.leader is not None and each.is_up]
        return f"{len(left)} of {len(self.opened)} open ({left[:5]}), leaders {leaders}, {len(self.entries)} entries"

    def _later(self, process: Process, delay_s: float, action: Callable[[], None]) -> None:
        """Have a process do something later, in this life; while it is stopped, it waits."""
        life = process.life

        def act() -> None:
            if process.life != life or not process.is_up:
                return
            if process.asleep_until > self.agenda.now:
                self.agenda.at(process.asleep_until, act)
            else:
                action()

        self.agenda.after(delay_s, act)

    def _send(self, to: Process, action: Callable[[], None]) -> None:
        """Send a message over core NATS: it may be lost, doubled or late."""
        chances = self.chances
        if self.random.random() < chances.lost or self.agenda.now < self._cut_until:
            return
        for _ in range(2 if self.random.random() < chances.doubled else 1):
            is_late = self.random.random() < chances.late
            delay_s = self.random.uniform(0.001, chances.late_s if is_late else 0.005)
            self._later(to, delay_s, action)

    # ------------------------------------------------------------------------------------------ the log

    def append(self, entry: AnyEntry, sender: Process | None = None) -> None:
        """Write an entry: it stands after a moment; of a sender that is killed meanwhile, every other one is lost."""
        life = 0 if sender is None else sender.life
        survives = self.random.random() < self.chances.survives

        def store() -> None:
            if sender is not None and sender.life != life and not survives:
                return
            self.entries.append(entry)
            seq = len(self.entries)
            folded = fold(self.truth, seq, entry)
            self.truth.check()
            if self.payload_bytes_max:
                assert self.truth.payload_bytes <= self.payload_bytes_max, "payloads have no room left"
            self._note(seq, entry, folded.outcome)
            for manager in self.managers:
                self._later(manager, self.random.uniform(0.001, 0.004), partial(self._follow, manager))

        stored_at = max(self.agenda.now, self._cut_until) + self.random.uniform(0.001, 0.01)
        # Entries of one sender keep their order.
        self._stored_at = max(self._stored_at, stored_at)
        self.agenda.at(self._stored_at, store)

    def _note(self, seq: int, entry: AnyEntry, outcome: Outcome) -> None:
        if isinstance(entry, Lead) and isinstance(outcome, Leads):
            assert entry.term > self._term, f"term {entry.term} leads after {self._term}"
            self._term = entry.term
        if isinstance(entry, End | Checkpoint) and not isinstance(outcome, Refused):
            assert entry.term == self._term, f"an entry of term {entry.term} counts at term {self._term}"
            self._check_attempts(entry, outcome)
        match outcome:
            case Submitted(opened=opened):
                self._note_opened(opened)
            case Ended(requests=requests):
                self._note_ended(requests)
                self._keep_responses(requests)
            case Cancelled(requests=requests):
                self._note_ended(requests)
                self.cancelled.update(requests)
            case Acknowledged(requests=requests):
                self.done += requests
            case Attached():
                assert isinstance(entry, Attach)
                self._attachment, self._n = seq, 0
            case _:
                pass

    def _note_ended(self, requests: tuple[RequestId, ...]) -> None:
        self.ended += requests
        self.hold_rules.ended(requests, self.agenda.now)

    def _note_opened(self, opened: tuple[RequestId, ...]) -> None:
        self.opened += opened
        for of in opened:
            group = self.truth.submissions[of.submission].groups[0]
            self.seeds[of] = payloads.request_seed(SEED, group.id, of.index - group.first)
            if group.version is not None:
                self.pinned[of] = group.version
                self.hold_rules.opened(of, group.version, self.agenda.now)
            if self._group <= self._poisoned:
                self.poisoned.add(of)

    def _check_attempts(self, entry: End | Checkpoint, outcome: Outcome) -> None:
        """The highest attempt counts: never one below what a checkpoint has named."""
        said = entry.parts if isinstance(entry, Checkpoint) else entry.ends
        counted = outcome.parts if isinstance(outcome, Kept) else said
        for each in counted:
            if isinstance(outcome, Ended) and each.request not in outcome.requests:
                continue
            if each.attempt is not None:
                highest = self._attempts.get(each.request, each.attempt)
                assert each.attempt >= highest, f"{each.attempt} of {each.request} counts after {highest}"
                self._attempts[each.request] = each.attempt

    def _keep_responses(self, requests: tuple[RequestId, ...]) -> None:
        for of in requests:
            request = self.truth.request(of)
            assert request is not None
            assert request.end is not None
            if request.end.reason == "failed":
                self.failed[of] = request.end.error
            elif request.end.payload is not None:
                self.responses[of] = self.payloads[request.end.payload][request.end.index]

    def _follow(self, manager: ManagerProcess) -> None:
        """Fold what stands in the log, one entry after the other."""
        while manager.next < len(self.entries):
            entry = self.entries[manager.next]
            manager.next += 1
            folded = fold(manager.state, manager.next, entry)
            if isinstance(folded.outcome, Leads):
                self._led(manager, folded.outcome)
            elif manager.leader is not None:
                self._tell_leader(manager, EntryFolded(folded.outcome))

    # ------------------------------------------------------------------------------------------ managers

    def start_manager(self, manager: ManagerProcess) -> None:
        """Start a manager with a snapshot of what stands in the log."""
        manager.life += 1
        manager.decisions = self._decisions()
        manager.is_up, manager.leader, manager.has_lease, manager.claimed = True, None, False, 0
        manager.state, manager.next = decode_state(encode_state(self.truth)), len(self.entries)
        self._later(manager, LOOK_S, lambda: self._look(manager))

    def kill(self, process: ManagerProcess | RunnerProcess) -> None:
        """Kill a process, and have it back after a while."""
        process.is_up = False
        process.life += 1
        process.asleep_until = 0.0
        self._tell_versions()
        back_s = self.random.uniform(0.2, 3.0)
        if isinstance(process, ManagerProcess):
            process.leader, process.has_lease = None, False
            self.agenda.after(back_s, lambda: None if process.is_up else self.start_manager(process))
        else:
            self.agenda.after(back_s, lambda: None if process.is_up else self.start_runner(process))

    def stop(self, process: ManagerProcess | RunnerProcess, for_s: float) -> None:
        """Stop a process (SIGSTOP) for a while."""
        process.stops += 1
        process.asleep_until = max(process.asleep_until, self.agenda.now + for_s)

    def cut(self, for_s: float) -> None:
        """Take NATS away for a while: messages are lost, and entries wait."""
        self._cut_until = max(self._cut_until, self.agenda.now + for_s)
        for manager in self.managers:
            self._later(manager, 0.0, partial(self._tell_leader, manager, BusChanged(is_connected=False)))
        self.agenda.at(self._cut_until, self._reconnect)

    def _reconnect(self) -> None:
        if self.agenda.now >= self._cut_until:
            for manager in self.managers:
                self._later(manager, 0.0, partial(self._tell_leader, manager, BusChanged(is_connected=True)))

    def _elect(self) -> None:
        """Model the lease: one manager that runs has it; who sleeps loses it, and does not know. Holds end as well."""
        awake = [each for each in self.managers if each.is_up and each.asleep_until <= self.agenda.now]
        holder = next((each for each in self.managers if each.has_lease), None)
        if holder not in awake:
            for each in self.managers:
                each.has_lease = False
            if awake:
                self.random.choice(awake).has_lease = True
        self._end_holds()
        self.agenda.after(0.5, self._elect)

    def _look(self, manager: ManagerProcess) -> None:
        """Claim the term while this manager has the lease; let the policy look while it leads."""
        if manager.has_lease and (manager.leader is None) and manager.claimed <= manager.state.term:
            manager.claimed = manager.state.term + 1
            self.append(Lead(manager.claimed, manager.name), manager)
        if manager.leader is not None:
            self._tell_leader(manager, Tick())
            self._place_some(manager)
        self._later(manager, LOOK_S, lambda: self._look(manager))

    def _led(self, manager: ManagerProcess, leads: Leads) -> None:
        is_mine = leads.manager == manager.name and leads.term == manager.claimed
        manager.leader = (
            Leader(manager.state, LOG, LeaderLimits(checkpoint_s=0.3), self.agenda.now) if is_mine else None
        )
        manager.begun.clear()
        manager.led_at = self.agenda.now
        manager.decisions = self._decisions()
        if manager.leader is not None:
            self._tell_leader(manager, self.hub.seen(self._loaded()))
            # It has to ask for it.
            tell_room = partial(self._tell_leader, manager, RoomSeen(self.payload_bytes_max))
            self._later(manager, self.random.uniform(0.001, 0.1), tell_room)

    def _place_some(self, manager: ManagerProcess) -> None:
        leader = manager.leader
        assert leader is not None
        assert manager.decisions is not None
        placing = POLICIES.placing
        pending_max = placing.arrival.pending_max if self.policy == ARRIVAL else placing.balancing.pending_max
        for wanted in manager.decisions.look(leader, MODEL, self.agenda.now):
            match wanted:
                case Place(request=of, runner=runner):
                    pending = len(leader.instances[runner].pending)
                    assert pending < pending_max, f"{runner} has {pending} pending"
                    self._place(manager, leader, of, runner)
                case Withdraw(request=of, target=target) if target is not None:
                    self.moves[of] += 1
                    assert self.moves[of] <= MOVES_MAX, f"request {of} is moved to and fro"
                    self._tell_leader(manager, wanted)
                case _:
                    self._tell_leader(manager, wanted)
        word = manager.decisions.hold(leader, MODEL, self.agenda.now)
        if word is not None:
            self._say_hold(word, leader.term)
        for placement in [*leader.placements.values()]:
            if self.random.random() < self.chances.moved:
                self._tell_leader(manager, Withdraw(placement.request))

    def _place(self, manager: ManagerProcess, leader: Leader, of: RequestId, runner: str) -> None:
        """Place a request; its group begins only where payloads have room for it beside those that have begun."""
        state, begun = leader.state, _begun(leader)
        self._tell_leader(manager, Place(of, runner))
        group = of.submission, state.submissions[of.submission].requests[of.index].group
        is_placed = leader.requests[of].placement is not None
        if self.payload_bytes_max and is_placed and group not in begun | manager.begun:
            groups = [state.submissions[submission].groups[index] for submission, index in begun]
            used = state.payload_bytes + sum(2 * TOKEN_BYTES * each.tokens_max * each.open for each in groups)
            room = LeaderLimits().admission_share_max * self.payload_bytes_max
            assert used <= room, f"group {group} begins, and payloads with {len(begun)} groups have {used} of {room:g}"
        if is_placed:
            manager.begun.add(group)

    def _decisions(self) -> Decisions:
        """Return the policies of a leader that begins, with engines as they are modelled here."""
        retention = RetentionLimits(is_on=self.chances.holds, hold_s=HOLD_S)
        return Decisions(msgspec.structs.replace(POLICIES, retention=retention), _raise, _engines)

    def _say_hold(self, word: HoldWord, term: int) -> None:
        """Append a hold to the job's log: it may be lost, or late, and then a later one stands already."""
        chances, random = self.chances, self.hold_rules.random
        if random.random() < chances.lost or self.agenda.now < self._cut_until:
            return
        is_late = random.random() < chances.hold_late
        delay_s = random.uniform(0.001, chances.late_s if is_late else 0.01)
        # It is under way, whatever becomes of the manager.
        self.agenda.after(delay_s, partial(self._take_hold, word, term))

    def _take_hold(self, word: HoldWord, term: int) -> None:
        before = self.hub.hold
        to_copy = self.hub.say_hold(word, term, self.agenda.now)
        is_late = term != self._term
        self.hold_rules.check(before, self.hub.hold, self.hub.versions, self.agenda.now, is_late=is_late)
        for version in to_copy:
            self._copy(version)
        self._tell_versions()

    def _copy(self, version: int) -> None:
        """Read a version that is held, which is tried again until it is there: a holder may come back."""
        # A trainer overwrites nothing that is being read.
        if version == self.hub.newest and version != self.hub.drained:
            self.hub.coming.add(version)

        def copied() -> None:
            if version not in self.hub.hold.versions or version in self.hub.copies:
                return
            if version in self.hub.coming or version in self.hub.available(self._loaded()):
                self.hub.copies.add(version)
                self._tell_versions()
            else:
                self._copy(version)

        self.agenda.after(self.hold_rules.copy_s(), copied)

    def _end_holds(self) -> None:
        """Let the registry end what was not stated again in time."""
        before = self.hub.hold
        self.hub.end_holds(self.agenda.now)
        if self.hub.hold != before:
            assert self.agenda.now >= before.until, "a hold is ended before its time"
            self._check_stated(before.versions)
            self._tell_versions()

    def _check_stated(self, held: tuple[int, ...]) -> None:
        """No hold ends by itself that requests need, where a manager has led and run all the time."""
        since = self.agenda.now - HOLD_S
        leads = [
            each.name
            for each in self.managers
            if each.is_up and each.leader is not None and max(each.led_at, each.asleep_until, self._cut_until) < since
        ]
        needed = [of for of, version in self.pinned.items() if version in held and of not in self.ended]
        assert not (leads and needed), f"{leads} has not stated again what {needed} need"

    def _tell_leader(self, manager: ManagerProcess, event: LeaderInput) -> None:
        leader = manager.leader
        if leader is None:
            return
        effects = leader.handle(event, self.agenda.now)
        leader.check()
        for effect in effects:
            self._do_for_leader(manager, effect)

    def _do_for_leader(self, manager: ManagerProcess, effect: LeaderEffect) -> None:
        match effect:
            case SendAssign(runner=name, request=assign):
                runner = self._runner(name)
                self._send(runner, lambda: self._tell_runner(runner, AssignCame(assign), manager))
            case SendAbort(runner=name, request=abort):
                runner = self._runner(name)
                self._send(runner, lambda: self._tell_runner(runner, AbortCame(abort), manager))
            case LoadPrompt(request=of):
                self._later(manager, 0.001, lambda: self._tell_leader(manager, self._prompt(of)))
            case LoadPrefix(request=of):
                self._later(manager, 0.002, lambda: self._load_prefix(manager, of))
            case StoreEnd(ended=ended):
                # One that kills engines fails for that, also where an instance has its version.
                is_killer = ended.request in self.poisoned and "made no token" in (ended.error or "")
                if ended.reason == "failed" and not is_killer:
                    self._check_gone(manager, ended.request)
                else:
                    self._check_age(manager, effect)
                payload = self._write([Written(effect.tokens, effect.logprobs, effect.runs)]) if ended.tokens else None
                assert manager.leader is not None
                self.append(End(manager.leader.term, (ended,), payload), manager)
                if self.random.random() < self.chances.killed_at_end:
                    self._later(manager, self.random.uniform(0.0, 0.01), partial(self.kill, manager))
            case StoreTokens(part=part):
                payload = self._write([Written(effect.tokens, effect.logprobs, effect.runs)])
                assert manager.leader is not None
                self.append(Checkpoint(manager.leader.term, effect.instance, (part,), payload), manager)
            case InstanceLost():
                self._note_lost(manager, effect)
            case _:
                pass

    @property
    def staleness(self) -> int:
        """How many newer versions may be published where a response begins."""
        return STALENESS if self.age_max is None else min(STALENESS, self.age_max)

    def _check_age(self, manager: ManagerProcess, effect: StoreEnd) -> None:
        """No response ends that is older than it may be, as far as its leader knows, but for one that began anew."""
        leader, of = manager.leader, effect.ended.request
        assert leader is not None
        request = leader.requests[of]
        if request.age_max is None or request.restarts or of in self.pinned:
            return
        if not effect.runs:
            return
        oldest = min(run.version for run in effect.runs)
        newer = sum(each > oldest for each in leader.models[MODEL].published.published)
        assert newer <= request.age_max, f"{of} ends on version {oldest}, and {newer} newer ones are published"

    def _note_lost(self, manager: ManagerProcess, effect: InstanceLost) -> None:
        """No runner is lost that the leader could not hear, or that was heard just now."""
        runner, now = self._runner(effect.runner), self.agenda.now
        self._lost.add((runner.name, runner.life))
        if not effect.reason.startswith("it was silent"):
            return
        silence_s = LeaderLimits().silence_s
        assert now >= self._cut_until + silence_s, f"{runner.name} is lost while NATS is away"
        assert now >= manager.asleep_until + silence_s, f"{runner.name} is lost by a leader that was asleep"
        is_there = runner.is_up and min(now - runner.asleep_until, now - runner.started_at) >= silence_s
        assert not is_there, f"{runner.name} is lost and was there all the time"

    def _check_gone(self, manager: ManagerProcess, of: RequestId) -> None:
        """No request fails for its version where a runner has had that for a while, and could be heard."""
        version = self.pinned.get(of, -1)
        if self.hub.versions.is_retired(version):
            return
        for runner in self.runners:
            began = (runner.loaded_at, runner.asleep_until, runner.started_at, manager.asleep_until, self._cut_until)
            has_it = runner.is_up and not runner.is_loading and runner.loaded == version
            assert not has_it or self.agenda.now - max(began) < HEARD_S, (
                f"{of} fails, and {runner.name} has version {runner.loaded}"
            )

        # A poisoned one fails for itself, and mapped runners load no older version.
        is_kept = (
            version in self.hub.retained | self.hub.copies | self.hub.coming
            and of not in self.poisoned
            and not self.mapped_memories
        )
        assert not is_kept, f"{of} fails, and the hub has version {version}"

    def _check_told(self, manager: ManagerProcess, runner: RunnerProcess, result: HeartbeatResult) -> None:
        """No runner is told to leave a version that requests are for alone, where no other runner would have it."""
        leader, core = manager.leader, runner.core
        assert leader is not None
        assert core is not None
        version = core.version_wanted
        if version is None or core.version != version:
            return
        if result.version_wanted in {None, version} or result.term < core.term:
            return
        others = [each.version_wanted for name, each in leader.instances.items() if name != runner.name]
        is_left = not leader.pinned.demand(MODEL).get(version) or version in others
        can_come_back = version in self.hub.retained | self.hub.copies or version == self.hub.newest
        assert is_left or can_come_back or self.hub.versions.is_retired(version) or core.is_leaving, (
            f"{runner.name} is told {result.version_wanted}, and is the last that has {version}"
        )

    def _write(self, responses: list[Written]) -> Payload:
        digest = sha256(repr(responses).encode()).hexdigest()
        self.payloads[digest] = responses
        return Payload(digest, sum(len(each.tokens) + len(each.logprobs) for each in responses))

    def _prompt(self, of: RequestId) -> PromptLoaded:
        prompt = struct.pack("<i", 7)
        sampling = Sampling(TOKENS_MAX, self.seeds[of], stop_token_ids=(STOP,))
        rule = VersionRule(staleness=STALENESS, on_update=self.on_update)
        said = SubmittedPrompts(sampling, rule, (SubmittedPrompt(prompt),), "nonce", self.age_max)
        return PromptLoaded(of, prompt, sampling, said.rule_of(self.pinned.get(of)), self.age_max)

    def _load_prefix(self, manager: ManagerProcess, of: RequestId) -> None:
        """Read the parts that the manager's own state names."""
        request = manager.state.request(of)
        if request is None:
            return
        tokens, logprobs, runs = bytearray(), bytearray(), list[TokenRun]()
        for part in request.parts:
            (written,) = self.payloads[part.payload]
            count = 4 * (part.stop - part.start)
            tokens += written.tokens[:count]
            logprobs += written.logprobs[:count]
            runs += [run for run in written.runs if run.start < part.stop and (not runs or run.start > runs[-1].start)]
        self._tell_leader(manager, PrefixLoaded(of, bytes(tokens), bytes(logprobs), tuple(runs)))

    # ------------------------------------------------------------------------------------------ runners

    def _runner(self, name: str) -> RunnerProcess:
        return next(each for each in self.runners if each.name == name)

    def start_runner(self, runner: RunnerProcess) -> None:
        """Start a runner with an engine that loads the newest version."""
        runner.life += 1
        runner.is_up, runner.incarnation, runner.started_at = True, runner.incarnation + 1, self.agenda.now
        runner.core = Runner(
            runner.name,
            MODEL,
            runner.incarnation,
            RunnerLimits(slots=4, held_max=12),
            self.agenda.now,
            keeps_versions=not self.mapped_memories,
        )
        runner.engine, runner.cached, runner.prefills = {}, {}, {}
        runner.loaded, runner.staged, runner.is_loading = None, None, False
        self._later(runner, 0.01, lambda: self._engine_step(runner))

    def notice(self, runner: RunnerProcess) -> None:
        """Tell a runner that its machine goes away, and take it away a moment later."""
        life = runner.life
        self._later(runner, 0.0, lambda: self._tell_runner(runner, PreemptionNoticed()))
        self.agenda.after(0.8, lambda: self.kill(runner) if runner.life == life else None)

    def _tell_runner(self, runner: RunnerProcess, event: RunnerInput, asker: ManagerProcess | None = None) -> None:
        assert runner.core is not None
        effects = runner.core.handle(event, self.agenda.now)
        runner.core.check()
        self._check_superseded(runner.core)
        for effect in effects:
            self._do_for_runner(runner, effect, asker)

    def _do_for_runner(self, runner: RunnerProcess, effect: RunnerEffect, asker: ManagerProcess | None) -> None:
        core, name = runner.core, runner.name
        assert core is not None
        match effect:
            case AnswerAssign(results=results) if asker is not None:
                self._note_confirmed(runner, results)
                answer: LeaderInput = AssignAnswered(name, runner.incarnation, results)
                self._send(asker, lambda: self._tell_leader(asker, answer))
            case AnswerAbort(stopped=stopped, forgotten=forgotten) if asker is not None:
                answer = AbortAnswered(name, runner.incarnation, stopped, forgotten)
                self._send(asker, lambda: self._tell_leader(asker, answer))
            case SendFrame(frame=frame):
                self._ask_leaders(runner, FrameCame(name, frame))
            case SendReport(report=report):
                self._ask_leaders(runner, ReportCame(name, report))
            case SendHeartbeat(beat=beat):
                self._ask_leaders(runner, HeartbeatCame(name, beat))
            case Begin(attempt=attempt, tokens=tokens, sampling=sampling):
                runner.engine[attempt] = (sampling.seed, len(tokens) // 4)
                runner.cached[attempt] = runner.loaded
                runner.prefills[attempt] = sampling.seed % (self.chances.prefill_steps_max + 1)
                if core.held[attempt].assign.request in self.poisoned:
                    self._later(runner, STEP_S / 2, partial(self.kill, runner))
            case Stop(attempt=attempt):
                runner.engine.pop(attempt, None)
            case _:
                pass

    def _ask_leaders(self, runner: RunnerProcess, event: LeaderInput) -> None:
        """Ask each manager that thinks that it leads: two may, for a while, and both answer."""
        for manager in self.managers:
            self._send(manager, partial(self._answer, manager, runner, event))

    def _answer(self, manager: ManagerProcess, runner: RunnerProcess, event: LeaderInput) -> None:
        if manager.leader is None:
            return
        effects = manager.leader.handle(event, self.agenda.now)
        manager.leader.check()
        for effect in effects:
            answer: RunnerInput | None = None
            if isinstance(effect, AnswerFrame):
                answer = FrameAnswered(effect.result)
            elif isinstance(effect, AnswerReport):
                answer = ReportAnswered(effect.result)
            elif isinstance(effect, AnswerHeartbeat):
                self._check_told(manager, runner, effect.result)
                answer = HeartbeatAnswered(effect.result)
            else:
                self._do_for_leader(manager, effect)
            if answer is not None:
                self._send(runner, partial(self._tell_runner, runner, answer))

    def _engine_step(self, runner: RunnerProcess) -> None:
        core = runner.core
        assert core is not None
        newest, wanted = self.hub.newest, core.version_wanted
        version = newest if wanted is None or wanted not in self.hub.available(self._loaded()) else wanted
        if version == self.hub.drained:
            runner.staged = None
            if runner.loaded == version and not runner.is_loading:
                self._let_go(runner)
        elif not runner.is_loading and runner.staged is None and runner.loaded != version:
            # It is beside the engine's, and takes its place as soon as that may be, whatever is wanted by then.
            runner.staged = version
            self._tell_runner(runner, LoadWanted())
        if runner.staged is not None and core.may_load:
            self._load(runner, runner.staged)
        made: list[StepTokens] = []
        if not runner.is_loading and runner.loaded is not None:
            able = [each for each in runner.engine if self._is_prefilled(runner, each)]
            made = [self._next_token(runner, attempt, runner.loaded) for attempt in able]
        before = {each.attempt: core.held[each.attempt].count for each in made}
        self._tell_runner(runner, EngineStepped(tuple(made)) if made else Tick())
        for attempt, position in before.items():
            if attempt in core.held and core.held[attempt].count > position and runner.loaded is not None:
                of = core.held[attempt].assign.request
                self._check_rule(core, of, runner.loaded, position)
                self._note_made(runner, of, position)
        self._later(runner, STEP_S, lambda: self._engine_step(runner))

    def _is_prefilled(self, runner: RunnerProcess, attempt: Attempt) -> bool:
        """Compute a part of an attempt's prompt; tell whether it was all of it before. One that kills has no end."""
        assert runner.core is not None
        left = runner.prefills[attempt]
        runner.prefills[attempt] = max(0, left - 1)
        return not left and runner.core.held[attempt].assign.request not in self.poisoned

    def _note_made(self, runner: RunnerProcess, of: RequestId, position: int) -> None:
        """No token is made twice while its maker lives; a runner that was taken for lost does not count.

        Nor does one that the present leader has not heard: a stopped one may sleep through an election, and its
        requests go elsewhere without a word about it.
        """
        begins_anew = self.on_update == "restart" or self.age_max is not None or self.hub.rewinds
        if not self._is_heard(runner) or begins_anew:
            return
        maker, life, stops = self._makers.get((of, position), (runner, 0, 0))
        is_there = maker.life == life and maker.stops == stops and self._is_heard(maker)
        assert not is_there, f"token {position} of {of} is made by {runner.name}, and {maker.name} has it"
        self._makers[of, position] = (runner, runner.life, runner.stops)

    def _is_heard(self, runner: RunnerProcess) -> bool:
        """Whether a runner lives, was never taken for lost, and is an instance of the leader with the highest term."""
        if not runner.is_up or (runner.name, runner.life) in self._lost:
            return False
        leaders = [each.leader for each in self.managers if each.is_up and each.leader is not None]
        return bool(leaders) and runner.name in max(leaders, key=lambda each: each.term).instances

    def _note_confirmed(self, runner: RunnerProcess, results: Iterable[AssignResult]) -> None:
        """A runner that has confirmed a whole prefix has it; the runner before may forget it from now on.

        That goes for one that was taken for lost once, and has joined again: what it has does not count, but the one
        before it is told to forget all the same.
        """
        assert runner.core is not None
        for result in results:
            held = runner.core.held.get(result.attempt)
            if held is not None and held.is_whole:
                for position in range(held.assign.prefix):
                    self._makers[held.assign.request, position] = (runner, runner.life, runner.stops)

    def _next_token(self, runner: RunnerProcess, attempt: Attempt, version: int) -> StepTokens:
        """Make the next token of an attempt; that it was the last one is told with it, or a step later."""
        seed, position = runner.engine[attempt]
        assert runner.core is not None
        run = runner.core.held[attempt].runs[-1]
        assert runner.cached[attempt] == version or run.kv == "kept", (
            f"{attempt} goes on with {version} and a cache of {runner.cached[attempt]}, and its run does not say so"
        )
        if position < 0:
            del runner.engine[attempt]
            return StepTokens(attempt, b"", b"", Finished(attempt, 0, "stop"))
        self.made += 1
        token = token_of(seed, position, attempt)
        finished = None
        if token == STOP and self.random.random() < self.chances.told_late:
            runner.engine[attempt] = (seed, -1)
        elif token == STOP or position + 1 == TOKENS_MAX:
            del runner.engine[attempt]
            finished = Finished(attempt, 0, "stop" if token == STOP else "length")
        else:
            runner.engine[attempt] = (seed, position + 1)
        return StepTokens(attempt, struct.pack("<i", token), struct.pack("<f", -version), finished)

    def _check_superseded(self, core: Runner) -> None:
        """No attempt is given back that its rule allows: at most so many newer versions are published, by count."""
        for attempt, held in core.held.items():
            if held.finished is None or held.finished.reason != "superseded" or attempt in self._superseded:
                continue
            self._superseded.add(attempt)
            if core.version is None:
                assert not core.is_changing
                continue
            newer = sum(each > core.version for each in core.versions.published)
            if self.pinned.get(held.assign.request, core.version) != core.version:
                continue
            assert core.versions.is_retired(core.version) or newer > self.staleness, (
                f"{attempt} is given back on version {core.version}, where {newer} newer ones are published"
            )

    def _check_rule(self, core: Runner, of: RequestId, version: int, position: int) -> None:
        """No request starts where its rule forbids it, and none goes on with a retired version, as the runner knows."""
        assert not core.versions.is_retired(version), f"a token counts of version {version}, which is retired"
        newer = sum(each > version for each in core.versions.published)
        if of in self.pinned:
            assert version == self.pinned[of], f"{of} is for version {self.pinned[of]}, and gets a token of {version}"
            return
        assert position or newer <= self.staleness, (
            f"a request starts on version {version}, and {newer} newer ones are published"
        )

    def _load(self, runner: RunnerProcess, version: int) -> None:
        core = runner.core
        assert core is not None
        is_left = core.version_wanted is None or core.version_wanted != core.version
        assert is_left or core.versions.is_retired(core.version_wanted or 0), (
            f"{runner.name} leaves version {core.version}, which it was told to keep"
        )
        runner.is_loading, runner.staged = True, None
        self._tell_runner(runner, WeightsChanging())

        def loaded() -> None:
            runner.is_loading, runner.loaded, runner.loaded_at = False, version, self.agenda.now
            self._tell_runner(runner, WeightsLoaded(version, f"root-{version}"))
            self._tell_versions()

        self._tell_versions()
        self._later(runner, LOAD_S, loaded)

    def _let_go(self, runner: RunnerProcess) -> None:
        """Its trainer waits for the memory that it shows; it has no weights until the next version comes."""
        self._tell_runner(runner, WeightsChanging())
        runner.loaded = None
        self._tell_runner(runner, WeightsLoaded(None))

    def publish(self) -> None:
        """Publish the next version. A trainer with one memory that is mapped waits until it is free."""
        if self.mapped_memories != 1:
            self._publish()
        elif self.hub.drained is None:
            self.hub.drained = self.hub.newest
            self._tell_versions()
            self.agenda.after(self.random.choice(OVERWRITTEN_S), self._publish_when_free)

    def _publish_when_free(self) -> None:
        shown = [each.loaded for each in self.runners if each.is_up]
        if self.hub.drained in shown or any(each.is_loading for each in self.runners if each.is_up):
            self.agenda.after(STEP_S, self._publish_when_free)
        else:
            self._publish()

    def _publish(self) -> None:
        self.hub.publish(self.random, self.chances.retained)
        self._tell_versions()

    def rewind(self) -> None:
        """Go back behind the newest versions."""
        if self.hub.rewind(self.random):
            self._tell_versions()

    def _loaded(self) -> list[int]:
        """Return what can be loaded from runners. A version that is being loaded stays until it is."""
        if self.mapped_memories:
            return []
        return [each.loaded for each in self.runners if each.is_up and each.loaded is not None and not each.is_loading]

    def _tell_versions(self) -> None:
        """Have each manager see the versions as they are now, one after the other, where they have changed."""
        seen = self.hub.seen(self._loaded())
        if seen == self._seen:
            return
        self._seen = seen
        self._seen_at = max(self._seen_at + 1e-6, self.agenda.now + self.random.uniform(0.001, 0.05))
        for manager in self.managers:
            self._later(manager, self._seen_at - self.agenda.now, partial(self._tell_leader, manager, seen))

    # ------------------------------------------------------------------------------------------ the trainer

    def _attach(self) -> None:
        self.append(Attach(NAME, MODEL, 0, "nonce", self.policy))

    def restart_trainer(self) -> None:
        """Kill the trainer between receipt and `done`: what it had yielded and not acknowledged comes again."""
        self._attachment = 0
        self.collector = Collector()
        self._attach()

    def _by(self) -> SdkSender:
        self._n += 1
        return SdkSender(self._attachment, self._n)

    def _trainer_look(self) -> None:
        """Submit a group, take what has ended, and acknowledge some of it."""
        if self._attachment:
            if self._groups_left and self.random.random() < self.chances.submits:
                self._groups_left -= 1
                self._group += 1
                is_pinned = self.random.random() < self.chances.pinned
                version = self.random.choice(self.hub.versions.published[-3:]) if is_pinned else None
                group = GroupSubmitted(f"p{self._group}", "a" * 64, 4, 1, TOKENS_MAX, version=version)
                self.append(Submit(self._by(), (group,), Payload(sha256(group.id.encode()).hexdigest(), 4)))
            self._take_ended()
        self.agenda.after(0.05, self._trainer_look)

    def _take_ended(self) -> None:
        collector, place = self.collector, self.collector.place
        question = ReadyQuestion(self._attachment, 0, *place, count_max=self.random.randint(1, 6))
        answer = answer_ready(self.truth, question, {}, {})
        # Two tasks of the trainer have asked from the same place.
        collector.take(place, answer)
        collector.take(place, answer)
        is_whole = self.random.random() < self.chances.whole_groups or bool(self.payload_bytes_max)
        picked = collector.pick(1, whole_groups=is_whole, groups=None, all_of_them=False)
        ready = [each for each in picked if isinstance(each, EndedRequest)]
        self._check_whole(ready)
        self.yielded += [(self._attachment, each.request) for each in ready]
        undone = [of for attachment, of in self.yielded if attachment == self._attachment and of not in self.done]
        if undone and self.random.random() < self.chances.acknowledges:
            self.append(Done(self._by(), tuple(undone)))

    def _check_whole(self, picked: list[EndedRequest]) -> None:
        """Requests of a group have seeds of their own."""
        seeds = [self.seeds[each.request] for each in picked]
        assert len(set(seeds)) == len(seeds), f"two requests have one seed: {[each.request for each in picked]}"

    def cancel(self, group: str) -> None:
        """Cancel a group that was submitted."""
        if self._attachment and group in self.truth.consumers[NAME].ids:
            self.append(Cancel(self._by(), (group,)))

    @property
    def is_over(self) -> bool:
        """Whether every group was submitted and every request is done."""
        return not self._groups_left and bool(self.opened) and len(self.done) == len(self.opened)


def _begun(leader: Leader) -> set[tuple[int, int]]:
    """Return the open groups that have begun as far as a leader can know, as (submission, index of the group)."""
    found = set()
    for of, request in leader.requests.items():
        submission = leader.state.submissions[of.submission]
        stored = submission.requests[of.index]
        group = submission.groups[stored.group]
        held = leader.responses.get(of)
        if request.placement is not None or group.open < group.size or stored.kept or (held is not None and held.count):
            found.add((of.submission, stored.group))
    return found


def _raise(what: str, why: Exception) -> None:
    raise AssertionError(f"{what} failed") from why


def _engines(leader: Leader) -> Engines:
    return Engines(dict.fromkeys(leader.instances, STEPS), dict.fromkeys(leader.instances, 2))
