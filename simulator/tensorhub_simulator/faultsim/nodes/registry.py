"""A registry of the simulation: the production fold, leader, claim and liveness, driven as production drives them.

It begins with the newest snapshot, and goes back to one where the log was trimmed beyond what it has folded.

`Snapshotting` makes snapshots in the steps of production's `jobs/snapshot_maker.py`: look at the index, write the
bytes, write the index against what was seen, read both back, trim. Each step is a message that takes its time, and may
get lost or arrive after its sender's death.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from tensorhub_common.catalog.snapshot import decode
from tensorhub_common.catalog.snapshot import encode as encoded_snapshot
from tensorhub_common.catalog.transitions import AgentState
from tensorhub_common.machine import Tick
from tensorhub_common.protocol.heartbeat import Heartbeat
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import Expire, Lead, Sender
from tensorhub_common.protocol.log.events import AgentJoined, AgentLost, JobDeleted
from tensorhub_common.protocol.subjects import REGISTRY
from tensorhub_registry.core import election as leading
from tensorhub_registry.core import liveness as living
from tensorhub_registry.core.job_fold import (
    CommandDecided,
    EventBatch,
    JobFold,
    LastEvent,
    Outgoing,
    OutOfOrder,
    Output,
    PublicationRefused,
    PublicationStored,
    PublicationUnknown,
)
from tensorhub_registry.core.liveness import ExpireAgent, Liveness
from tensorhub_registry.core.snapshot_policy import TIGHT_SHARE_MAX, SnapshotPolicy
from tensorhub_registry.core.term_fence import TermFence
from tensorhub_simulator.engine.clock import Node
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.models.build import OLD, built
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.models.job_log import Entry, Follower, WrongLast
from tensorhub_simulator.faultsim.models.snapshots import Record
from tensorhub_simulator.faultsim.observations import Stepped

CLAIM_AGAIN_S: Final = 1.0
LOOK_S: Final = 0.4
ANSWER_S: Final = 0.7
BATCH_MIN: Final = 3
BATCH_MAX: Final = 20
CHAIN_MAX: Final = 5

ENTRIES: Final = 30
"""After this many entries a snapshot is due."""
GIVE_UP_S: Final = 3.0

Become = Callable[[PublicationStored | PublicationRefused | PublicationUnknown], None]
Store = Callable[[], PublicationStored | PublicationRefused | None]


class Snapshotting:
    """One registry's way to its next snapshot."""

    def __init__(self, node: "RegistryNode") -> None:
        """Begin without any."""
        self.node, self.snapshots, self.clock = node, node.job.log.snapshots, node.clock
        self._at = node.fold.seq
        self._under_way: object = None

    def look(self) -> None:
        """Make a snapshot if one is due; between two entries, while leading."""
        fold = self.node.fold
        if self._under_way is not None or fold.seq - self._at < ENTRIES:
            return
        snapshot = fold.snapshot()
        if snapshot is None:
            return
        self._at, record = snapshot.seq, (snapshot.seq, encoded_snapshot(snapshot))
        me = self._under_way = object()
        self.clock.after(GIVE_UP_S, self.node, lambda: self._ended(me))
        self._ask(lambda: self._indexed(record, me, self.snapshots.written))

    def _ended(self, me: object) -> None:
        if self._under_way is me:
            self._under_way = None

    def _ask(self, then: Callable[[], None]) -> None:
        """Let a question take its time; its answer may never come."""
        if not self.node.job.network.loses(self.node):
            self.clock.after(self.node.lag(), self.node, then)

    def _send(self, arrive: Callable[[], None], then: Callable[[], None]) -> None:
        """Send what arrives also after our death, and go on once it is acknowledged."""
        if self.node.job.network.loses(self.node):
            return
        life = self.node.life

        def arrived() -> None:
            if self.node.job.log.up:
                arrive()
                if not self.node.job.network.loses(self.node):
                    self.clock.after(self.node.job.nats.lag(), self.node, then, life)

        self.clock.after(self.node.lag(), self.node.job.nats, arrived)

    def _indexed(self, record: Record, me: object, seen: int) -> None:
        """The index was read: write the bytes, and then the index."""
        if self.snapshots.newer is not None and self.snapshots.newer[0] >= record[0]:
            self._ended(me)
            return

        def part() -> None:
            self.snapshots.parts[record[1]] = None

        def index() -> None:
            if self.snapshots.written == seen:
                self.snapshots.newer, self.snapshots.older = record, self.snapshots.newer
                self.snapshots.written += 1
                self.snapshots.made += 1

        self._send(part, lambda: self._send(index, lambda: self._ask(lambda: self._verify(me, record))))

    def _verify(self, me: object, record: Record) -> None:
        """Both were read back: remove what is older, and trim the log."""
        stored, node = self.snapshots, self.node
        self._ended(me)
        if stored.newer != record or node.term is None:
            return
        kept = [each for each in (stored.newer, stored.older) if each is not None]
        with built(node.build, node.fold.catalog):
            if any(body not in stored.parts or decode(node.job.name, body).seq != seq for seq, body in kept):
                return
        older = None if stored.older is None else stored.older[0]
        fold = node.fold
        first = SnapshotPolicy().first_kept(record[0], older, fold.last_event_seq, fold.time, TIGHT_SHARE_MAX)

        def purge() -> None:
            stored.parts = {body: None for _, body in kept if body in stored.parts} | {
                body: None for body in stored.parts if stored.newer is not None and body == stored.newer[1]
            }
            node.job.log.trim(first)

        self._send(purge, lambda: None)


