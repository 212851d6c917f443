"""The agent of one GPU: brings the parts together and keeps them running until it is told to stop."""

import asyncio
import contextlib
import logging
import os
import secrets
import threading
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs

from tensorhub_agent import metrics
from tensorhub_agent.address import own_address
from tensorhub_agent.beat import BeatThread
from tensorhub_agent.cache_disk import DiskStore
from tensorhub_agent.cache_making import CopyMaker
from tensorhub_agent.cache_room import CacheRoom
from tensorhub_agent.copying import CopyPool
from tensorhub_agent.desk import Desk
from tensorhub_agent.encodings.deltas import KEPT_VERSIONS, DeltaBook
from tensorhub_agent.incarnation import Incarnation
from tensorhub_agent.job_agent import JobAgent
from tensorhub_agent.lease import LeaseMove
from tensorhub_agent.leasing import LEASE_ASK_S
from tensorhub_agent.limits import Limits
from tensorhub_agent.measured import Measured
from tensorhub_agent.refused import REFUSED, Kind
from tensorhub_agent.segments import SegmentStore
from tensorhub_agent.served import summed
from tensorhub_agent.shelf import Shelves
from tensorhub_agent.surroundings import Surroundings
from tensorhub_agent.transport import LeaseOpened, Refused
from tensorhub_agent.transport_local import LocalTransport
from tensorhub_agent.transport_ucxx import UcxxTransport
from tensorhub_agent.transports import Transports
from tensorhub_agent.ucxx_serving import Book
from tensorhub_agent.workers import WorkerServer
from tensorhub_common.bus.activity import answer_activity
from tensorhub_common.bus.blobs import Blobs
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.pings import answer_pings
from tensorhub_common.bus.traces import answer_traces
from tensorhub_common.counterpart import Counterpart
from tensorhub_common.errors import AgentUnavailable, BadCommand, MemoryExhausted, RegistryUnavailable, TensorHubError
from tensorhub_common.malformed import MALFORMED
from tensorhub_common.service_manager import serving
from tensorhub_common.settings import Settings
from tensorhub_common.subjects import agent_asks
from tensorhub_common.wire.asks import Activity, Serving
from tensorhub_common.wire.commands import PROTOCOL
from tensorhub_common.wire.transfer import DigestsAsk, DigestsPage, LeaseAnswer, LeaseAsk, LeaseRefusal
from tensorhub_common.wire.worker import Attached

CONNECT_AGAIN_S: Final = 0.2
TURN_S: Final = 0.25
"""How often the main loop tells the beat that it turns."""

FAULT_END_S_MAX: Final = 5.0
"""After a fault the process has so long for an orderly end; then it ends as it is, and nothing more can be written."""

LEASE_ASKS_MAX: Final = 2048
"""So many questions for leases are answered at a time. Most of these wait until a shard begins to be filled."""

JOBS_MAX: Final = 100
"""One agent serves at most so many jobs."""

_log: Final = logging.getLogger(__name__)


