"""The driver of one agent's core: the log, workers, the planner and sources answer when whoever drives it says so.

Always true after a step: the core's and the catalog's invariants hold, and a call has ended once at most. Agents that
were made `beside` each other are on one log, and all of them hear what it says; `AgentsWithCopies` keep retained
versions.
"""

from collections.abc import Iterable
from typing import Any, TypeVar, cast

from msgspec import structs

from tensorhub_agent.core.agent import AgentCore
from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import (
    AllocateCopy,
    AnyCall,
    AnyEffect,
    AppendCommand,
    BatchDone,
    CallPublish,
    CallRead,
    CallRegister,
    CallRelease,
    CallUnpublish,
    CloseSource,
    CompareLayouts,
    CompleteCall,
    ConfirmLease,
    CopyMade,
    Digested,
    DigestMemory,
    EffectOutcome,
    FailCall,
    FreeShard,
    Keep,
    Kept,
    LeaseConfirmed,
    PlanReceived,
    Probed,
    ProbeMapping,
    ReadBatch,
    RequestLease,
    RequestPlan,
    SiblingsChecked,
    SourceClosed,
    SourceLost,
    SourceOpened,
)
from tensorhub_agent.core.shard_state import MemoryState, ShardContents, ShardSpec
from tensorhub_agent.leases.lease import LeaseTransition
from tensorhub_agent.primitives.digests import piece_digest, root_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.invariants import check_invariants
from tensorhub_common.catalog.state import Catalog, Round
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.log.commands import AnyCommand, Retain, VersionRequest
from tensorhub_common.protocol.log.events import AnyEvent
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, Level
from tensorhub_common.protocol.plans import Plan, Refusal, Share, SourceId
from tensorhub_common.protocol.worker import EncodedBytes, ReadReport

MODEL = "policy"
NBYTES = (4, 4, 4)
SESSION = 7
NOBODY = Refusal(error="VersionUnavailable", reason="nobody has it")
E = TypeVar("E")


def spec_of(key: ShardKey, shards: int = 1, *, staged: bool = False, mapped: bool = False) -> ShardSpec:
    """Return a shard of three small pieces."""
    return ShardSpec(key, shards, spot=False, layout="f" * 64, nbytes=NBYTES, staged=staged, mapped=mapped)


def ready(text: str = "a", version: int = 1) -> ShardContents:
    """Return what an earlier process has left of a shard that holds a version."""
    return ShardContents(MemoryState.READY, version=version, root=root_of(text), digests=digests_of(text))


def root_of(text: str) -> str:
    """Return the root of `digests_of`."""
    return root_digest(digests_of(text))


def digests_of(text: str) -> bytes:
    """Return the digests of three pieces."""
    return b"".join(piece_digest(f"{text}{number}".encode()) for number in range(len(NBYTES)))


