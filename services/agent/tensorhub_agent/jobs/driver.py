"""The agent within one job: drives an `AgentCore` with the log, the workers, the planner and the transports.

All decisions are the core's. This file carries out its effects in their order and brings it what comes of them.

Invariant: an error of the core, or of what is done for it, is this job's alone. It sets the job aside: nothing is
decided or said any more, every call under way raises, leases are broken, and the memory stays as it is.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from tensorhub_agent.compute.amax_table import NumpyAmaxTable
from tensorhub_agent.control.command_queue import CALLS_WAIT_MAX, CommandQueue
from tensorhub_agent.control.lease_service import LeaseService, PendingLeaseRequests
from tensorhub_agent.control.planner_client import FillTarget, PlannerClient
from tensorhub_agent.control.program_cache import ProgramCache
from tensorhub_agent.control.tracer import NO_HEADERS, Tracer
from tensorhub_agent.core.agent import AgentCore
from tensorhub_agent.core.effects import (
    AllocateCopy,
    AnyCall,
    AnyEffect,
    AppendCommand,
    BatchDone,
    BreakLease,
    CallRead,
    CloseSource,
    CompareLayouts,
    CompleteCall,
    ConfirmLease,
    CopyToSpare,
    DigestMemory,
    DropMapping,
    EffectOutcome,
    EndFenced,
    FailCall,
    FoldAmax,
    FreeShard,
    Keep,
    Kept,
    OpenTransport,
    PlanReceived,
    ProbeMapping,
    ReadBatch,
    Rejoin,
    ReportReplicaVersion,
    ReportWrongBytes,
    RequestLease,
    RequestPlan,
    SaveManifest,
    SendAvailability,
    SiblingsChecked,
)
from tensorhub_agent.core.operations.read import read_of
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState, ShardContents, ShardSpec
from tensorhub_agent.deltas.job_deltas import JobDeltas
from tensorhub_agent.jobs.context import AgentContext
from tensorhub_agent.jobs.early_digests import CopyName, EarlyDigests
from tensorhub_agent.jobs.memory_tasks import MemoryTasks
from tensorhub_agent.jobs.pending_calls import PendingCall, PendingCalls
from tensorhub_agent.jobs.worker_server import WorkerConnection
from tensorhub_agent.observability.read_log import NotBegun, ReadLog
from tensorhub_agent.observability.read_status import reads_under_way
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.runtime.timer import CoalescingTimer
from tensorhub_agent.sources.manager import SourceManager
from tensorhub_agent.storage.adoption import AdoptedShard
from tensorhub_agent.storage.shard_store import JobShardStore
from tensorhub_common.bus.errors import LogGap, LogMissing, LogShorter
from tensorhub_common.errors import AgentUnavailable, JobGone, RegistryUnavailable, TensorHubError
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.observability.trace_context import TraceContext, headers_of
from tensorhub_common.programs.amax_reductions import amax_reductions_of
from tensorhub_common.protocol.activity import ActiveRead
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.log.codec import read_event
from tensorhub_common.protocol.log.events import AgentJoined
from tensorhub_common.protocol.plans import SourceId
from tensorhub_common.protocol.subjects import events_of
from tensorhub_common.protocol.worker import ReadReport
from tensorhub_common.runtime.peer_status import PeerStatus
from tensorhub_common.runtime.supervision import Fault, Supervisor
from tensorhub_common.telemetry import process_spans

JOIN_S_MAX: Final = 10.0
"""How long a worker's first call waits for the agent to have joined the job."""

FOLLOW_AGAIN_S: Final = 0.2

TENSORS_NAMED_MAX: Final = 8
"""At most this many tensors that were overwritten are named."""

