"""A ledger of current reads: the bytes assigned by this planner's plans, and the readers reported by agents. Pure.

An assignment counts until the log says that its read is over, or for `limits.assigned_s_max` if the log never does.
Load belongs to an agent, not to a shard, and is counted by transport: a local reader copies by itself and does not use
the source's network card. Readers of all jobs share the load, since an agent serves all of them.

A planner knows only its own plans, and only those since its start. Agents therefore report their readers with each
beat (`reports.py`). A reported reader without an assignment here counts too, unless the log has said since then that
its read is over. For an agent that names no readers, or not all, the larger of two numbers counts: the readers known
here, or the reported readers whose reads are not over. The load only steers plans; no correctness property depends on
it.

`FinishedReads` stores the position in a job's log at which each shard's read ended, so that later reports of that read
don't count. Beats arrive by another way than the log, and only at the rate of beats. Each reader in a beat is named
with the log position at which its round was decided. The log decides. A read is over if it was decided
before the entry by which its shard was filled, or by which its round failed or was decided anew.

Invariants:
- `_busy` is the sum of the assignments.
- The assignments are in the order of their time.
- A reader reported by an agent is no load once the log has said that its read is over, whenever the report arrives.
- At most `readers_max` shards and as many replicas have a known end: those that the log mentioned last.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, overload

from tensorhub_common.protocol.heartbeat import Heartbeat
from tensorhub_common.protocol.log.events import (
    AgentLost,
    Event,
    ReplicaReady,
    RoundDecided,
    RoundFailed,
    RoundReopened,
    ShardFilled,
    ShardReleased,
)
from tensorhub_common.protocol.plans import Plan, SourceId
from tensorhub_planner.load.load import IDLE, AgentTransport, Load, ReaderId
from tensorhub_planner.load.reports import LoadReport, LoadReports
from tensorhub_planner.primitives.limits import PlanLimits

_Whole = tuple[str, str, str]
"""A job, a model and a replica of it."""

K = TypeVar("K")


@dataclass(slots=True)
class FinishedReads:
    """The last end of each shard's reads, as numbers of entries in its job's log."""

    limits: PlanLimits
    _shards: dict[ReaderId, int] = field(default_factory=dict)
    _replicas: dict[_Whole, int] = field(default_factory=dict)

    def see(self, job: str, seq: int, event: Event) -> None:
        """Take an event of the entry of this number."""
        match event:
            case ShardFilled() | ShardReleased():
                self.shard(ReaderId(job, event.model, event.replica, event.shard), seq)
            case ReplicaReady() | RoundFailed() | RoundReopened() | RoundDecided():
                _note(self._replicas, (job, event.model, event.replica), seq, self.limits.readers_max)
            case _:
                pass

    def shard(self, reader: ReaderId, seq: int) -> None:
        """Note that reads of a shard that were decided before this entry are over."""
        _note(self._shards, reader, seq, self.limits.readers_max)

    def forget(self, job: str) -> None:
        """Forget a job whose log is gone: the numbers of another one mean other entries."""
        self._shards = {reader: seq for reader, seq in self._shards.items() if reader.job != job}
        self._replicas = {whole: seq for whole, seq in self._replicas.items() if whole[0] != job}

    def is_over(self, reader: ReaderId, decided: int) -> bool:
        """Tell whether a read that was decided there has ended, as far as is known."""
        whole = (reader.job, reader.model, reader.replica)
        return decided < self._shards.get(reader, 0) or decided < self._replicas.get(whole, 0)


def _note(known: dict[K, int], key: K, seq: int, keys_max: int) -> None:
    known.pop(key, None)
    known[key] = seq
    if len(known) > keys_max:
        del known[next(iter(known))]


LoadView = Mapping[AgentTransport, Load]

D = TypeVar("D")


@dataclass(slots=True)
class _Read:
    since: float
    nbytes: dict[AgentTransport, int] = field(default_factory=dict)
    depth: int = 1
    """How many half-filled replicas bytes come through that are read from this reader, itself included."""
    is_reserved: bool = False
    """It was not requested yet."""


@dataclass(slots=True)
class LoadLedger:
    """What the planner has assigned and not seen end. `at` gives the load that `plan` takes."""

    limits: PlanLimits
    _reads: dict[ReaderId, _Read] = field(default_factory=dict)
    _busy: dict[AgentTransport, Load] = field(default_factory=dict)
    _by_replica: dict[tuple[str, str, str], dict[AgentTransport, int]] = field(default_factory=dict)
    """By job, model and replica: how many of its shards are assigned to each source."""
    reports: LoadReports = field(init=False)
    ended: FinishedReads = field(init=False)

    def __post_init__(self) -> None:
        """Begin with no report, and nothing seen of the log."""
        self.reports, self.ended = LoadReports(self.limits), FinishedReads(self.limits)

    def hear(self, beat: Heartbeat, now: float) -> None:
        """Take an agent's report of its readers."""
        self.reports.hear(beat, now)

    def at(self, now: float) -> LoadView:
        """Return the load at `now`, without what is older than the bounds. The mapping lives on with the ledger."""
        while self._reads:
            reader, read = next(iter(self._reads.items()))
            if now - read.since < self.limits.assigned_s_max and len(self._reads) <= self.limits.readers_max:
                break
            self.done(reader)
        return _LoadView(self, self._busy, now)

    def busy(self, lane: AgentTransport, now: float) -> Load:
        """Return the load of a source: what is assigned, and who else reads from it as far as reported."""
        assigned = self._busy.get(lane, IDLE)
        report = self.reports.at(lane, now)
        return assigned if report is None else self._with_others(lane, assigned, report)

    def _with_others(self, lane: AgentTransport, assigned: Load, report: LoadReport) -> Load:
        """Return the load of a source that has said who reads from it."""
        readers, nbytes = assigned.readers, assigned.nbytes
        said_readers, said_nbytes = report.all.readers, report.all.nbytes
        for reader, decided, its_nbytes in report.named:
            if self.ended.is_over(reader, decided):
                said_readers -= 1
                said_nbytes -= its_nbytes
                continue
            read = self._reads.get(reader)
            if read is None or lane not in read.nbytes:
                readers += 1
                nbytes += its_nbytes
        return Load(max(readers, said_readers), max(nbytes, said_nbytes))

    def serves_only(self, reader: ReaderId, lanes: Iterable[AgentTransport], now: float) -> bool:
        """Tell whether all who read from these sources, as far as is known, are of the reader's own replica."""
        own = self._by_replica.get((reader.job, reader.model, reader.replica), {})
        if len(self._by_replica) == (1 if own else 0) and not self.reports.lanes():
            # No other replica reads from any source, as far as is known.
            return True
        busy, said = self._busy, self.reports.lanes()
        return all(self.busy(lane, now).readers <= own.get(lane, 0) for lane in lanes if lane in busy or lane in said)

    def lanes(self) -> set[AgentTransport]:
        """Return the sources that have a reader, or had one at their last report."""
        return {*self._busy, *self.reports.lanes()}

    def assign(self, reader: ReaderId, plan: Plan, now: float, *, reserved: bool = False) -> None:
        """Count a plan, on top of what the reader reads already; `reserved`: it has not requested it yet."""
        before = self._reads.get(reader)
        if before is not None and before.is_reserved:
            self.done(reader)
        read = self._reads.pop(reader, None) or _Read(now)
        read.since, read.is_reserved = now, reserved
        self._reads[reader] = read
        for share in plan.shares:
            source = share.source
            if share.crosses:
                # A forwarder has these bytes from a ready holder, wherever its other bytes come from.
                read.depth = max(read.depth, 2)
            elif (reader.job, reader.model, source.replica) in self._by_replica:
                above = self._reads.get(ReaderId(reader.job, reader.model, source.replica, source.shard))
                read.depth = max(read.depth, 1 + (above.depth if above is not None else 0))
            self._add(reader, read, (source.agent, share.transport), share.nbytes)

    def knows(self, reader: ReaderId) -> bool:
        """Tell whether something is assigned to a reader, or reserved for it."""
        return reader in self._reads

    def depth(self, reader: ReaderId) -> int:
        """Return how many half-filled replicas bytes come through that are read from this reader; 1 if unknown."""
        read = self._reads.get(reader)
        return 1 if read is None else read.depth

    def done(self, reader: ReaderId) -> None:
        """Forget a read that is over."""
        read = self._reads.pop(reader, None)
        for lane, nbytes in read.nbytes.items() if read is not None else ():
            self._drop(reader, lane, nbytes)

    def failed(self, reader: ReaderId, sources: Iterable[SourceId]) -> None:
        """Forget what a reader had from sources that failed it; the others still serve it."""
        read = self._reads.get(reader)
        if read is None:
            return
        gone = {source.agent for source in sources}
        for lane in [lane for lane in read.nbytes if lane[0] in gone]:
            self._drop(reader, lane, read.nbytes.pop(lane))

    def see(self, job: str, seq: int, event: Event) -> None:
        """Let a read end that the log says is over, by its entry of this number."""
        self.ended.see(job, seq, event)
        match event:
            case ShardFilled() | ShardReleased():
                self.done(ReaderId(job, event.model, event.replica, event.shard))
            case ReplicaReady() | RoundFailed() | RoundReopened():
                self._done_all(job, event.model, event.replica)
            case AgentLost():
                self._gone(event.agent)
                self.reports.forget(event.agent, event.incarnation)
            case _:
                pass

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        busy: dict[AgentTransport, Load] = {}
        for read in self._reads.values():
            for lane, nbytes in read.nbytes.items():
                before = busy.get(lane, IDLE)
                busy[lane] = Load(before.readers + 1, before.nbytes + nbytes)
        assert busy == self._busy, f"the reads come to {busy}, the load says {self._busy}"
        own = Counter((lane, r.job, r.model, r.replica) for r, read in self._reads.items() for lane in read.nbytes)
        said = {(lane, *whole): count for whole, lanes in self._by_replica.items() for lane, count in lanes.items()}
        assert own == said, f"replicas read {own}, the ledger says {said}"
        self.reports.check()
        times = [read.since for read in self._reads.values()]
        assert times == sorted(times), f"reads out of the order of their time: {times}"

    def _done_all(self, job: str, model: str, replica: str) -> None:
        whole = (job, model, replica)
        for reader in [each for each in self._reads if (each.job, each.model, each.replica) == whole]:
            self.done(reader)

    def _gone(self, agent: str) -> None:
        """Forget what an agent gave: its leases ended with its incarnation."""
        for reader, read in self._reads.items():
            for lane in [lane for lane in read.nbytes if lane[0] == agent]:
                self._drop(reader, lane, read.nbytes.pop(lane))

    def _add(self, reader: ReaderId, read: _Read, lane: AgentTransport, nbytes: int) -> None:
        before = self._busy.get(lane, IDLE)
        if lane in read.nbytes:
            self._busy[lane] = Load(before.readers, before.nbytes + nbytes)
        else:
            own = self._by_replica.setdefault((reader.job, reader.model, reader.replica), {})
            own[lane] = own.get(lane, 0) + 1
            self._busy[lane] = Load(before.readers + 1, before.nbytes + nbytes)
        read.nbytes[lane] = read.nbytes.get(lane, 0) + nbytes

    def _drop(self, reader: ReaderId, lane: AgentTransport, nbytes: int) -> None:
        whole = (reader.job, reader.model, reader.replica)
        own = self._by_replica[whole]
        own[lane] -= 1
        if not own[lane]:
            del own[lane]
        if not own:
            del self._by_replica[whole]
        before = self._busy[lane]
        if before.readers == 1:
            del self._busy[lane]
        else:
            self._busy[lane] = Load(before.readers - 1, before.nbytes - nbytes)