class OneAgent:
    """One agent of one job. `log()` lets the log take what was said, and the agent read what it answers."""

    def __init__(
        self,
        name: str = "agent-0",
        config: CoreConfig | None = None,
        *,
        beside: "OneAgent | None" = None,
        after: "OneAgent | None" = None,
    ) -> None:
        """Begin with nothing, on a log of its own, on that of another agent, or as the next process of one."""
        other = beside or after
        self.core: AgentCore = AgentCore(name, config or (after.core.config if after else CoreConfig()))
        self.catalog: Catalog = other.catalog if other else Catalog("run-7")
        self.all_agents: list[OneAgent] = other.all_agents if other else []
        """All that hear the log."""
        if after is not None:
            self.all_agents.remove(after)
        self.all_agents.append(self)
        self.now = 0.0
        self.unsaid: list[AnyCommand] = []
        self.seen: list[AnyEffect] = []
        self.calls = 0
        self.keeps = True
        """Manifests are written as soon as they are to be; otherwise `kept` says when."""

    def do(self, effects: Iterable[AnyEffect]) -> list[AnyEffect]:
        """Carry out what the core wants: keep it for whoever looks, and say what is to be said."""
        done = list(effects)
        self.seen += done
        self.unsaid += [effect.command for effect in done if isinstance(effect, AppendCommand)]
        self.core.check()
        for effect in done if self.keeps else ():
            if isinstance(effect, Keep):
                done = done + self.kept(effect)
        return done

    def hear(self, outcome: EffectOutcome) -> list[AnyEffect]:
        """Tell it what came of an effect."""
        return self.do(self.core.on_outcome(outcome, self.now))

    def kept(self, effect: Keep, failure: str | None = None) -> list[AnyEffect]:
        """Answer that a manifest was written, or why not."""
        return self.hear(Kept(effect.key, effect.number, failure))

    def joins(self, incarnation: int = 1) -> None:
        """Begin to join: the log has not answered."""
        self.do(self.core.join(incarnation, "host", "site", self.now))

    def join(self, incarnation: int = 1) -> None:
        """Join, and hear the answer."""
        self.joins(incarnation)
        self.log()

    def log(self, count: int = 1000) -> list[AnyEvent]:
        """Let the log take at most so many commands; returns its events."""
        told: list[AnyEvent] = []
        while self.unsaid and count > 0:
            count -= 1
            told += self.take(self.unsaid.pop(0))
        return told

    def logged(self, call: int) -> int:
        """Let the log take what a call has said; returns the call."""
        self.log()
        return call

    def take(self, command: AnyCommand) -> list[AnyEvent]:
        """Let the log take one command, whoever says it."""
        events = cast("tuple[AnyEvent, ...]", apply(self.catalog, self.catalog.seq + 1, self.now, command))
        check_invariants(self.catalog)
        for event in events:
            for each in self.all_agents:
                each.read_event(event)
        return list(events)

    def read_event(self, event: AnyEvent) -> None:
        """Read one event of the log."""
        self.do(self.core.on_event(event, self.now))

    def called(self, key: ShardKey, call: AnyCall) -> int:
        """Take a call of a worker."""
        self.do(self.core.called(key, call, self.now))
        return call.call

    def tick(self, seconds: float) -> list[AnyEffect]:
        """Let so much time pass."""
        self.now += seconds
        return self.do(self.core.tick(self.now))

    def tick_and_log(self, seconds: float) -> None:
        """Let so much time pass, and then the log take what is said."""
        self.tick(seconds)
        self.log()

    def silence(self, call: int) -> None:
        """Let time pass until the call has given up, with no word of the log."""
        self.tick(10.0)
        self.tick(OUTCOME_S_MAX)
        assert self.result(call) == "RegistryUnavailable"

    def key(self, replica: str, shard: int = 0) -> ShardKey:
        """Return the key of a shard of the one model."""
        return ShardKey(MODEL, replica, shard)

    def _call(self, key: ShardKey, make: type, **more: object) -> int:
        self.calls += 1
        return self.called(key, make(call=self.calls, session=SESSION, deadline=self.now + 10.0, **more))

    def begin_register(
        self, spec: ShardSpec, *, holds: int | None = None, partial: bool = False, lent: bool = False
    ) -> int:
        """Register a shard; the log has not answered."""
        self.calls += 1
        deadline = self.now + 10.0
        call = CallRegister(
            call=self.calls, session=SESSION, deadline=deadline, holds=holds, partial=partial, lent=lent
        )
        self.do(self.core.register(spec, call, self.now))
        return self.calls

    def register(
        self, replica: str, shard: int = 0, shards: int = 1, *, staged: bool = False, mapped: bool = False
    ) -> ShardKey:
        """Register a shard."""
        key = self.key(replica, shard)
        self.begin_register(spec_of(key, shards, staged=staged, mapped=mapped))
        self.log()
        return key

    def hand_back(
        self,
        replica: str,
        text: str,
        version: int | None,
        shard: int = 0,
        shards: int = 1,
        *,
        partial: bool = False,
        lent: bool = False,
    ) -> ShardKey:
        """Register a shard whose memory the worker kept, with these bytes; the log has not taken what is offered."""
        key = self.key(replica, shard)
        self.begin_register(spec_of(key, shards), holds=version, partial=partial, lent=lent)
        self.log()
        digest = self.last(DigestMemory)
        if digest is not None:
            self.hear(Digested(key, digest.number, digests_of(text)))
        return key

    def register_all(self, replica: str, shards: int = 2, *, mapped: bool = False) -> list[ShardKey]:
        """Register all shards of a replica, whose layouts agree."""
        keys = []
        for shard in range(shards):
            keys.append(self.register(replica, shard, shards, mapped=mapped))
            if shard > 0:
                self.siblings_checked()
        return keys

    def publish(self, key: ShardKey, text: str, version: int | None = None) -> int:
        """Begin to publish, digest, and say ready; the log has not answered yet."""
        call = self._call(key, CallPublish, version=version)
        digest = self.last(DigestMemory)
        if digest is not None:
            self.hear(Digested(key, digest.number, digests_of(text) if self.core.config.digests else b""))
        return call

    def publish_next(self, text: str) -> None:
        """Let the log take another version from the replica `trainer`."""
        key = self.key("trainer")
        if self.memory(key) is MemoryState.READY:
            self.unpublish(key)
            self.log()
        self.publish(key, text)
        self.log()

    def unpublish(self, key: ShardKey) -> int:
        """Begin to unpublish."""
        return self._call(key, CallUnpublish)

    def release(self, key: ShardKey) -> int:
        """Begin to release."""
        return self._call(key, CallRelease)

    def read(
        self, key: ShardKey, want: VersionRequest = "latest", patience: float = 1e9, *, has_let_go: bool = False
    ) -> int:
        """Begin to read, with ten seconds to the bound."""
        return self._call(key, CallRead, want=want, patience=patience, has_let_go=has_let_go)

    def attach(self, key: ShardKey, session: int) -> int:
        """Let another worker come to a shard that stands here."""
        self.calls += 1
        return self.called(key, CallRegister(call=self.calls, session=session, deadline=self.now + 10.0))

    def worker_gone(self, session: int = SESSION) -> None:
        """Let a worker die."""
        self.do(self.core.worker_gone(session, self.now))

    def memory(self, key: ShardKey) -> MemoryState:
        """Return what the memory of a shard is."""
        return self.core.shards[key].contents.memory

    def holds(self, key: ShardKey) -> tuple[MemoryState, int | None, str | None]:
        """Return memory, version and root of a shard."""
        contents = self.core.shards[key].contents
        return contents.memory, contents.version, contents.root

    def counted(self, key: ShardKey) -> int | None:
        """Return the version that the log counts the replica as a holder of."""
        return self.catalog.models[MODEL].replicas[key.replica].version

    def round_of(self, key: ShardKey) -> Round | None:
        """Return the round of a replica, as the log has it."""
        return self.catalog.models[MODEL].replicas[key.replica].round

    def all(self, kind: type[E]) -> list[E]:
        """Return all that was wanted of a kind."""
        return [effect for effect in self.seen if isinstance(effect, kind)]

    def last(self, kind: type[E]) -> E | None:
        """Return the last that was wanted of a kind."""
        return next((effect for effect in reversed(self.seen) if isinstance(effect, kind)), None)

    def need(self, kind: type[E]) -> E:
        """Return the last that was wanted of a kind, which there is."""
        found = self.last(kind)
        assert found is not None, f"no {kind.__name__} was wanted"
        return found

    def appended(self, kind: type[E]) -> list[E]:
        """Return all that was said to the log of a kind."""
        return [each.command for each in self.all(AppendCommand) if isinstance(each.command, kind)]

    def said(self) -> list[str]:
        """Return the kinds of what the log has not taken yet."""
        return [type(command).__name__ for command in self.unsaid]

    def freed(self) -> list[ShardKey]:
        """Return the shards whose memory was freed."""
        return [effect.key for effect in self.all(FreeShard)]

    def end_of(self, call: int) -> CompleteCall | FailCall | None:
        """Return how a call ended; None: it is under way."""
        ends = [effect for effect in self.seen if isinstance(effect, CompleteCall | FailCall) and effect.call == call]
        assert len(ends) <= 1, f"call {call} was ended {len(ends)} times"
        return ends[0] if ends else None

    def result(self, call: int) -> str | None:
        """Return `done` or the error of a call; None: it is under way."""
        end = self.end_of(call)
        if end is None:
            return None
        return end.error if isinstance(end, FailCall) else "done"

    def why(self, call: int) -> str:
        """Return the message with which a call failed."""
        end = self.end_of(call)
        assert isinstance(end, FailCall)
        return end.message

    def version_read(self, call: int) -> int | None:
        """Return the version with which a call was done."""
        end = self.end_of(call)
        assert isinstance(end, CompleteCall)
        return end.version

    def report(self, call: int) -> ReadReport:
        """Return the report of a read that is done."""
        end = self.end_of(call)
        assert isinstance(end, CompleteCall)
        assert end.report is not None
        return end.report

    def lease(
        self, key: ShardKey, version: int, root: str | None, name: str = "lease", **more: Any
    ) -> LeaseGrant | LeaseRefusal | None:
        """Ask for a lease as a reader elsewhere does; `more` are further fields of its request."""
        me = SourceId(self.core.agent, self.core.incarnation, key.replica, key.shard)
        ask = LeaseRequest(
            job="run-7",
            model=key.model,
            source=me,
            version=version,
            root=root,
            reader=SourceId("agent-9", 1, "reader", 0),
        )
        return self.core.lease_asked(structs.replace(ask, **more), name, f"ticket-{name}", "here", self.now)

    def open_lease(self, key: ShardKey, version: int, root: str | None, name: str = "lease", **more: Any) -> None:
        """Let a reader elsewhere read."""
        assert isinstance(self.lease(key, version, root, name, **more), LeaseGrant)
        assert self.core.redeemed(f"ticket-{name}", self.now) is not None

    def end_lease(self, name: str = "lease") -> None:
        """Let a reader end in good order."""
        self.do(self.core.lease_ended(name, LeaseTransition.DONE, self.now))

    def lend(self, key: ShardKey, version: int, root: str | None) -> None:
        """Let a reader take the memory, to map it; its lease is over at once."""
        self.open_lease(key, version, root, "lent", mapped=True)
        self.end_lease("lent")

    def probed(self, *, lent: bool) -> None:
        """Answer the last probe."""
        probe = self.need(ProbeMapping)
        self.hear(Probed(probe.key, probe.spare, lent))

    def siblings_checked(self, mismatch: str | None = None) -> None:
        """Answer the last comparison of layouts."""
        check = self.need(CompareLayouts)
        self.hear(SiblingsChecked(check.key, check.number, mismatch))

    # A read, step by step.

    def plan(self, key: ShardKey, source: str = "elsewhere", link: str = "") -> None:
        """Answer the last question for a plan: everything from one source."""
        asked = self.need(RequestPlan)
        its = SourceId(source, 1, "trainer", key.shard)
        share = Share(
            source=its,
            transport="local",
            pieces=asked.demand.pieces or (),
            nbytes=12,
            why=f"{source} is near",
            link=link,
        )
        self.hear(PlanReceived(key, asked.number, Plan(version=asked.demand.version, shares=(share,), why="")))

    def refuse_plan(self, key: ShardKey, refusal: Refusal = NOBODY) -> None:
        """Answer the last question for a plan: there is none."""
        self.hear(PlanReceived(key, self.need(RequestPlan).number, refusal))

    def opened(self, key: ShardKey, text: str) -> None:
        """Let the last source open, whose pieces have the digests of a text; no text: it has none."""
        self.hear(SourceOpened(key, self.need(RequestLease).source, digests_of(text) if text else b""))

    def lease_plan(self, key: ShardKey, text: str, source: str = "elsewhere") -> None:
        """Go on to where the read has its leases; the log has not been told."""
        self.log()
        self.plan(key, source)
        self.opened(key, text)

    def begin_filling(self, key: ShardKey, text: str, source: str = "elsewhere") -> None:
        """Go on to where the read may write."""
        self.lease_plan(key, text, source)
        self.log()

    def brought(self, key: ShardKey, text: str, *encoded: EncodedBytes) -> None:
        """Let the last source bring what it was asked for last."""
        post = self.need(ReadBatch)
        self.hear(BatchDone(key, post.source, post.batch, digests_of(text) if text else b"", encoded))

    def bring(self, key: ShardKey, text: str, *encoded: EncodedBytes) -> None:
        """Let the last source bring what it was asked for last, and the log take what is said."""
        self.brought(key, text, *encoded)
        self.log()

    def lose_source(self, key: ShardKey, why: str = "gone") -> None:
        """Let the last source go, at once."""
        source = self.need(RequestLease).source
        self.hear(SourceLost(key, source, why))
        self.hear(SourceClosed(key, source))

    def confirmed(self, key: ShardKey) -> None:
        """Let the last source confirm that its lease holds."""
        self.hear(LeaseConfirmed(key, self.need(ConfirmLease).source, holds=True))

    def closed(self, key: ShardKey) -> None:
        """Say that nothing comes from the last source any more."""
        self.hear(SourceClosed(key, self.need(CloseSource).source))

    def fill(self, key: ShardKey, text: str) -> None:
        """Let the read under way bring all; the log has not taken it yet."""
        self.begin_filling(key, text)
        self.brought(key, text)

    def read_all(self, key: ShardKey, text: str, want: VersionRequest = "latest") -> int:
        """Read from the call to its end."""
        call = self.read(key, want)
        self.fill(key, text)
        self.log()
        return call


