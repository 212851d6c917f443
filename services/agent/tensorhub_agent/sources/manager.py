"""The sources of this agent's reads: leases asked for by NATS, bytes brought by a transport.

Carries out what `transfer.py` decides.

Invariants:
- `SourceClosed` is told only after the transport's own close has returned, when nothing can be written into the
  destination any more.
- An error that escapes from reading a source is a loss of that source, which its read is told at once. One that escapes
  from closing a source, or from the core that is told, is a fault of the agent: what may still be written is not known.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Final

from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.control.lease_client import HOLD_S, HeldLease, LeaseClient, NeverLent
from tensorhub_agent.control.program_cache import ProgramCache
from tensorhub_agent.core.effects import (
    AvailabilityReceived,
    BatchDone,
    BytesReceived,
    CloseSource,
    ConfirmLease,
    LeaseConfirmed,
    LeaseReceived,
    OpenTransport,
    ReadBatch,
    ReportWrongBytes,
    RequestLease,
    SourceClosed,
    SourceLost,
    SourceOpened,
)
from tensorhub_agent.deltas.job_deltas import JobDeltas
from tensorhub_agent.primitives.ids import BaseVersion, ShardKey
from tensorhub_agent.primitives.lease_messages import AvailabilityUpdate, PiecesAvailable
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_agent.primitives.program_units import UnitAvailability
from tensorhub_agent.rates.encoding_choice import LineEstimate, awaits_patches
from tensorhub_agent.sources.batch_reader import BatchReader, BatchTarget
from tensorhub_agent.storage.device_segments import AnySegment
from tensorhub_agent.storage.mapped_descriptors import MappedDescriptors
from tensorhub_agent.transports.base import EncodingSession, SourceSession, TransportLost, TransportSilent
from tensorhub_agent.transports.local.session import MappedSession
from tensorhub_agent.transports.registry import TransportRegistry
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NoAnswer
from tensorhub_common.errors import TensorHubError
from tensorhub_common.layout.layout import PieceTable
from tensorhub_common.observability.trace_context import TraceContext, headers_of
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.regions import StridedCopies
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.protocol.plans import SourceId
from tensorhub_common.runtime.supervision import Fault, OnFault, Supervisor, TaskGroup, log_only

NOTHING: Final = (b"", b"")

REASON_CHARS_MAX: Final = 500
"""So much of an error is told to the caller of a read."""

SourceEvents = Callable[
    [
        LeaseReceived
        | SourceOpened
        | AvailabilityReceived
        | BytesReceived
        | BatchDone
        | LeaseConfirmed
        | SourceLost
        | SourceClosed
    ],
    None,
]

_log: Final = logging.getLogger(__name__)


class SourceConnection:
    """One open source: a lease and its transport session."""

    def __init__(self, task: "asyncio.Task[None]", tasks: TaskGroup, effect: RequestLease, by: SourceId) -> None:
        """Begin with the task that opens it, for the reader `by`; `tasks` is an empty group."""
        self.effect, self.by = effect, by
        self.opening, self.transport = task, effect.share.transport
        self.program, self.layout, self.table = effect.program, effect.share.layout or "", effect.table
        self.availability: UnitAvailability | None = None
        """Of a half-filled source of a read by a program."""
        self.session: SourceSession | None = None
        self.tasks, self.closing = tasks, False
        self.closed: asyncio.Task[None] | None = None
        self.reader: BatchReader | None = None
        """What reads from it, if pieces may come in fewer bytes; patches from `base` to the version with this root."""
        self.base: BaseVersion | None = None
        self.root = ""
        self.entered = asyncio.Event()
        """Its transport is wanted; until then its lease is held."""
        self.held: HeldLease | None = None
        self.updates: list[AvailabilityUpdate] = []
        """What a half-filled source has told of before its opening was."""


class SourceManager:
    """All sources that one job's reads on this agent have open, by (shard, number)."""

    def __init__(
        self,
        job: str,
        bus: Bus,
        transports: TransportRegistry,
        programs: ProgramCache,
        tell: SourceEvents,
        *,
        deltas: JobDeltas,
        encodings: bool = True,
        on_fault: OnFault | None = None,
    ) -> None:
        """Report what comes of everything to `tell`; keep in `deltas` what was applied.

        Without `encodings` every piece comes as it is. `on_fault` ends the agent.
        """
        self._work = Supervisor(f"the reads of job {job!r}", on_fault)
        self._encodings = encodings
        self._programs, self._deltas = programs, deltas
        self._leasing, self._transports = LeaseClient(job, bus), transports
        self._tell = self._work.guarded(tell, "taking an update of a source")
        self._open: dict[tuple[ShardKey, int], SourceConnection] = {}
        self._leaving = self._work.group()
        """What sources are told of that no read waits for: leases that are let go, and wrong bytes."""
        self.read_bytes: Counter[str] = Counter()
        """What came so far, by transport."""
        self.encoded_bytes: Counter[str] = Counter()
        """Bytes of pieces so far that did not come as they are, by encoding."""

    def transports(self) -> list[str]:
        """Return the transport of each open source. It may be called from another thread."""
        return [source.transport for source in list(self._open.values())]

    def open(self, effect: RequestLease, reader: SourceId, cause: TraceContext | None = None) -> None:
        """Get a lease and open the transport with its ticket. `cause` is the span that the questions belong to."""
        opening = self._opened(effect, reader, headers_of(cause))
        task = self._work.start(opening, f"opening {effect.share.source.agent}", self._losing(effect))
        source = self._open[effect.key, effect.source] = SourceConnection(task, self._work.group(), effect, reader)
        if not effect.hold:
            source.entered.set()

    def enter(self, effect: OpenTransport) -> None:
        """Open the transport of a source whose lease is held."""
        source = self._open.get((effect.key, effect.source))
        if source is not None:
            source.entered.set()

    async def _opened(self, effect: RequestLease, reader: SourceId, headers: dict[str, str]) -> None:
        key, number = effect.key, effect.source
        try:
            grant, (digests, sizes), session = await self._let_in(effect, reader, headers)
        except TensorHubError as why:
            self._tell(SourceLost(key, number, str(why), is_final=isinstance(why, NeverLent)))
            return
        source = self._open.get((key, number))
        if source is None or source.closing:
            await session.close()
            return
        source.session = session
        if self._encodings and digests and effect.root is not None and isinstance(session, EncodingSession):
            source.reader = BatchReader(
                session, digests, sizes if effect.base is not None else b"", LineEstimate(known=effect.rate)
            )
            source.base, source.root = effect.base, effect.root
            if sizes and grant.patches_coming and awaits_patches(effect.rate, far=effect.share.far):
                source.reader.more = lambda first: self._leasing.more_sizes(
                    effect.share.source.agent, reader.agent, grant, first
                )
        early, source.updates = source.updates, []
        pieces = tuple(run for update in early if isinstance(update, PiecesAvailable) for run in update.pieces)
        if source.availability is not None:
            pieces = source.availability.units(pieces)
        self._tell(SourceOpened(key, number, digests, pieces if grant.filling else None, grant.promises))
        for update in early:
            if not isinstance(update, PiecesAvailable):
                self._tell(AvailabilityReceived(key, number, update))

    async def _let_in(
        self, effect: RequestLease, reader: SourceId, headers: dict[str, str]
    ) -> tuple[LeaseGrant, tuple[bytes, bytes], SourceSession]:
        """Get a lease, what is to be known of it, and a session.

        One that is far, or crosses for the site, is asked again when it was silent: to leave it would be to let its
        part cross to another one. The core says how long that is worth waiting.
        """
        while True:
            try:
                return await self._asked(effect, reader, headers)
            except (NoAnswer, TransportSilent):
                if not (effect.share.crosses or effect.share.far):
                    raise
                source = self._open.get((effect.key, effect.source))
                if source is not None:
                    source.updates.clear()

    async def _asked(
        self, effect: RequestLease, reader: SourceId, headers: dict[str, str]
    ) -> tuple[LeaseGrant, tuple[bytes, bytes], SourceSession]:
        """Do so once."""
        key, number, agent = effect.key, effect.source, effect.share.source.agent
        leasing, source = self._leasing, self._open[key, number]
        grant = await leasing.ask(effect, reader, headers, hold_s=0.0 if source.entered.is_set() else HOLD_S)
        # Units of a program are no pieces of the source: no list of digests is about them.
        about = await leasing.digests(agent, reader.agent, grant, headers) if effect.program is None else NOTHING
        if not source.entered.is_set():
            source.held = HeldLease(leasing, effect, reader, grant, headers)
            self._tell(LeaseReceived(key, number, about[0]))
            grant = await source.held.until(source.entered)
            source.held = None
        if effect.program is not None and grant.filling and grant.program != effect.program.digest:
            await self._await_units(effect, effect.program)
        session = await self._transports.open(
            effect.share.transport,
            grant,
            reader=reader.agent,
            on_lost=lambda reason: self._lost(key, number, reason),
            on_have=lambda update: self._have(key, number, update),
        )
        if isinstance(session, MappedSession) and session.device != effect.device:
            # An agent of an older release does not know that it was asked for a GPU's.
            await session.close()
            raise NeverLent(f"it lends memory of {session.device or 'the host'}, which is not what was asked for")
        return grant, about, session

    async def _await_units(self, effect: RequestLease, program: NumberedProgram) -> None:
        """Prepare to take the availability of a half-filled source, whatever its layout."""
        source, layout = self._open.get((effect.key, effect.source)), effect.share.layout or ""
        table = await self._programs.table(layout)
        if source is not None:
            source.availability = await asyncio.to_thread(UnitAvailability, program, layout, table)

    def _have(self, key: ShardKey, number: int, update: AvailabilityUpdate) -> None:
        source = self._open.get((key, number))
        if source is None or source.closing:
            return
        if source.session is None:
            source.updates.append(update)
        else:
            if source.availability is not None and isinstance(update, PiecesAvailable):
                update = PiecesAvailable(source.availability.units(update.pieces))
            self._tell(AvailabilityReceived(key, number, update))

    def _begin(
        self, source: SourceConnection, work: Coroutine[None, None, None], effect: ReadBatch | ConfirmLease, what: str
    ) -> None:
        """Do something with an open source; an error that escapes is a loss of the source."""
        source.tasks.start(work, what, self._losing(effect))

    def _losing(self, effect: RequestLease | ReadBatch | ConfirmLease) -> OnFault:
        def lose(fault: Fault) -> None:
            self._lost(effect.key, effect.source, f"this agent has failed with {fault.error!r}"[:REASON_CHARS_MAX])

        return lose

    def _lost(self, key: ShardKey, number: int, reason: str) -> None:
        source = self._open.get((key, number))
        if source is not None and not source.closing:
            self._tell(SourceLost(key, number, reason))

    def post(
        self, effect: ReadBatch, segment: AnySegment, base: AnySegment | None, table: PieceTable, *, digests: bool
    ) -> None:
        """Bring a batch of pieces. `base` has the shard's old version, if that is not in the same place."""
        source = self._open.get((effect.key, effect.source))
        if source is None or source.session is None:
            return
        work: Coroutine[None, None, None]
        if source.table is not None and effect.pieces[0][0] < source.table.partials:
            memory, regions = source.table.batch_buffer(source.layout, effect.pieces)
            work = self._gathered(effect, source, source.session, memory, regions, digests=digests)
        elif source.program is not None:
            regions = source.program.regions(source.layout, effect.pieces)
            if source.table is not None:
                amax = source.table.amax(source.layout, effect.pieces)
                regions = StridedCopies(regions.to, regions.origin, regions.form, amax)
            work = self._gathered(effect, source, source.session, segment.view, regions, digests=digests)
        elif source.reader is not None and digests:
            where = BatchTarget(segment.view, None if base is None else base.view, table)
            work = self._read(effect, source, source.reader, where)
        else:
            spans = Spans.of(table, effect.pieces)
            work = self._posted(effect, source, source.session, segment, spans, digests=digests)
        self._begin(source, work, effect, "reading from a source")

    def take(self, effect: ReadBatch, descriptors: MappedDescriptors) -> None:
        """Take the memory with the pieces, so that it can be mapped: nothing has to be brought."""
        source = self._open.get((effect.key, effect.source))
        if source is None or not isinstance(source.session, MappedSession):
            return
        fds = source.session.take()
        if fds:
            descriptors.take(fds)
        self._begin(source, self._taken(effect), effect, "taking a source's memory")

    async def _taken(self, effect: ReadBatch) -> None:
        self._tell(BatchDone(effect.key, effect.source, effect.batch, b""))

    async def _posted(
        self,
        effect: ReadBatch,
        source: SourceConnection,
        session: SourceSession,
        segment: AnySegment,
        spans: Spans,
        *,
        digests: bool,
    ) -> None:
        try:
            found = await session.read(
                segment.view, spans, digests=digests, progress=lambda came: self._progressed(effect, came)
            )
        except TransportLost as why:
            self._lost(effect.key, effect.source, str(why))
        else:
            self.read_bytes[source.transport] += sum(spans.nbytes)
            self._tell(BatchDone(effect.key, effect.source, effect.batch, found))

    async def _gathered(
        self,
        effect: ReadBatch,
        source: SourceConnection,
        session: SourceSession,
        memory: MemoryRegion,
        regions: StridedCopies,
        *,
        digests: bool,
    ) -> None:
        try:
            await session.gather(memory, regions, digests=digests, progress=lambda came: self._progressed(effect, came))
        except (TensorHubError, ValueError) as why:
            # ValueError: boxes that don't fit into memory, or that no source can send.
            self._lost(effect.key, effect.source, str(why))
        else:
            self.read_bytes[source.transport] += sum(form.nbytes for form in regions.form)
            if source.table is not None and effect.pieces[0][0] < source.table.partials:
                source.table.batch_arrived(effect.source, effect.pieces, memory)
            self._tell(BatchDone(effect.key, effect.source, effect.batch, b""))

    async def _read(self, effect: ReadBatch, source: SourceConnection, reader: BatchReader, where: BatchTarget) -> None:
        try:
            brought = await reader.read(where, effect.pieces, lambda came: self._progressed(effect, came))
        except TransportLost as why:
            self._lost(effect.key, effect.source, str(why))
            return
        for each in brought.encoded:
            self.encoded_bytes[each.how] += each.nbytes
        saved = sum(each.nbytes - each.wire_bytes for each in brought.encoded)
        nbytes = sum(sum(where.table.nbytes[first : first + count]) for first, count in effect.pieces)
        self.read_bytes[source.transport] += nbytes - saved
        if source.base is not None and brought.patches:
            self._deltas.applied(effect.key, source.base, source.root, len(where.table), brought.patches)
        self._tell(BatchDone(effect.key, effect.source, effect.batch, brought.digests, brought.encoded))

    def _progressed(self, effect: ReadBatch, nbytes: int) -> None:
        self._tell(BytesReceived(effect.key, effect.source, nbytes))

    def confirm(self, effect: ConfirmLease) -> None:
        """Ask whether the lease still holds."""
        source = self._open.get((effect.key, effect.source))
        if source is None or source.session is None:
            return
        self._begin(source, self._confirmed(effect, source.session), effect, "asking a source for its word")

    async def _confirmed(self, effect: ConfirmLease, session: SourceSession) -> None:
        try:
            holds = await session.still_holds()
        except TransportLost:
            holds = False
        self._tell(LeaseConfirmed(effect.key, effect.source, holds))

    def accuse(self, effect: ReportWrongBytes) -> None:
        """Tell the source's agent that its bytes were wrong."""
        source = self._open.get((effect.key, effect.source))
        if source is not None:
            telling = self._leasing.accuse(source.effect, source.by)
            self._leaving.start(telling, "telling a source of wrong bytes", log_only)

    def close(self, effect: CloseSource) -> None:
        """Close the transport, and tell when nothing can be written any more."""
        source = self._open.get((effect.key, effect.source))
        if source is not None and not source.closing:
            source.closing = True
            source.closed = self._work.start(self._closed(effect, source), "closing a source")

    async def _closed(self, effect: CloseSource, source: SourceConnection) -> None:
        source.opening.cancel()
        await asyncio.gather(source.opening, return_exceptions=True)
        if source.held is not None:
            # Where that fails the lease ends by its time.
            self._leaving.start(source.held.let_go(), "letting go of a lease", log_only)
        if source.session is not None:
            await source.session.close()
        await source.tasks.ended()
        self._open.pop((effect.key, effect.source), None)
        if source.table is not None:
            source.table.forget(effect.source)
        self._tell(SourceClosed(effect.key, effect.source))

    async def stop(self) -> None:
        """Close everything, without telling the core."""
        self._tell = lambda _: None
        for (key, number), source in list(self._open.items()):
            self.close(CloseSource(key, number))
            if source.closed is not None:
                await asyncio.wait({source.closed})
        await self._leaving.ended()
        await self._work.close()
