"""An agent's cores and a catalog, with a log between them that answers when the test lets it."""

from collections.abc import Iterable
from typing import TypeVar, cast

from tensorhub_agent.core.agent import AgentCore
from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import (
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
    Digested,
    DigestMemory,
    FailCall,
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
    SourceOpened,
)
from tensorhub_agent.core.shard_state import MemoryState, ShardSpec
from tensorhub_agent.leases.lease import LeaseTransition
from tensorhub_agent.primitives.digests import piece_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.invariants import check_invariants
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRequest
from tensorhub_common.protocol.log.commands import AnyCommand, VersionRequest
from tensorhub_common.protocol.log.events import AnyEvent
from tensorhub_common.protocol.plans import Plan, Share, SourceId

MODEL = "policy"
NBYTES = (4, 4, 4)
SESSION = 7
E = TypeVar("E")


def digests_of(text: str) -> bytes:
    """Return the digests of three pieces."""
    return b"".join(piece_digest(f"{text}{number}".encode()) for number in range(len(NBYTES)))


class OneAgent:
    """One agent of one job. `log()` lets the log take what was said, and the agent read what it answers."""

    def __init__(
        self, name: str = "agent-0", *, digests: bool = True, encodings: bool = True, catalog: Catalog | None = None
    ) -> None:
        self.core = AgentCore(name, CoreConfig(digests=digests, encodings=encodings))
        self.catalog = catalog or Catalog("run-7")
        self.now = 0.0
        self.unsaid: list[AnyCommand] = []
        self.seen: list[AnyEffect] = []
        self.calls = 0
        self.keeps = True
        """Manifests are written as soon as they are to be; otherwise `kept` says when."""

    def do(self, effects: Iterable[AnyEffect]) -> list[AnyEffect]:
        done = list(effects)
        self.seen += done
        self.unsaid += [effect.command for effect in done if isinstance(effect, AppendCommand)]
        self.core.check()
        for effect in done if self.keeps else ():
            if isinstance(effect, Keep):
                done = done + self.kept(effect)
        return done

    def kept(self, effect: Keep, failure: str | None = None) -> list[AnyEffect]:
        """Answer that a manifest was written, or why not."""
        return self.do(self.core.on_outcome(Kept(effect.key, effect.number, failure), self.now))

    def join(self, incarnation: int = 1) -> None:
        self.do(self.core.join(incarnation, "host", "site", self.now))
        self.log()

    def log(self, count: int = 1000) -> list[AnyEvent]:
        """Let the log take at most so many commands; returns its events."""
        told: list[AnyEvent] = []
        while self.unsaid and count > 0:
            count -= 1
            told += self.take(self.unsaid.pop(0))
        return told

    def take(self, command: AnyCommand) -> list[AnyEvent]:
        """Let the log take one command, whoever says it."""
        events = cast("tuple[AnyEvent, ...]", apply(self.catalog, self.catalog.seq + 1, self.now, command))
        check_invariants(self.catalog)
        for event in events:
            self.do(self.core.on_event(event, self.now))
        return list(events)

    def tick(self, seconds: float) -> list[AnyEffect]:
        self.now += seconds
        return self.do(self.core.tick(self.now))

    def key(self, replica: str, shard: int = 0) -> ShardKey:
        return ShardKey(MODEL, replica, shard)

    def _call(self, key: ShardKey, make: type, **more: object) -> int:
        self.calls += 1
        call = cast("AnyCall", make(call=self.calls, session=SESSION, deadline=self.now + 10.0, **more))
        self.do(self.core.called(key, call, self.now))
        return self.calls

    def register(
        self, replica: str, shard: int = 0, shards: int = 1, *, staged: bool = False, mapped: bool = False
    ) -> ShardKey:
        key = self.key(replica, shard)
        self.calls += 1
        call = CallRegister(call=self.calls, session=SESSION, deadline=self.now + 10.0)
        place = ShardSpec(key, shards, spot=False, layout="f" * 64, nbytes=NBYTES, staged=staged, mapped=mapped)
        self.do(self.core.register(place, call, self.now))
        self.log()
        return key

    def publish(self, key: ShardKey, text: str, version: int | None = None) -> int:
        """Begin to publish, digest, and say ready; the log has not answered yet."""
        call = self._call(key, CallPublish, version=version)
        digest = self.last(DigestMemory)
        if digest is not None:
            found = digests_of(text) if self.core.config.digests else b""
            self.do(self.core.on_outcome(Digested(key, digest.number, found), self.now))
        return call

    def unpublish(self, key: ShardKey) -> int:
        return self._call(key, CallUnpublish)

    def release(self, key: ShardKey) -> int:
        return self._call(key, CallRelease)

    def read(self, key: ShardKey, want: VersionRequest = "latest", patience: float = 1e9) -> int:
        return self._call(key, CallRead, want=want, patience=patience)

    def attach(self, key: ShardKey, session: int) -> int:
        self.calls += 1
        call = CallRegister(call=self.calls, session=session, deadline=self.now + 10.0)
        self.do(self.core.called(key, call, self.now))
        return self.calls

    def memory(self, key: ShardKey) -> MemoryState:
        return self.core.shards[key].contents.memory

    def last(self, kind: type[E]) -> E | None:
        return next((effect for effect in reversed(self.seen) if isinstance(effect, kind)), None)

    def end_of(self, call: int) -> CompleteCall | FailCall | None:
        ends = [effect for effect in self.seen if isinstance(effect, CompleteCall | FailCall) and effect.call == call]
        assert len(ends) <= 1, f"call {call} was ended {len(ends)} times"
        return ends[0] if ends else None

    def error_of(self, call: int) -> str | None:
        end = self.end_of(call)
        return end.error if isinstance(end, FailCall) else None

    def lease(
        self, key: ShardKey, version: int, root: str | None, name: str = "lease", *, mapped: bool = False
    ) -> object:
        me = SourceId(self.core.agent, self.core.incarnation, key.replica, key.shard)
        reader = SourceId("agent-9", 1, "reader", 0)
        ask = LeaseRequest(
            job="run-7", model=MODEL, source=me, version=version, root=root, reader=reader, mapped=mapped
        )
        return self.core.lease_asked(ask, name, f"ticket-{name}", "here", self.now)

    def open_lease(self, key: ShardKey, version: int, root: str | None, name: str = "lease") -> None:
        assert isinstance(self.lease(key, version, root, name), LeaseGrant)
        assert self.core.redeemed(f"ticket-{name}", self.now) is not None

    def lend(self, key: ShardKey, version: int, root: str | None) -> None:
        """Let a reader take the memory, to map it; its lease is over at once."""
        assert isinstance(self.lease(key, version, root, "lent", mapped=True), LeaseGrant)
        assert self.core.redeemed("ticket-lent", self.now) is not None
        self.do(self.core.lease_ended("lent", LeaseTransition.DONE, self.now))

    def probed(self, *, lent: bool) -> None:
        """Answer the last probe."""
        probe = self.last(ProbeMapping)
        assert probe is not None
        self.do(self.core.on_outcome(Probed(probe.key, probe.spare, lent), self.now))

    def siblings_checked(self, mismatch: str | None = None) -> None:
        """Answer the last comparison of layouts."""
        check = self.last(CompareLayouts)
        assert check is not None
        self.do(self.core.on_outcome(SiblingsChecked(check.key, check.number, mismatch), self.now))

    # A read, step by step.

    def plan(self, key: ShardKey, source: str = "elsewhere", link: str = "") -> None:
        """Answer the last question for a plan: everything from one source."""
        asked = self.last(RequestPlan)
        assert asked is not None
        pieces = asked.demand.pieces or ()
        its = SourceId(source, 1, "trainer", key.shard)
        share = Share(source=its, transport="local", pieces=pieces, nbytes=12, why="", link=link)
        answer = Plan(version=asked.demand.version, shares=(share,), why="")
        self.do(self.core.on_outcome(PlanReceived(key, asked.number, answer), self.now))

    def opened(self, key: ShardKey, text: str) -> None:
        opening = self.last(RequestLease)
        assert opening is not None
        self.do(self.core.on_outcome(SourceOpened(key, opening.source, digests_of(text)), self.now))

    def brought(self, key: ShardKey, text: str) -> None:
        post = self.last(ReadBatch)
        assert post is not None
        self.do(self.core.on_outcome(BatchDone(key, post.source, post.batch, digests_of(text)), self.now))

    def confirmed(self, key: ShardKey) -> None:
        confirm = self.last(ConfirmLease)
        assert confirm is not None
        self.do(self.core.on_outcome(LeaseConfirmed(key, confirm.source, holds=True), self.now))

    def closed(self, key: ShardKey) -> None:
        close = self.last(CloseSource)
        assert close is not None
        self.do(self.core.on_outcome(SourceClosed(key, close.source), self.now))