class RegistryNode(Node):
    """One registry."""

    fold: JobFold
    leader: leading.Election
    liveness: Liveness
    claim: TermFence
    snapshotting: Snapshotting

    def __init__(self, name: str, job: Job) -> None:
        """Stand ready to start."""
        super().__init__(name, job.stream("messages", name))
        self.job, self.clock = job, job.clock
        self.term: int | None = None
        self._numbers = self._goal = 0
        self._knows_end = False
        self.me: object = None
        self.build = OLD

    def start(self) -> None:
        """Begin a life: fold the newest snapshot and the log from there."""
        self.life += 1
        self.up, self.state.paused = True, False
        self.backlog.clear()
        self.fold = JobFold(self.job.name)
        self.fold.catalog.level = self.job.first_level
        self.leader, self.liveness = leading.Election(), Liveness(self.job.config.lost_after_s)
        self.claim = TermFence(self.name)
        self.term, self._numbers, self.me = None, 0, object() if self.family[0] is self else self.family[0].me
        self._restore()
        self._look()

    def _restore(self) -> None:
        """Go on from the newest snapshot that lies ahead, and follow the log from there."""
        with built(self.build, self.fold.catalog):
            snapshot = self.job.log.snapshots.newest(self.job.name, self.fold.seq)
        if snapshot is not None:
            self.job.log_line(f"{self.name} goes on from the snapshot at {snapshot.seq}")
            self.fold = JobFold.restored(snapshot)
            for agent in snapshot.catalog.agents.values():
                self._watch(agent.name, agent.incarnation if agent.state is AgentState.LIVE else None)
        elif self.fold.seq + 1 < self.job.log.first:
            raise Violation("no way back", f"{self.name} has folded {self.fold.seq}; the log begins later")
        self.snapshotting = Snapshotting(self)
        Follower(self.job.log, self, self.fold.seq, self._on_entry, events=False, gap=self._on_gap)

    def _on_gap(self) -> None:
        """The log was trimmed while this registry stood still."""
        term, self.term = self.term, None
        self._restore()
        if term is not None:
            self._begin_to_lead(term)

    def kill(self) -> None:
        """SIGKILL."""
        self.job.log_line(f"{self.name} is killed")
        self.up = self.state.paused = False
        self.life += 1

    # Leading.

    def _look(self) -> None:
        """Look at the lease, every so often."""
        lease = self.job.lease
        self._lead(leading.Connected() if self._reaches() else leading.Disconnected())
        if self.leader.state is leading.LeaderState.RESIGNED:
            return
        if self._reaches():
            term = lease.take(self.me, self.clock.now)
            self._lead(leading.LeaseLost() if term is None else leading.LeaseWon(term))
        elif lease.holder is not self.me or self.clock.now >= lease.until:
            self._lead(leading.LeaseLost())
        self._tick()
        self.clock.after(LOOK_S, self, self._look)

    def _tick(self) -> None:
        self._expire(self.liveness.handle(Tick(), self.now))

    def resign(self) -> None:
        """End in order: stand down, and leave the lease to others; what was asked before may still be answered."""
        lease = self.job.lease
        self._lead(leading.Resigned())
        if lease.holder is self.me:
            lease.until = self.clock.now
        late = self.messages.choice((None, leading.LeaseWon(lease.term), leading.LeaseLost(), leading.Resigned()))
        if late is not None:
            self.clock.after(self.lag(), self, lambda: self._lead(late))

    def _reaches(self) -> bool:
        return self.job.network.reaches_log(self)

    def _lead(self, event: leading.Input) -> None:
        for effect in self.leader.handle(event, self.now):
            match effect:
                case leading.StartLeading(term):
                    self.job.log_line(f"{self.name} leads, term {term}")
                    self._begin_to_lead(term)
                case leading.StopLeading():
                    self.term = None
                    self.claim.drop()
                case living.MonitoringStarted() | living.MonitoringStopped():
                    self._expire(self.liveness.handle(effect, self.now))
        self.leader.check()

    def _begin_to_lead(self, term: int) -> None:
        self.term, self._knows_end = term, False
        self.claim.drop()
        self._learn_end(term)

    def _learn_end(self, term: int) -> None:
        """Ask for the log's last event before the first word."""
        if self.term != term:
            return
        log = self.job.log
        if self.job.network.loses(self):
            self.clock.after(LOOK_S, self, lambda: self._learn_end(term))
            return

        def learn() -> None:
            if log.last_event_seq >= log.first:
                self._carry_out(self.fold.handle(LastEvent(log.entries[log.last_event_seq - 1]), self.now))
            self._knows_end, self._goal = True, len(log.entries)
            self._speak()
            self._claim_on(term)

        self.clock.after(self.lag(), self, learn)

    def _claim_on(self, term: int) -> None:
        """Say that this registry leads, as soon as it has folded what stood before, until the log has taken it."""
        if self.term != term:
            return
        self.claim.level = self.job.raise_to
        if self.fold.seq >= self._goal and self.claim.is_due(self.fold.catalog):
            if self._goal == 0 and self.claim.level == 0:
                self.claim.begin(term)
            else:
                self._say(self.claim.ask(term, self.fold.catalog))
        self.clock.after(CLAIM_AGAIN_S, self, lambda: self._claim_on(term))

    def beat(self, agent: str, incarnation: int) -> None:
        """Hear an agent."""
        self._expire(self.liveness.handle(Heartbeat(agent=agent, incarnation=incarnation), self.now))

    def _expire(self, lost: list[ExpireAgent]) -> None:
        for each in lost if self.claim.term is not None else ():
            self._numbers += 1
            term = self._spoken_term()
            self.job.log_line(f"{self.name} expires {each.agent} {each.incarnation}")
            by = Sender(REGISTRY, term, self._numbers)
            self._say(Expire(by=by, agent=each.agent, incarnation=each.incarnation, term=term))

    def _spoken_term(self) -> int:
        assert self.claim.term is not None
        return self.claim.term

    def _say(self, command: Expire | Lead) -> None:
        """Say it once; what the log does not take is dropped."""
        log, by, data = self.job.log, command.by, encode(command)
        assert by is not None
        verb = str(command.__struct_config__.tag)
        subject, msg_id = f"tensorhub.v1.{self.job.name}.cmd.{verb}.{REGISTRY}", f"{self.name}.{by.incarnation}.{by.n}"

        def arrive() -> None:
            if log.up:
                log.append(subject, data, msg_id)

        if not self.job.network.loses(self):
            self.clock.after(self.lag(), self.job.nats, arrive)

    # Folding.

    def _on_entry(self, entry: Entry) -> None:
        with built(self.build, self.fold.catalog):
            effects = self.fold.handle(entry, self.now)
        self._carry_out(effects)
        self._speak()
        if self.term is not None and self._knows_end:
            self.snapshotting.look()

    def _watch(self, agent: str, incarnation: int | None) -> None:
        """Note which incarnation of an agent is live, if one is."""
        job = self.job.name
        said = living.UnwatchAgent(job, agent) if incarnation is None else living.WatchAgent(job, agent, incarnation)
        self._expire(self.liveness.handle(said, self.now))

    def _carry_out(self, effects: list[Output]) -> None:
        for effect in effects:
            if isinstance(effect, OutOfOrder):
                raise Violation("one order", f"{self.name} was given entry {effect.found}, not {effect.expected}")
            if isinstance(effect, CommandDecided):
                first = effect.events[0]
                self.claim.see(first)
                if isinstance(first, AgentJoined):
                    self._watch(first.agent, first.incarnation)
                elif isinstance(first, AgentLost):
                    self._watch(first.agent, None)
                elif isinstance(first, JobDeleted):
                    self._expire(self.liveness.handle(living.UnwatchJob(self.job.name), self.now))
        self.job.observe(Stepped(self.name))

    # Speaking.

    def _speak(self) -> None:
        """Publish what is next, if this registry believes that it leads."""
        if self.term is None or not self._knows_end:
            return
        many = self.fold.unpublished >= BATCH_MIN and self.happens(0.5)
        publication = self.fold.to_publish(BATCH_MAX if many else CHAIN_MAX)
        if publication is None:
            return
        answered: list[bool] = []
        fold = self.fold

        def become(what: PublicationStored | PublicationRefused | PublicationUnknown) -> None:
            if answered or self.fold is not fold:
                return
            answered.append(True)
            self._carry_out(self.fold.handle(what, self.now))
            self.clock.after(0.0 if isinstance(what, PublicationStored) else self.lag(), self, self._speak)

        life = self.life
        for arrive in self._requests(publication, life, as_batch=many):
            if not self.job.network.loses(self):
                self.clock.after(self.lag(), self.job.nats, partial(self._arrives, arrive, become, life))
        self.clock.after(ANSWER_S, self, lambda: become(PublicationUnknown()))

    def _arrives(self, store: Store, become: Become, life: int) -> None:
        """A request reaches the log; its answer may get lost."""
        answer = store() if self.job.log.up else None
        if answer is not None and not self.job.network.loses(self):
            self.clock.after(self.lag(), self, lambda: become(answer), life)

    def _requests(self, publication: EventBatch, life: int, *, as_batch: bool) -> list[Store]:
        """Return the requests of a publication, which arrive in any order: one for a batch, else one for each event."""
        events = publication.events
        if as_batch or len(events) == 1:
            return [lambda: self._store(publication.events, publication.expected, life)]
        got: dict[int, int] = {}

        def store(number: int) -> PublicationStored | PublicationRefused | None:
            event = events[number : number + 1]
            if number == 0:
                answer = self._store(event, publication.expected, life)
            else:
                behind = self._id_of(events[number - 1], life)
                answer = self._store(event, publication.ahead + number - 1, life, behind)
            if isinstance(answer, PublicationRefused):
                return answer if number == 0 else None
            got[number] = answer.seq
            # The sender waits for the answers in their order, and counts up to the first that is missing.
            count = next(each for each in range(len(events) + 1) if each not in got)
            return PublicationStored(count, got[count - 1]) if count else None

        return [partial(store, number) for number in range(len(events))]

    def _id_of(self, outgoing: Outgoing, life: int) -> str:
        return f"{self.name}.{life}.{outgoing.event.cmd}.{outgoing.event.i}"

    def _store(
        self, events: tuple[Outgoing, ...], expected: int | None, life: int, behind: str | None = None
    ) -> PublicationStored | PublicationRefused:
        """Store events, all or none, as an atomic batch does."""
        log, seq = self.job.log, 0
        for outgoing in events:
            try:
                seq = log.append(outgoing.subject, outgoing.body, self._id_of(outgoing, life), expected, behind)
            except WrongLast:
                return PublicationRefused()
            if expected is not None:
                expected = log.last_event_seq
        return PublicationStored(len(events), seq)