REPLICA: Final = b'"replica":"'
"""Behind this an event names the replica that it is about."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobStats:
    """What the metrics read of one job."""

    read_bytes: Mapping[str, int]
    """Bytes that were read, by transport."""
    encoded_bytes: Mapping[str, int]
    """Bytes that arrived encoded, by encoding."""
    sources: Mapping[str, int]
    """Open sources, by transport."""
    leases: Mapping[str, int]
    """Leases, by state."""


class JobDriver:
    """One job's share of the agent."""

    def __init__(self, job: str, around: AgentContext, rejoin_all: Callable[[], None]) -> None:
        """Prepare; `start` opens the job and joins it.

        `rejoin_all` raises the incarnation, and has all jobs join anew.
        """
        self.job = job
        self.set_aside_reason: str | None = None
        """Why the job was set aside."""
        self._work = Supervisor(f"job {job}", on_fault=self._set_aside)
        self._around, self._rejoin_all = around, rejoin_all
        self._loop = asyncio.get_running_loop()
        self.core = AgentCore(around.agent, around.config, around.measured)
        self.store: JobShardStore = around.stores.of(job)
        self._joblog = JobLog(around.bus, job)
        self._log_following = PeerStatus(
            f"the log of job {job}", lost="can't be followed, so that is tried again", back="is followed"
        )
        programs = ProgramCache(job, around.blobs)
        self._questions = PlannerClient(job, around.bus, around.blobs, programs, around.planner)
        self._lanes = CommandQueue(self._joblog, self._questions.open_job, self._work, rejoin_all)
        self.callers = PendingCalls(self.core.shards, self.store, self._work, around.reads)
        config = around.config
        self._watch = ReadLog(config.transfer.stall_s, config.slow_read_s, around.reads.late)
        self._tracing = Tracer(job, around.agent, digests=around.config.digests, maker=process_spans.span_maker())
        self._alarm = CoalescingTimer(self._work, self._tick)
        self._joined = asyncio.Event()
        self._postponed = PendingLeaseRequests()
        self.deltas = JobDeltas(
            job,
            around.deltas,
            around.pool,
            around.stores.store,
            self._postponed.happened,
            is_making=around.config.deltas > 0,
        )
        self.early_digests = EarlyDigests(self.store, around.pool, self._work)
        self._memory = MemoryTasks(
            self.store,
            around.pool,
            self.deltas,
            self._take_outcome,
            self.early_digests,
            digests=around.config.digests,
        )
        self.sources = SourceManager(
            job,
            around.bus,
            around.transports,
            programs,
            self._take_outcome,
            deltas=self.deltas,
            encodings=around.config.encodings,
            on_fault=lambda fault: around.fault(str(fault)),
        )
        self.lending = LeaseService(
            self.core,
            self.store,
            around.transports,
            self._tracing,
            self._alarm,
            self._postponed,
            self.carry_out,
            deltas=self.deltas,
            work=self._work,
            accused=self._accused,
        )
        self._looked_at: dict[ShardKey, int] = {}
        """Which version of a shard was looked at last, because a reader got wrong bytes of it."""
        # An event matters here if it names this agent, or says that the job is deleted or that an agent is lost, for
        # whom a read here may wait. Names can't hold a quotation mark, so the JSON of one is its text.
        self._concerns = (
            f'"{around.agent}"'.encode(),
            f'"{around.agent}/'.encode(),
            b'"job.deleted"',
            b'"agent.lost"',
        )
        self._replicas: set[bytes] = set()
        """And if it is about a replica of one of these names."""

    # Standing in the log.

    def start(self) -> None:
        """Open the job, follow its log, and join; goes on in the background.

        What was set aside is stated by whichever call opens the job, be it a worker's of a job too many: the log would
        let go of it, and the process that can take it back would have to free it.
        """
        for key in self.store.aside:
            self.core.set_aside(key)
            self.concern(key.replica)
        self._work.start(self._follow(), "following the log")

    async def wait_joined(self, timeout_s: float) -> None:
        """Return once the log has taken this agent's word. Raises `RegistryUnavailable`, `JobGone`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._joined.wait()
        except TimeoutError:
            raise RegistryUnavailable(
                f"no registry let agent {self._around.agent!r} into job {self.job!r} within {timeout_s:g} s: is one "
                "running? ('tensorhub status', 'tensorhub doctor')"
            ) from None
        if self.set_aside_reason is not None:
            raise AgentUnavailable(self.set_aside_reason)
        if self.core.deleted is not None:
            raise JobGone(self.core.deleted)

    async def _follow(self) -> None:
        while True:
            try:
                await self._questions.open_job()
                start = await self._joblog.last_seq() + 1
                self._log_following.answers()
                self.rejoin(self._around.incarnation.number)
                follow = self._joblog.follow(start, events_of(self.job), wanted=self._is_concerned)
                async with contextlib.aclosing(follow) as entries:
                    async for entry in entries:
                        self._on_entry(entry.data, entry.headers)
                        if self.core.deleted is not None:
                            return
            except JobGone as why:
                self.carry_out(self.core.job_deleted(str(why), self._loop.time()))
                self._note_deleted()
                return
            except (LogGap, LogShorter, LogMissing) as why:
                _log.error("the log of job %s is not what it was (%s); joining it anew", self.job, why)
            except TensorHubError as why:
                # That NATS is away the bus itself has said, once.
                if self._joblog.is_reachable:
                    self._log_following.is_silent(str(why))
            await asyncio.sleep(FOLLOW_AGAIN_S)

    def adopt(self, adopted: list[AdoptedShard]) -> None:
        """Take back the shards that an earlier process of this agent held, before `start`."""
        for each in adopted:
            manifest = each.manifest
            key = ShardKey(manifest.model, manifest.replica, manifest.shard)
            nbytes = self.store.shards[key].table.nbytes
            spec = ShardSpec(
                key, manifest.shards, manifest.spot, manifest.layout_digest, nbytes, each.spare is not None
            )
            # Those who mapped it don't depend on this process, nor on the one before it.
            contents = ShardContents(partial=manifest.partial, lent=each.segment.is_lent())
            contents.spare_lent = each.spare is not None and each.spare.is_lent()
            if contents.lent:
                contents.memory = MemoryState.DRAINING
            if each.whole:
                contents.memory, contents.version, contents.root = MemoryState.READY, manifest.version, manifest.root
                contents.digests = manifest.digests or b""
            self.concern(key.replica)
            self.core.adopt(spec, contents)

    def rejoin(self, incarnation: int) -> None:
        """Speak under this incarnation from now on; the log must not have heard it in this job before."""
        if self.core.deleted is not None or self.set_aside_reason is not None:
            return
        self._joined.clear()
        self._around.registry.forget(self.job)
        self._lanes.forget()
        if incarnation <= self.core.incarnation:
            # This job's log began anew: the others are not concerned, but a number is used once.
            self._rejoin_all()
            return
        around = self._around
        with self.isolated("joining"):
            self.carry_out(self.core.join(incarnation, around.host, around.site, self._loop.time(), rack=around.rack))

    def _on_entry(self, data: bytes, headers: Mapping[str, str] = NO_HEADERS) -> None:
        if not self._is_concerned(data):
            return
        try:
            event = read_event(data)
        except MALFORMED as why:
            _log.warning("an entry of the log is no event that this agent knows: %s", why)
            return
        if event is None:
            return
        self._tracing.event(event, headers)
        if event.by is not None and event.by.process == self._around.agent:
            self._around.registry.answered(self.job, event.by.lane, event.by.n)
        self.carry_out(self.core.on_event(event, self._loop.time()))
        if self.core.deleted is not None:
            self._note_deleted()
        elif isinstance(event, AgentJoined) and self.core.joined and not self._joined.is_set():
            self._around.joined(self.core.incarnation)
            self._joined.set()

    def _note_deleted(self) -> None:
        """Say nothing more, and answer the workers that wait to be let in."""
        _log.info("job %s is deleted", self.job)
        self._around.registry.forget(self.job)
        self._lanes.forget()
        self._joined.set()

    def _is_concerned(self, data: bytes) -> bool:
        # Most events of a busy job are about other agents' shards; not to read them is a third of this process's work.
        for word in self._concerns:
            if word in data:
                return True
        at = data.find(REPLICA)
        while at >= 0:
            begin = at + len(REPLICA)
            if data[begin : data.find(b'"', begin)] in self._replicas:
                return True
            at = data.find(REPLICA, begin)
        return False

    def concern(self, replica: str) -> None:
        """Read the events about replicas of this name from now on."""
        self._replicas.add(replica.encode())

    # Effects.

    @contextlib.contextmanager
    def isolated(self, what: str) -> Iterator[None]:
        """Keep an error of this job's from its callers: it is a fault of the job."""
        try:
            yield
        except Exception as why:  # noqa: BLE001 (whatever it is, this job can't be trusted to go on)
            self._work.fault(what, why)

    def _set_aside(self, fault: Fault) -> None:
        if self.set_aside_reason is not None:
            return
        self.set_aside_reason = (
            f"agent {self._around.agent!r} has set job {self.job!r} aside, for it failed while {fault.work} "
            f"({fault.error!r}). Its memory is kept: start the agent again to take it back, and report the agent's log"
        )
        self._alarm.cancel()
        self._around.registry.forget(self.job)
        self._lanes.forget()
        self._joined.set()
        self._around.set_aside(self)

    def carry_out(self, effects: list[AnyEffect]) -> None:
        """Do what the core wants, in order."""
        if self.set_aside_reason is not None:
            return
        with self.isolated("carrying out what was decided"):
            self._carry_out(effects)

    def _carry_out(self, effects: list[AnyEffect]) -> None:
        for effect in effects:
            if isinstance(effect, CompleteCall | FailCall):
                self._tell_end(effect)
            self._do(effect, self._tracing.effect(effect, self.core.shards))
        self._postponed.happened()
        self._alarm.set(self.core.deadline())

    def _do(self, effect: AnyEffect, cause: TraceContext | None) -> None:  # noqa: C901, PLR0912, PLR0915 (effects)
        match effect:
            case AppendCommand():
                if (by := effect.command.by) is not None:
                    self._around.registry.said(self.job, by.lane, by.n, self._loop.time())
                self._lanes.say(effect.command, cause)
            case CompleteCall() | FailCall():
                self.callers.answer(effect, cause)
            case ReportReplicaVersion():
                self._hold(effect)
            case DigestMemory():
                self._work.start(self._memory.digest(effect), "digesting memory")
            case SaveManifest():
                self.store.save(effect)
                self.deltas.saved(effect, self.store.shards[effect.key])
                if self.store.is_kept_on_disk(effect.key):
                    self._work.start(self._settle(effect.key), "bringing a copy to the disk")
                if effect.swap:
                    self.callers.swapped(effect.key)
            case Keep():
                self.store.keep(effect)
                self._work.start(self._tell_kept(effect), "writing down what was filled")
            case ProbeMapping():
                self._work.call_soon(self._memory.probe, effect, what="looking who maps memory")
            case CopyToSpare():
                self._work.start(self._memory.duplicate(effect.key), "duplicating memory")
            case DropMapping():
                self.store.let_go(effect.key)
            case CompareLayouts():
                self._work.start(self._check_siblings(effect), "comparing layouts")
            case AllocateCopy():
                self.concern(effect.key.replica)
                self._work.start(self._make_copy(effect), "making a copy")
            case RequestPlan():
                self._work.start(self._plan(effect, cause), "asking for a plan")
            case RequestLease():
                me = SourceId(self._around.agent, self.core.incarnation, effect.key.replica, effect.key.shard)
                self.sources.open(effect, me, cause)
                self.callers.show_progress()
            case OpenTransport():
                self.sources.enter(effect)
            case ReadBatch():
                self._post(effect)
            case FoldAmax():
                self._fold(effect)
            case ConfirmLease():
                self.sources.confirm(effect)
            case ReportWrongBytes():
                self.sources.accuse(effect)
            case CloseSource():
                self._note_left(effect)
                self.sources.close(effect)
            case BreakLease():
                self._around.transports.break_lease(effect.lease, effect.reason)
            case SendAvailability():
                self._around.transports.announce(effect.lease, effect.update)
            case FreeShard():
                self.deltas.freed(effect.key)
                self.early_digests.drop(effect.key)
                self.store.free(effect.key)
            case Rejoin():
                self._rejoin_all()
            case EndFenced():
                self._around.fenced()

    def stats(self) -> JobStats:
        """Return what the metrics read of this job."""
        sources = self.sources
        return JobStats(
            read_bytes=dict(sources.read_bytes),
            encoded_bytes=dict(sources.encoded_bytes),
            sources=Counter(sources.transports()),
            leases=self.core.lease_states(),
        )

    def look(self) -> None:
        """Tell of reads that have begun to stand still; to be called about once a second."""
        with self.isolated("looking for reads that stand still"):
            reads = [read for core in self.core.shards.values() if (read := read_of(core)) is not None]
            for line in self._watch.look(reads, self._loop.time(), self._tracing.trace_of):
                _log.warning("job %s: %s", self.job, line)

    def _tell_end(self, effect: CompleteCall | FailCall) -> None:
        """Tell of a read that failed or was slow."""
        key = self.callers.reading(effect.call)
        line = None if key is None else self._watch.ended(key, effect, self._tracing.trace_of(effect.call))
        if line is not None:
            _log.warning("job %s: %s", self.job, line)

    def _note_left(self, effect: CloseSource) -> None:
        """Tell of a source that a read leaves before its end, once until it is read from again."""
        read = read_of(self.core.shards.get(effect.key))
        source = None if read is None else read.source(effect.source)
        if read is not None and source is not None and source.lost:
            key, trace = effect.key, self._tracing.trace_of(read.call.call)
            where = f"shard {key.shard} of {key.model}/{key.replica} in job {self.job}"
            told = f"{source.lost} (by the read of {where}{'' if trace is None else f', trace {trace}'})"
            self._around.sources.lost(source.share.source.agent, told)

    def _take_outcome(self, outcome: EffectOutcome) -> None:
        if self.set_aside_reason is not None:
            return
        if isinstance(outcome, BatchDone) and self._around.sources.any_lost:
            read = read_of(self.core.shards.get(outcome.key))
            source = None if read is None else read.source(outcome.source)
            if source is not None:
                self._around.sources.back(source.share.source.agent)
        with self.isolated(f"taking {type(outcome).__name__}"):
            self._tracing.outcome(outcome)
            self.carry_out(self.core.on_outcome(outcome, self._loop.time()))

    def _tick(self) -> None:
        self.carry_out(self.core.tick(self._loop.time()))

    def _post(self, effect: ReadBatch) -> None:
        stored = self.store.shards[effect.key]
        if stored.descriptors is not None:
            self.sources.take(effect, stored.descriptors)
        else:
            base = stored.segment if stored.spare is not None else None
            self.sources.post(effect, stored.target, base, stored.table, digests=self.core.config.digests)

    def _fold(self, effect: FoldAmax) -> None:
        effect.table.fold(effect.source, effect.partials)
        effect.table.write_scales(effect.scales, self.store.shards[effect.key].target.view)

    async def _make_copy(self, effect: AllocateCopy) -> None:
        made = await self._around.copies.make(effect, self.job, self.core.incarnation)
        self.carry_out(self.core.copy_made(made, self._loop.time()))

    async def _tell_kept(self, effect: Keep) -> None:
        self._take_outcome(Kept(effect.key, effect.number, await self.store.written(effect.key)))

    async def _settle(self, key: ShardKey) -> None:
        try:
            await self.store.settle(key)
        except OSError as why:
            _log.error("the copy for %s of model %s is given up: %s", key.replica, key.model, why)
            self.carry_out(self.core.copy_failed(key, self._loop.time()))

    async def _check_siblings(self, effect: CompareLayouts) -> None:
        stored = self.store.shards.get(effect.key)
        if stored is not None:
            mismatch = await self._questions.mismatch(stored.layout, effect.siblings)
            self._take_outcome(SiblingsChecked(effect.key, effect.number, mismatch))

    async def _plan(self, effect: RequestPlan, cause: TraceContext | None) -> None:
        stored = self.store.shards.get(effect.key)
        target = None if stored is None else FillTarget(stored.digest, stored.table)
        answer, program, completion = await self._questions.plan(effect.demand, headers_of(cause), target)
        folds = (
            await asyncio.to_thread(amax_reductions_of, program) if program is not None and program.partials else None
        )
        table = NumpyAmaxTable(program) if program is not None and folds is not None else None
        self._take_outcome(PlanReceived(effect.key, effect.number, answer, program, completion, folds, table))

    async def keep_layout(self, data: bytes) -> str:
        """Put a layout where everybody of the job finds it by its digest, which is returned."""
        return await self._around.blobs.put(self.job, data)

    def reads_under_way(self) -> tuple[tuple[ActiveRead, ...], int]:
        """Return what is being read just now, and how many more reads there are."""
        return reads_under_way(self.core.shards.values(), self._loop.time(), self._tracing.trace_of)

    # Workers.

    def call(self, key: ShardKey, call: AnyCall, now: float, traceparent: str | None = None) -> None:
        """Begin a call on a shard; `callers` knows who waits for it, and `traceparent` names the caller's span."""
        if self.set_aside_reason is not None:
            effect = FailCall(call.call, AgentUnavailable.__name__, self.set_aside_reason)
            if isinstance(call, CallRead):
                self._tell_refused(NotBegun.ASIDE, key, effect)
            self.callers.answer(effect, None)
            return
        with self.isolated(f"taking {type(call).__name__}"):
            self._tracing.called(key, call, traceparent)
            if key in self.core.shards and self._lanes.waiting(self.core.lane(key)) >= CALLS_WAIT_MAX:
                why = "the log takes no commands just now, and those of earlier calls wait: see 'tensorhub status'"
                self.carry_out([FailCall(call.call, RegistryUnavailable.__name__, f"{why}, then call again")])
            else:
                self.carry_out(self.core.called(key, call, now))

    def refuse(self, waiting: PendingCall, kind: NotBegun, error: type[TensorHubError], message: str) -> None:
        """Refuse a call that the core never hears of, since its worker has no such shard or may not read into it."""
        effect = FailCall(waiting.call, error.__name__, message)
        if waiting.reads:
            self._tell_refused(kind, waiting.about, effect)
        self.callers.refuse(waiting, effect)

    def _tell_refused(self, kind: NotBegun, key: ShardKey | None, effect: FailCall) -> None:
        line = self._watch.refused(kind, key, effect, self._loop.time())
        if line is not None:
            _log.warning("job %s: %s", self.job, line)

    def loaded(self, key: ShardKey) -> None:
        """The worker wrote values of its own into a shard."""
        with self.isolated("taking values"):
            self.carry_out(self.core.loaded(key))

    def copied(self, key: ShardKey, copy: CopyName, nbytes: int) -> None:
        """A copy of the worker's has brought the first bytes of a shard's memory."""
        if self.set_aside_reason is None and self.core.config.digests:
            with self.isolated("taking how far a copy has come"):
                self.early_digests.came(key, copy, nbytes)

    def register(self, spec: ShardSpec, call: AnyCall, now: float) -> None:
        """Bring a new shard whose memory stands already; `callers` knows who waits for it."""
        if self.set_aside_reason is not None:
            self.store.free(spec.key)
            self.callers.answer(FailCall(call.call, AgentUnavailable.__name__, self.set_aside_reason), None)
            return
        self.concern(spec.key.replica)
        with self.isolated("taking a new shard"):
            self.carry_out(self.core.register(spec, call, now))

    def _hold(self, effect: ReportReplicaVersion) -> None:
        session = self.callers.session_of(effect)
        if session is not None:
            self._around.tell_holds(session, self.job, effect.key, effect.version, "")

    def _accused(self, key: ShardKey, version: int, root: str) -> None:
        """A reader got wrong bytes of a shard under a lease that held: look at its memory, once for each version."""
        core = self.core.shards.get(key)
        if core is not None and self._looked_at.get(key) != version and _stands(core.contents, version, root):
            self._looked_at[key] = version
            self._work.start(self._look_at(core, version, root), "looking at memory of which a reader got wrong bytes")

    async def _look_at(self, core: ShardCore, version: int, root: str) -> None:
        """Say which tensors were overwritten while they were published, in the log and to the worker."""
        key = core.key
        tensors = await self._memory.overwritten(key, core.contents.digests)
        if not tensors or not _stands(core.contents, version, root):
            return
        named = ", ".join(tensors[:TENSORS_NAMED_MAX]) + (", …" if len(tensors) > TENSORS_NAMED_MAX else "")
        trouble = (
            f"{len(tensors)} of the tensors of version {version} were overwritten while it was published ({named}): no "
            "reader can have it any more. Call unpublish() before tensors are written, or write within overwriting(); "
            "then publish a new version"
        )
        _log.error("%s: %s", core.where, trouble)
        if core.session is not None:
            self._around.tell_holds(core.session, self.job, key, core.replica_version, trouble)

    def worker_gone(self, worker: WorkerConnection) -> None:
        """A worker's connection ended."""
        with self.isolated("taking the end of a worker"):
            if self.set_aside_reason is None:
                self.carry_out(self.core.worker_gone(worker.number, self._loop.time()))

    async def end_aside(self) -> None:
        """End what was set aside. A call ends once nothing is written any more, as any other."""
        await self.stop()
        why = self.set_aside_reason or "the job was set aside"
        for call in self.callers.under_way():
            effect, context = FailCall(call, AgentUnavailable.__name__, why), None
            # What has failed may be what the line or the span is made of, and its worker is answered all the same.
            with self.isolated("telling of a call of a job that is set aside"):
                self._tell_end(msgspec.structs.replace(effect, report=self._report_of(call)))
                context = self._tracing.effect(effect, self.core.shards)
            self.callers.answer(effect, context)
        self._tracing.close()

    def _report_of(self, call: int) -> ReadReport | None:
        """Return how far a read has come."""
        key = self.callers.reading(call)
        read = None if key is None else read_of(self.core.shards.get(key))
        return None if read is None or read.call.call != call else read.report(self._loop.time())

    async def stop(self) -> None:
        """End: nothing is written any more when this returns."""
        self._alarm.cancel()
        self._lanes.forget()
        await self._work.close()
        await self.sources.stop()
        await self.deltas.stop()
        self._tracing.close()


def _stands(contents: ShardContents, version: int, root: str) -> bool:
    return contents.memory is MemoryState.READY and (contents.version, contents.root) == (version, root)
