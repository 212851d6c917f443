"""The agent of one GPU within one job: its shards, its leases and its membership in the log. Pure.

All decisions of an agent are made here and in the modules that this one calls. `app/service.py` and the simulator only
carry out the returned effects. Each method takes an event and the time, and returns effects.

`begin` selects the operation that does a call. `is_published` and `may_be_decided` select the lease requests that are
worth holding when they arrive before this agent has received the matching log entries.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from tensorhub_agent.core.command_sequencer import SHARDS_MAX, CommandSequencer
from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import (
    AnyCall,
    AnyEffect,
    AppendCommand,
    BreakLease,
    CallPublish,
    CallRead,
    CallRegister,
    CallRelease,
    CallUnpublish,
    CompleteCall,
    CopyMade,
    EffectOutcome,
    EndFenced,
    FailCall,
    FreeShard,
    Kept,
    PlanReceived,
    Rejoin,
    RequestPlan,
)
from tensorhub_agent.core.operation import Operation
from tensorhub_agent.core.operations.drain import AttachOperation, ReleaseOperation, UnpublishOperation
from tensorhub_agent.core.operations.publish import PublishOperation
from tensorhub_agent.core.operations.read import ReadOperation, ReadStage, read_of
from tensorhub_agent.core.operations.register import RegisterOperation
from tensorhub_agent.core.plan_queue import PlanQueue
from tensorhub_agent.core.retained_copies import RetainedCopies
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState, ShardContents, ShardSpec
from tensorhub_agent.leases.lease import Lease, LeaseTransition
from tensorhub_agent.leases.table import LeaseTable
from tensorhub_agent.primitives.deadlines import DeadlineHeap
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.rates.link_rates import LinkRates
from tensorhub_common.errors import AgentUnavailable, JobGone, MemoryExhausted, RegistryUnavailable, StaleSender, gone
from tensorhub_common.protocol.heartbeat import ReaderLoad
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.log.commands import HeldShard, Join, Release, Sender
from tensorhub_common.protocol.log.events import (
    AgentJoined,
    AgentLost,
    AnyEvent,
    CommandRejected,
    CopyPlaced,
    JobDeleted,
    RoundJoined,
    RoundStarted,
    ShardReleased,
)
from tensorhub_common.protocol.plans import Transport
from tensorhub_common.protocol.subjects import cached_version


def begin(core: ShardCore, call: AnyCall) -> Operation:
    """Return the operation that does a call; it has not started."""
    match call:
        case CallRegister():
            return AttachOperation(core, call) if core.registered else RegisterOperation(core, call)
        case CallPublish():
            return PublishOperation(core, call)
        case CallUnpublish():
            return UnpublishOperation(core, call)
        case CallRead():
            return ReadOperation(core, call)
        case CallRelease():
            return ReleaseOperation(core, call)


def is_published(core: ShardCore | None, ask: LeaseRequest) -> bool:
    """Tell whether the log has taken the version that is asked for as published by this shard."""
    return core is not None and (core.contents.memory, core.contents.version) == (MemoryState.READY, ask.version)


def may_be_decided(core: ShardCore | None, ask: LeaseRequest) -> bool:
    """Tell whether the log may have decided what this agent has not heard yet, and the reader has.

    Or whether it is not known yet by which program the shard will be filled.
    """
    read = read_of(core)
    if read is None:
        return False
    return read.stage is ReadStage.JOINING or (ask.program is not None and read.may_turn_to_program)


UNSENT_MAX: Final = 64
"""At this many commands of a shard that wait until the agent has joined its calls are refused."""


class AgentCore:
    """One agent's decisions in one job."""

    def __init__(self, agent: str, config: CoreConfig, measured: LinkRates | None = None) -> None:
        """Begin with nothing; `adopt` what was found, then `join`. What is `measured` all jobs of an agent share."""
        self.agent, self.config = agent, config
        self.measured = measured or LinkRates()
        self.joined = False
        self.leases = LeaseTable(config.leases)
        self.shards: dict[ShardKey, ShardCore] = {}
        self._replicas: dict[tuple[str, str], dict[ShardKey, ShardCore]] = {}
        """The same, by model and replica: an event is about one replica, and an agent may have a thousand."""
        self._deadlines: DeadlineHeap[ShardKey] = DeadlineHeap()
        """When each shard wants `tick`. It changes only where the shard's effects are taken."""
        self._sequencer = CommandSequencer(agent)
        self._stated: dict[ShardKey, ShardCore] = {}
        """What the present incarnation has stated that it has."""
        self._unsent: list[AppendCommand] = []
        """Said before the log has let this incarnation in, which would refuse it as stale."""
        self._unsent_of: Counter[str] = Counter()
        """How many of them each lane has."""
        self.deleted: str | None = None
        """The message of every error about this job, once the job is deleted."""
        self.retained_copies = RetainedCopies(agent)
        self.aside: set[ShardKey] = set()
        """Shards whose memory stands here and could not be taken back."""
        self._plans = PlanQueue()

    # Standing in the log.

    @property
    def incarnation(self) -> int:
        """Under which this agent speaks; 0 before the first `join`."""
        return self._sequencer.incarnation

    def adopt(self, spec: ShardSpec, contents: ShardContents) -> None:
        """Take a shard that an earlier process of this agent left behind, before joining. Raises `MemoryExhausted`."""
        self.check_room()
        self._add(spec, contents)
        self.retained_copies.found(spec.key)

    def set_aside(self, key: ShardKey) -> None:
        """Note, before joining, a shard whose memory was left where it stands: it is not served, and not given up.

        The log is told of it as of an empty shard, so that it is known when a later process can take it back, and a
        copy is stated with its version and no root: another one is placed where somebody holds the version and some
        agent has room, and this one is freed once that stands. What the log knows nothing of can't be believed, and is
        freed.
        """
        if key not in self.shards and len(self.aside) < SHARDS_MAX:
            self.aside.add(key)

    def check_room(self) -> None:
        """Raise `MemoryExhausted` when the agent has as many shards of this job as it may have."""
        if len(self.shards) >= SHARDS_MAX:
            raise MemoryExhausted(
                f"agent {self.agent!r} has {SHARDS_MAX} shards of this job, which is the limit: release some, or "
                "connect to another agent"
            )

    def join(self, incarnation: int, host: str, site: str, now: float, *, rack: str = "") -> list[AnyEffect]:
        """Speak under a new incarnation, and state what stands ready here."""
        again = self.incarnation > 0
        self._sequencer.begin(incarnation)
        self.joined = False
        self._unsent.clear()
        self._unsent_of.clear()
        self._stated = dict(self.shards)
        self.retained_copies.only(self.shards)
        holds = tuple(self._holding(core) for core in self.shards.values())
        holds += tuple(_holding_aside(key) for key in sorted(self.aside))
        by, cache_bytes = self._sequencer.sender(0), self.config.cache_bytes
        joins = Join(by=by, host=host, site=site, rack=rack, holds=holds, cache_bytes=cache_bytes)
        effects: list[AnyEffect] = [AppendCommand(joins)]
        if again:
            for core in list(self.shards.values()):
                core.rejoined(now)
                effects += self._take(core)
        return effects

    def _holding(self, core: ShardCore) -> HeldShard:
        key, contents = core.key, core.contents
        ready = contents.memory is MemoryState.READY
        return HeldShard(
            model=key.model,
            replica=key.replica,
            shard=key.shard,
            version=contents.version if ready else None,
            root=contents.root if ready else None,
        )

    def on_event(self, event: AnyEvent, now: float) -> list[AnyEffect]:
        """Take the next event of the job's log."""
        if self._sequencer.is_repeat(event):
            return []
        effects: list[AnyEffect] = []
        if self.deleted is not None:
            return []
        if isinstance(event, JobDeleted):
            return self.job_deleted(str(gone(event.job)), now)
        if isinstance(event, CommandRejected) and event.error == JobGone.__name__:
            return self.job_deleted(event.message, now)
        effects += self._on_standing(event, now)
        for core in self._concerned(event):
            core.on_event(event, now)
            if isinstance(event, RoundStarted) and self._is_given_up(core, event):
                core.overwritten_for_log(event.version)
            effects += self._take(core)
        if isinstance(event, RoundJoined):
            self.retained_copies.called_for(event)
        if isinstance(event, CopyPlaced) and self.joined:
            effects += self._copies_placed(event)
        elif isinstance(event, ShardReleased):
            effects += self._copy_released(ShardKey(event.model, event.replica, event.shard))
        return effects + self._tend_copies(now) + self._ask_plans(now)

    def job_deleted(self, why: str, now: float) -> list[AnyEffect]:
        """Free all that stands here, each as soon as nothing can be written into it any more, and say nothing more."""
        if self.deleted is not None:
            return []
        self.deleted = why
        self._unsent.clear()
        self._unsent_of.clear()
        self.retained_copies.only(())
        effects: list[AnyEffect] = []
        for core in list(self.shards.values()):
            core.job_deleted(why, now)
            effects += self._take(core)
        effects += [FreeShard(key) for key in sorted(self.aside)]
        self.aside.clear()
        return effects

    @property
    def is_over(self) -> bool:
        """Whether the job is deleted, and nothing of it is left here."""
        return self.deleted is not None and not self.shards

    def _copies_placed(self, event: CopyPlaced) -> list[AnyEffect]:
        """Make the copies that the log wants here, as many as there may be shards."""
        effects: list[AnyEffect] = []
        for wanted in self.retained_copies.placed(event):
            coming = sum(key not in self.shards for key in self.retained_copies.copies)
            full = len(self.shards) + coming > SHARDS_MAX
            effects += self._copy_refused(wanted.key) if full else [wanted]
        return effects

    def _copy_released(self, key: ShardKey) -> list[AnyEffect]:
        """Forget a copy, and free what was set aside of it: the name of a copy is never used again."""
        self.retained_copies.forget(key)
        if key not in self.aside or cached_version(key.replica) is None:
            return []
        self.aside.discard(key)
        return [FreeShard(key)]

    def _copy_refused(self, key: ShardKey) -> list[AnyEffect]:
        """Let the log know that there is no memory for a copy, so that it is placed elsewhere."""
        release = Release(model=key.model, replica=key.replica, shard=key.shard)
        wanted = self.retained_copies.copies.pop(key, None)
        said = [] if wanted is None else [self._say_for(key, release)]
        return [effect for effect in said if self.joined or not self._kept_back(effect)]

    def copy_made(self, made: CopyMade, now: float) -> list[AnyEffect]:
        """Take the memory that was made for a copy, or let the log know that there is none."""
        key = made.key
        if made.failure is not None:
            return self._copy_refused(key)
        if key not in self.retained_copies.copies:
            # The log has let it go while it was made.
            return [FreeShard(key)]
        if len(self.shards) >= SHARDS_MAX:
            return [FreeShard(key), *self._copy_refused(key)]
        self._add(ShardSpec(key, made.shards, spot=False, layout=made.layout, nbytes=made.nbytes), ShardContents())
        return self._tend_copies(now)

    def copy_failed(self, key: ShardKey, now: float) -> list[AnyEffect]:
        """What a copy stands on does not keep it: let it go, so that the log places it elsewhere."""
        self.retained_copies.give_up(key)
        return self._tend_copies(now)

    def _say_for(self, key: ShardKey, command: Release) -> AnyEffect:
        """Say something about a shard that does not stand here."""
        return AppendCommand(
            msgspec.structs.replace(command, by=self._sequencer.sender(self._sequencer.lane_of(key, self.shards)))
        )

    def _tend_copies(self, now: float) -> list[AnyEffect]:
        effects: list[AnyEffect] = []
        if not self.joined:
            return effects
        for key, copy in list(self.retained_copies.copies.items()):
            core = self.shards.get(key)
            if core is not None:
                self.retained_copies.tend(core, now)
                effects += self._take(core)
            elif copy.again is not None:
                # It was tried, and is gone from here since.
                self.retained_copies.forget(key)
        return effects

    def _is_given_up(self, core: ShardCore, event: RoundStarted) -> bool:
        """Tell whether the log gives up what stands in a shard for a round without a call here.

        What is told before the agent has joined is over: the join states what stands here, and the log takes that.
        """
        read = read_of(core)
        is_followed = read is not None and read.writes_for(event.round)
        return self.joined and core.is_mine(event) and not is_followed

    def _on_standing(self, event: AnyEvent, now: float) -> list[AnyEffect]:
        """Take what the log says of this agent's standing, or of another one's."""
        if isinstance(event, AgentJoined) and event.agent == self.agent:
            return self._on_joined(event, now)
        if isinstance(event, AgentLost):
            return self._on_lost(event)
        return [Rejoin()] if self._is_disowned_by(event) else []

    def _is_disowned_by(self, event: AnyEvent) -> bool:
        """Tell whether the log does not take this incarnation for the live one any more."""
        refused = isinstance(event, CommandRejected) and event.error == StaleSender.__name__
        return refused and self._sequencer.is_answered_by(event)

    def _on_lost(self, event: AgentLost) -> list[AnyEffect]:
        """Join anew if it is this one that the log has lost; else let reads know, which may wait for what it brings."""
        if event.agent == self.agent:
            return [Rejoin()] if event.incarnation == self.incarnation else []
        effects: list[AnyEffect] = []
        for core in list(self.shards.values()):
            read = read_of(core)
            if read is not None:
                read.lose_agent(event.agent, event.incarnation)
                effects += self._take(core)
        return effects

    def _on_joined(self, event: AgentJoined, now: float) -> list[AnyEffect]:
        if event.incarnation != self.incarnation:
            # A process with this agent's name and a higher incarnation spoke; the log refuses what this one says.
            return [EndFenced()] if event.incarnation > self.incarnation else []
        self.joined = True
        effects: list[AnyEffect] = []
        dropped: set[str] = set()
        for holding in event.dropped:
            core = self._stated_core(holding)
            if core is not None:
                dropped.add(self.lane(core.key))
                self.retained_copies.forget(core.key)
                core.dismiss(now)
                effects += self._take(core)
            elif (key := ShardKey(holding.model, holding.replica, holding.shard)) in self.aside:
                self.aside.discard(key)
                effects.append(FreeShard(key))
        for holding in event.kept:
            core = self._stated_core(holding)
            if core is not None:
                core.believed(holding.version, holding.root)
                effects += self._take(core)
        # A worker may have published a shard that the log drops: its memory is gone, so the command has no meaning.
        unsent = [each for each in self._unsent if each.command.by is None or each.command.by.lane not in dropped]
        self._unsent.clear()
        self._unsent_of.clear()
        return effects + unsent

    def _stated_core(self, holding: HeldShard) -> ShardCore | None:
        """Return the shard that was stated, unless it has gone since; one that was registered anew is another."""
        key = ShardKey(holding.model, holding.replica, holding.shard)
        core = self.shards.get(key)
        return core if core is not None and self._stated.get(key) is core else None

    def _concerned(self, event: AnyEvent) -> list[ShardCore]:
        model, replica = getattr(event, "model", None), getattr(event, "replica", None)
        speaker = []
        if event.by is not None and event.by.process == self.agent and "/" in event.by.lane:
            key = self._sequencer.shard_of(int(event.by.lane.partition("/")[2]))
            core = self.shards.get(key) if key is not None else None
            speaker = [core] if core is not None else []
        if replica is None:
            return speaker
        group = list(self._replicas.get((str(model), replica), {}).values())
        return group + [core for core in speaker if core not in group]

    # Shards and calls.

    def register(self, spec: ShardSpec, call: AnyCall, now: float) -> list[AnyEffect]:
        """Bring a new shard whose segment stands already."""
        if self.deleted is not None:
            return [FreeShard(spec.key), FailCall(call.call, JobGone.__name__, self.deleted)]
        try:
            self.check_room()
        except MemoryExhausted as why:
            return [FreeShard(spec.key), FailCall(call.call, MemoryExhausted.__name__, str(why))]
        core = self._add(spec, None)
        core.session = call.session
        core.called(call, now)
        return self._take(core)

    def called(self, key: ShardKey, call: AnyCall, now: float) -> list[AnyEffect]:
        """Begin a call on a shard; `CallRegister` is a worker that comes back to it."""
        core = self.shards.get(key)
        if self.deleted is not None:
            return [FailCall(call.call, JobGone.__name__, self.deleted)]
        if core is None and isinstance(call, CallRelease):
            # Its caller has given up waiting for a release that came to its end, and asks once more.
            return [CompleteCall(call=call.call)]
        if core is None:
            name = f"shard {key.shard} of {key.model}/{key.replica}"
            return [
                FailCall(
                    call.call, AgentUnavailable.__name__, f"{name} is not on agent {self.agent!r}: register it again"
                )
            ]
        if self._unsent_of[self.lane(key)] >= UNSENT_MAX:
            why = f"no registry has let agent {self.agent!r} back into the job yet, and earlier calls wait for that"
            return [
                FailCall(call.call, RegistryUnavailable.__name__, f"{why}: see 'tensorhub status', then call again")
            ]
        core.called(call, now)
        return self._take(core)

    def lane(self, key: ShardKey) -> str:
        """Return the name of the lane on which a shard that stands here speaks."""
        return f"{self.agent}/{self._sequencer.lanes[key]}"

    def loaded(self, key: ShardKey) -> list[AnyEffect]:
        """The worker wrote values of its own: the memory is whole, and nothing of an earlier read is left."""
        core = self.shards.get(key)
        if core is None or core.contents.memory is not MemoryState.EMPTY or core.operation is not None:
            return []
        core.set_memory(MemoryState.EMPTY, partial=False, kept=None)
        return self._take(core)

    def worker_gone(self, session: int, now: float) -> list[AnyEffect]:
        """A worker's connection ended."""
        effects: list[AnyEffect] = []
        for core in list(self.shards.values()):
            core.worker_gone(session, now)
            effects += self._take(core)
        return effects

    def on_outcome(self, outcome: EffectOutcome, now: float) -> list[AnyEffect]:
        """Take what came of an effect."""
        core = self.shards.get(outcome.key)
        if core is None:
            return []
        if isinstance(outcome, PlanReceived):
            self._plans.answered(outcome.key, outcome.number)
        elif isinstance(outcome, Kept) and outcome.failure is not None and _awaits(core, outcome):
            self.retained_copies.give_up(outcome.key)
        core.on_outcome(outcome, now)
        return self._take(core) + self._ask_plans(now)

    # Leases.

    def lease_asked(
        self, ask: LeaseRequest, name: str, ticket: str, endpoint: str, now: float
    ) -> LeaseGrant | LeaseRefusal | None:
        """Answer a reader's agent. None: ask again once something has happened here, within a bound."""
        if (ask.source.agent, ask.source.incarnation) != (self.agent, self.incarnation):
            return LeaseRefusal(reason=f"incarnation {ask.source.incarnation} of {ask.source.agent!r} is over")
        core = self.shards.get(ShardKey(ask.model, ask.source.replica, ask.source.shard))
        if ask.mapped and not is_published(core, ask):
            # A publication can be taken back before the log has taken it, a mapping can't.
            waits = core is not None and isinstance(core.operation, PublishOperation)
            return None if waits else LeaseRefusal(reason="the shard is not published here, or it is draining")
        answer = self.leases.grant(ask, name, ticket, endpoint, now)
        if isinstance(answer, LeaseRefusal) and ask.turn is not None and may_be_decided(core, ask):
            return None
        return answer

    def lease_names(self) -> list[str]:
        """Return the names of all leases."""
        return self.leases.names()

    def lease_states(self) -> Counter[str]:
        """Count the leases by state."""
        return Counter(self.leases.states())

    def readers(self) -> list[tuple[Transport, ReaderLoad]]:
        """Return the transport and reader of each lease that costs this agent."""
        return self.leases.readers()

    def renew_lease(self, name: str, now: float) -> bool:
        """Note that a reader is alive; tells whether it waits for pieces."""
        self.leases.renew(name, now)
        return self.leases.waits(name)

    def holds_lease(self, name: str) -> bool:
        """Tell whether a lease has held up to now."""
        return self.leases.holds(name)

    def redeemed(self, ticket: str, now: float) -> Lease | None:
        """Take a ticket from the transport."""
        lease = self.leases.redeem(ticket, now)
        if lease is not None and lease.is_mapped:
            self.shards[lease.key].note_lent()
        return lease

    def lease_ended(self, name: str, how: LeaseTransition, now: float) -> list[AnyEffect]:
        """A reader is done, or gone."""
        key = self.leases.finish(name, how)
        core = self.shards.get(key) if key is not None else None
        if core is None:
            return []
        core.readers_changed(now)
        return self._take(core)

    # Time.

    def tick(self, now: float) -> list[AnyEffect]:
        """Let time pass."""
        effects: list[AnyEffect] = []
        for lease in self.leases.expire(now):
            effects += self._lease_expired(lease, now)
        for key in self._deadlines.due(now):
            core = self.shards.get(key)
            if core is not None:
                core.tick(now)
                effects += self._take(core)
        return effects + self._tend_copies(now) + self._ask_plans(now)

    def _lease_expired(self, lease: Lease, now: float) -> list[AnyEffect]:
        effects: list[AnyEffect] = [BreakLease(lease.name, "the reader was silent for too long")]
        core = self.shards.get(lease.key)
        if core is not None:
            core.readers_changed(now)
            effects += self._take(core)
        return effects

    def deadline(self) -> float | None:
        """Say when `tick` is wanted."""
        again = self.retained_copies.deadline() if self.joined else None
        times = (self._deadlines.earliest(), self.leases.deadline(), again)
        return min((each for each in times if each is not None), default=None)

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        self.leases.check()
        for key, core in self.shards.items():
            core.check()
            wanted, noted = core.deadline(), self._deadlines.of(key)
            assert wanted is None or (noted is not None and noted <= wanted), (
                f"{core.where} would be looked at too late"
            )
            assert self._replicas[key.model, key.replica][key] is core

    # How.

    def _add(self, spec: ShardSpec, contents: ShardContents | None) -> ShardCore:
        lane = self._sequencer.lane_of(spec.key, self.shards)
        sender: Callable[[], Sender] = lambda: self._sequencer.sender(lane)  # noqa: E731 (one line says it)
        core = ShardCore(spec, self.leases, self.config, sender, begin, contents, self.measured)
        self.shards[spec.key] = core
        self._replicas.setdefault((spec.key.model, spec.key.replica), {})[spec.key] = core
        self._deadlines.note(spec.key, core.deadline())
        return core

    def _forget(self, key: ShardKey) -> None:
        del self.shards[key]
        self._deadlines.forget(key)
        group = self._replicas[key.model, key.replica]
        del group[key]
        if not group:
            del self._replicas[key.model, key.replica]

    def _take(self, core: ShardCore) -> list[AnyEffect]:
        """Take a core's effects, and forget the core if it is gone."""
        out = [each for each in core.out if self._goes_out(core, each)]
        core.out = []
        if core.operation is None:
            self._plans.ended(core.key)
        if self.shards.get(core.key) is core:
            if core.gone:
                self._forget(core.key)
            else:
                self._deadlines.note(core.key, core.deadline())
        if self.deleted is not None:
            return [effect for effect in out if not isinstance(effect, AppendCommand)]
        return out if self.joined else [effect for effect in out if not self._kept_back(effect)]

    def _goes_out(self, core: ShardCore, effect: AnyEffect) -> bool:
        """Tell whether an effect is for the driver, and now."""
        if isinstance(effect, CompleteCall | FailCall):
            return not self.retained_copies.ended(effect)
        if isinstance(effect, RequestPlan) and not self._plans.admit(effect):
            read = read_of(core)
            if read is not None:
                read.plan_kept_back()
            return False
        return True

    def _ask_plans(self, now: float) -> list[AnyEffect]:
        """Let questions for plans go out that have waited for others."""
        asked: list[AnyEffect] = []
        while self._plans.has_room:
            question = self._plans.next()
            core = self.shards.get(question.key)
            read = read_of(core)
            if core is not None and read is not None and read.plan_sent(question.number, now):
                asked.append(question)
                self._deadlines.note(core.key, core.deadline())
            else:
                self._plans.answered(question.key, question.number)
        return asked

    def _kept_back(self, effect: AnyEffect) -> bool:
        """Keep a command until the log knows this incarnation."""
        if isinstance(effect, AppendCommand):
            self._unsent.append(effect)
            if effect.command.by is not None:
                self._unsent_of[effect.command.by.lane] += 1
            return True
        return False


def _holding_aside(key: ShardKey) -> HeldShard:
    return HeldShard(model=key.model, replica=key.replica, shard=key.shard, version=cached_version(key.replica))


def _awaits(core: ShardCore, outcome: Kept) -> bool:
    read = read_of(core)
    return read is not None and read.awaits(outcome)