class AgentService:
    """One agent process."""

    def __init__(self, settings: Settings) -> None:
        """Take the settings; `run` does the rest."""
        self._settings = settings
        self.agent = settings.agent_id
        self._jobs: dict[str, JobAgent] = {}
        self._ending = asyncio.Event()
        self._rejoining = False
        self._fault: TensorHubError | None = None

    def end(self) -> None:
        """Let `run` return soon."""
        self._ending.set()

    async def run(self) -> None:
        """Serve until `end` is called."""
        settings = self._settings
        bus = await self._connect()
        pool = CopyPool(settings.copy_threads)
        beat = BeatThread(settings, self.serving)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(bus.close)
            stack.callback(pool.close)
            stack.callback(beat.stop)
            around, shelves = self._surroundings(bus, pool, beat)
            stack.callback(shelves.close)
            desk = Desk(self._job, self._attached)
            around.tell_holds = lambda number, _job, key, version: desk.holds(number, key, version)
            self._around = around
            await around.transports.start()
            stack.push_async_callback(around.transports.stop)
            stack.push_async_callback(self._stop_jobs)
            around.incarnation.next()
            for job, adopted in (await shelves.adopt(pool, JOBS_MAX)).items():
                self._open(job).adopt(adopted)
            for job_agent in self._jobs.values():
                job_agent.start()
            await bus.serve(
                agent_asks(self.agent, "lease"),
                self._on_lease_ask,
                concurrent_max=LEASE_ASKS_MAX,
                pending_max=LEASE_ASKS_MAX,
                age_s_max=LEASE_ASK_S,
            )
            await bus.serve(agent_asks(self.agent, "digests"), self._on_digests_ask)
            workers = WorkerServer(settings.socket, desk)
            workers.start()
            stack.push_async_callback(workers.stop)
            metrics.watch(self._jobs, shelves.store, shelves.disk, workers, around.transports, around.deltas)
            beat.start()
            await answer_traces(bus, self.agent)
            await answer_activity(bus, self.agent, "agent", self.activity)
            await answer_pings(bus, self.agent, "agent")
            _log.info("agent %s serves workers at %s", self.agent, settings.socket)
            async with serving(f"agent {self.agent} serves workers at {settings.socket}"):
                await self._turn(beat)
        if self._fault is not None:
            raise self._fault

    async def _connect(self) -> Bus:
        settings = self._settings
        if settings.nats is None:
            raise RegistryUnavailable("an agent needs TENSORHUB_NATS, for example nats://127.0.0.1:4222")
        while True:
            try:
                return await connect(settings.nats, name=self.agent, credentials=settings.credentials, tls=settings.tls)
            except RegistryUnavailable as why:
                _log.warning("%s", why)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CONNECT_AGAIN_S):
                        await self._ending.wait()
                        raise

    def _surroundings(self, bus: Bus, pool: CopyPool, beat: BeatThread) -> tuple[Surroundings, Shelves]:
        settings = self._settings
        store = SegmentStore.of(settings.shm_dir, settings.dir, self.agent, settings.memory_bytes_max)
        shelves = Shelves(store, DiskStore.in_state(settings.state_dir, settings.cache_disk_bytes))
        room, blobs = CacheRoom(settings.cache_bytes, settings.cache_disk_bytes), Blobs(bus)
        limits = Limits(
            digests=settings.digests,
            window_bytes=settings.window_bytes,
            stall_s=settings.stall_s,
            sources_lost_s=settings.sources_lost_s,
            refill_drain_s=settings.refill_drain_s,
            cache_bytes=room.total_bytes,
            encodings=settings.encodings,
            deltas=settings.deltas,
        )

        def joined(incarnation: int) -> None:
            beat.incarnation = incarnation
            around.incarnation.accepted()

        around = Surroundings(
            agent=self.agent,
            host=settings.host,
            site=settings.site,
            rack=settings.rack,
            bus=bus,
            blobs=blobs,
            pool=pool,
            transports=self._transports(pool),
            limits=limits,
            measured=Measured(),
            incarnation=Incarnation(settings.state_dir),
            shelves=shelves,
            deltas=DeltaBook(settings.deltas or KEPT_VERSIONS, settings.delta_bytes),
            copies=CopyMaker(shelves, blobs, room),
            planner=Counterpart("the planner"),
            joined=joined,
            tell_holds=lambda *_: None,
            fenced=self._on_fenced,
            fault=self._on_fault,
        )
        return around, shelves

    def _transports(self, pool: CopyPool) -> Transports:
        settings = self._settings
        book = Book(redeem=self.redeem, renew=self.renew, holds=self.holds, ended=self.ended)
        local = LocalTransport(
            socket=settings.socket.with_suffix(".peers"),
            agent=self.agent,
            pool=pool,
            redeem=self.redeem,
            renew=self.renew,
            holds=self.holds,
            ended=self.ended,
            on_fault=lambda fault: self._on_fault(str(fault)),
        )
        if not settings.ucxx:
            return Transports(local, None)
        address = own_address(settings.address, str(settings.nats))
        return Transports(
            local, UcxxTransport(address=address, agent=self.agent, pool=pool, book=book, fault=self._on_fault)
        )

    async def _turn(self, beat: BeatThread) -> None:
        while not self._ending.is_set():
            beat.turned()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TURN_S):
                    await self._ending.wait()

    def _on_fenced(self) -> None:
        self._fault = AgentUnavailable(
            f"another process joined as agent {self.agent!r}: give each agent a TENSORHUB_AGENT_ID of its own"
        )
        self._ending.set()

    def _on_fault(self, why: str) -> None:
        self._fault = TensorHubError(f"{why}; it ends, and takes its segments back when it is started again")
        self._ending.set()
        # Whatever has failed may be what an orderly end waits for.
        end = threading.Timer(FAULT_END_S_MAX, os._exit, (os.EX_SOFTWARE,))
        end.daemon = True
        end.start()

    # Jobs.

    async def _job(self, name: str) -> JobAgent:
        await self._forget_deleted()
        job = self._jobs.get(name)
        if job is None:
            job = self._open(name)
            job.start()
        return job

    async def _forget_deleted(self) -> None:
        """Make room for others, and for a job of the same name that begins anew."""
        for name, job in [(name, job) for name, job in self._jobs.items() if job.core.is_over]:
            del self._jobs[name]
            await job.stop()

    def _open(self, name: str) -> JobAgent:
        if len(self._jobs) >= JOBS_MAX:
            raise MemoryExhausted(f"agent {self.agent!r} serves {JOBS_MAX} jobs already, which is the limit")
        job = self._jobs[name] = JobAgent(name, self._around, self._rejoin_all)
        return job

    def _rejoin_all(self) -> None:
        """One job's log does not know this incarnation any more: there is one for all jobs, so all join again."""
        if not self._rejoining:
            # Several refusals may have come at once; they all speak of the same incarnation.
            self._rejoining = True
            asyncio.get_running_loop().call_soon(self._do_rejoin_all)

    def _do_rejoin_all(self) -> None:
        self._rejoining = False
        number = self._around.incarnation.next()
        for job in self._jobs.values():
            job.rejoin(number)

    async def _stop_jobs(self) -> None:
        for job in self._jobs.values():
            await job.stop()

    def _attached(self) -> Attached:
        settings = self._settings
        return Attached(
            protocol=PROTOCOL,
            agent=self.agent,
            incarnation=self._around.incarnation.number,
            nats=str(settings.nats),
            credentials=_absolute(settings.worker_credentials),
            ca=_absolute(settings.nats_ca),
        )

    # Leases.

    async def _on_lease_ask(self, message: Message) -> bytes:
        try:
            ask = msgspec.msgpack.decode(message.data, type=LeaseAsk)
        except MALFORMED as why:
            raise BadCommand(f"the question for a lease could not be read: {why}") from None
        # NATS lets each agent ask under its own id alone, so here it is known who will get the ticket.
        if ask.reader.agent != (asker := message.subject.rpartition(".")[2]):
            raise BadCommand(f"agent {asker!r} asked for a lease in the name of {ask.reader.agent!r}: ask in your own")
        job = self._jobs.get(ask.job)
        answer: LeaseAnswer = LeaseRefusal(reason=f"agent {self.agent!r} serves nothing of job {ask.job!r}")
        if job is not None:
            name = f"{ask.job}:{secrets.token_hex(8)}"
            answer = await job.lending.asked(ask, name, f"{ask.job}:{secrets.token_urlsafe(24)}", message.headers)
        return msgspec.msgpack.encode(answer)

    async def _on_digests_ask(self, message: Message) -> bytes:
        try:
            ask = msgspec.msgpack.decode(message.data, type=DigestsAsk)
        except MALFORMED as why:
            raise BadCommand(f"the question for digests could not be read: {why}") from None
        job = self._jobs.get(_job_of(ask.lease))
        page = DigestsPage(digests=b"")
        if job is not None:
            table, is_coming = job.core.table, job.lending.look_for_patches(ask.lease)
            page = DigestsPage(
                digests=table.page(ask.lease, ask.first),
                patch_sizes=table.patch_sizes(ask.lease, ask.first),
                patches_coming=is_coming,
            )
        return msgspec.msgpack.encode(page)

    def activity(self, job: str, about: Activity) -> Activity:
        """Add what this agent reads in a job."""
        found = self._jobs.get(job)
        reads, left_out = ((), 0) if found is None else found.reads_under_way()
        silent_s = self._around.planner.silent_s
        return structs.replace(about, reads=reads, reads_left_out=left_out, planner_silent_s=silent_s)

    def redeem(self, ticket: str, reader: str) -> LeaseOpened | Refused:
        """Take a ticket that a reader showed to the transport."""
        job = self._jobs.get(_job_of(ticket))
        opened = job.lending.redeem(ticket, reader) if job is not None else None
        if opened is not None:
            return opened
        REFUSED.note(Kind.TICKET, f"a ticket that {reader!r:.80} showed is unknown, used, too old or another reader's")
        return Refused("the ticket is unknown, used, too old or another reader's: ask for a lease anew")

    def renew(self, lease: str) -> bool:
        """Note that a reader is alive; tells whether it waits for pieces."""
        job = self._jobs.get(_job_of(lease))
        if job is None:
            return False
        job.core.table.renew(lease, asyncio.get_running_loop().time())
        return job.core.table.waits(lease)

    def holds(self, lease: str) -> bool:
        """Tell whether a lease has held up to now."""
        job = self._jobs.get(_job_of(lease))
        return job is not None and job.core.table.holds(lease)

    def serving(self) -> tuple[Serving, ...]:
        """Say who reads from this agent. It is called from the beat's thread, so it only reads."""
        return summed(reader for job in list(self._jobs.values()) for reader in job.core.table.readers())

    def ended(self, lease: str, done: bool) -> None:  # noqa: FBT001 (the transport's word)
        """Note that a reader is done, or gone."""
        job = self._jobs.get(_job_of(lease))
        if job is not None:
            job.lending.ended(lease, LeaseMove.DONE if done else LeaseMove.READER_GONE)


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _job_of(name: str) -> str:
    """Lease names and tickets begin with their job's name, which has no colon in it."""
    return name.partition(":")[0]