class _LoadView(Mapping[AgentTransport, Load]):
    """A ledger's load at a time, looked up source by source: a plan asks for a few of many."""

    def __init__(self, ledger: LoadLedger, assigned: Mapping[AgentTransport, Load], now: float) -> None:
        self._ledger, self._assigned, self._now = ledger, assigned, now
        self._said = ledger.reports.lanes()

    def __getitem__(self, lane: AgentTransport) -> Load:
        found = self._ledger.busy(lane, self._now)
        if not found.readers:
            raise KeyError(lane)
        return found

    @overload
    def get(self, lane: AgentTransport, default: None = None, /) -> Load | None: ...
    @overload
    def get(self, lane: AgentTransport, default: Load | D, /) -> Load | D: ...
    def get(self, lane: AgentTransport, default: Load | D | None = None, /) -> Load | D | None:
        """Return a source's load without the cost of an exception: most sources are idle."""
        if lane not in self._said:
            return self._assigned.get(lane, default)
        found = self._ledger.busy(lane, self._now)
        return found if found.readers else default

    def __iter__(self) -> Iterator[AgentTransport]:
        return (lane for lane in self._ledger.lanes() if self._ledger.busy(lane, self._now).readers)

    def __len__(self) -> int:
        return sum(1 for _ in self)