def joined(
    name: str = "agent-0", *, digests: bool = True, encodings: bool = True, beside: OneAgent | None = None
) -> OneAgent:
    """Return an agent that has joined."""
    agent = OneAgent(name, CoreConfig(digests=digests, encodings=encodings), beside=beside)
    agent.join()
    return agent


def published(text: str = "a", *, staged: bool = False) -> tuple[OneAgent, ShardKey]:
    """Return an agent whose trainer has published version 1."""
    agent = joined()
    key = agent.register("trainer", staged=staged)
    agent.publish_next(text)
    return agent, key


def pair(
    *, staged: bool = False, mapped: bool = False, digests: bool = True, encodings: bool = True
) -> tuple[OneAgent, OneAgent, ShardKey]:
    """Return a trainer that has published version 1, and a rollout on an agent of its own; both on one log."""
    trainer = joined("elsewhere", digests=digests)
    trainer.register("trainer")
    reader = joined("agent-1", beside=trainer, digests=digests, encodings=encodings)
    key = reader.register("rollout", staged=staged, mapped=mapped)
    trainer.publish_next("a")
    return trainer, reader, key


class AgentsWithCopies:
    """Agents of which all but the first have room for copies of the version that the first one has published."""

    def __init__(self, count: int, shards: int = 1, *, level: Level = NEWEST_LEVEL, room: int = sum(NBYTES)) -> None:
        """Publish a version that is retained; the copies that are wanted of it are empty."""
        self.trainer = OneAgent("agent-0")
        self.catalog, self.all = self.trainer.catalog, self.trainer.all_agents
        self.catalog.level = level
        self.made: list[ShardKey] = []
        for number in range(1, count):
            OneAgent(f"agent-{number}", CoreConfig(cache_bytes=room), beside=self.trainer)
        for agent in self.all:
            self._join(agent, 1)
        keys = self.trainer.register_all("trainer", shards)
        self.trainer.take(Retain(model=MODEL, last=1))
        for key in keys:
            self.trainer.publish(key, "a")
        self.log()
        self.make_copies()

    def _join(self, agent: OneAgent, incarnation: int) -> None:
        agent.do(agent.core.join(incarnation, f"host-{agent.core.agent}", "site", agent.now))
        self.log()

    def log(self) -> None:
        """Let the log take all that was said, of each agent one command after another."""
        while any(agent.unsaid for agent in self.all):
            for agent in self.all:
                agent.log(1)

    def tick(self, seconds: float) -> None:
        """Let so much time pass for all, and then the log take what is said."""
        for agent in self.all:
            agent.tick(seconds)
        self.log()

    def make_copies(self) -> list[ShardKey]:
        """Make the memory that is wanted; returns of which copies."""
        known = len(self.made)
        for agent in self.all:
            for wish in [each for each in agent.all(AllocateCopy) if each.key not in self.made]:
                self.made.append(wish.key)
                agent.do(agent.core.copy_made(CopyMade(wish.key, wish.shards, wish.layout, nbytes=NBYTES), agent.now))
        self.log()
        return self.made[known:]

    def fill(self, keys: Iterable[ShardKey]) -> None:
        """Let the reads of these copies go through."""
        reads = [(agent, key) for key in keys for agent in self.all if key in agent.core.shards]
        for agent, key in reads:
            agent.plan(key)
            agent.opened(key, "a")
        self.log()
        for agent, key in reads:
            agent.brought(key, "a")
            agent.closed(key)
        self.log()

    def unpublish(self) -> int:
        """Let the trainer begin to unpublish."""
        call = self.trainer.unpublish(self.trainer.key("trainer"))
        self.log()
        return call

    def holder(self, key: ShardKey) -> OneAgent:
        """Return the agent that has a copy, if only on its disk."""
        return next(agent for agent in self.all if key in agent.core.shards or key in agent.core.aside)

    def begin_anew(
        self, key: ShardKey, found: ShardContents | None = None, shards: int = 1, *, aside: bool = False
    ) -> OneAgent:
        """Let the next process of a copy's agent begin, which finds this of it; `aside`: it can't take it back."""
        gone = self.holder(key)
        back = OneAgent(gone.core.agent, after=gone)
        if aside:
            back.core.set_aside(key)
        elif found is not None:
            back.core.adopt(spec_of(key, shards), found)
        self._join(back, gone.core.incarnation + 1)
        return back
