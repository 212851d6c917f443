"""The agent of one GPU: brings the parts together and keeps them running until it is told to stop."""

import asyncio
import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Final

from msgspec import structs

from tensorhub_agent.app import metrics
from tensorhub_agent.app.address import own_address
from tensorhub_agent.app.lease_router import LeaseRouter
from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.control.heartbeat import HeartbeatThread
from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.jobs.context import AgentContext
from tensorhub_agent.jobs.driver import JobDriver
from tensorhub_agent.jobs.read_counts import ReadCounts
from tensorhub_agent.jobs.worker_server import WorkerServer
from tensorhub_agent.jobs.worker_session import WorkerSessions
from tensorhub_agent.leases.delta_store import KEPT_VERSIONS, DeltaStore
from tensorhub_agent.observability.registry_watch import RegistryWatch
from tensorhub_agent.rates.link_rates import LinkRates
from tensorhub_agent.runtime.troubles import TROUBLES
from tensorhub_agent.sources.source_watch import SourceWatch
from tensorhub_agent.storage.copy_allocator import CopyAllocator
from tensorhub_agent.storage.device_segments import DeviceStores
from tensorhub_agent.storage.disk_segments import DiskSegmentStore
from tensorhub_agent.storage.incarnation import IncarnationCounter
from tensorhub_agent.storage.segments import SegmentStore
from tensorhub_agent.storage.shard_store import CopyQuota, ShardStores
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_agent.transports.local.transport import LocalTransport
from tensorhub_agent.transports.registry import TransportRegistry
from tensorhub_agent.transports.ucxx.transport import UcxxTransport
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import AgentUnavailable, MemoryExhausted, RegistryUnavailable, TensorHubError
from tensorhub_common.introspection.activity import answer_activity
from tensorhub_common.introspection.ping import answer_pings
from tensorhub_common.introspection.span_answers import answer_traces
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.protocol.activity import Activity, Problem
from tensorhub_common.protocol.handshake import OLDEST_PROTOCOL
from tensorhub_common.protocol.log.commands import PROTOCOL
from tensorhub_common.protocol.worker import Attached
from tensorhub_common.runtime.peer_status import PeerStatus
from tensorhub_common.runtime.release import release
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_common.service.systemd import serving

CONNECT_AGAIN_S: Final = 0.2
LOOK_S: Final = 1.0
"""How often reads and commands under way are looked at for being late."""

TURN_S: Final = 0.25
"""How often the main loop tells the beat that it turns."""

FAILED: Final = 1
"""The exit code of an agent that ends by itself: its supervisor starts it anew."""

FAULT_END_S_MAX: Final = 5.0
"""After a fault the process has so long for an orderly end; then it ends as it is, and nothing more can be written."""

JOBS_MAX: Final = 100
"""The most jobs that one agent serves."""

_log: Final = logging.getLogger(__name__)


class AgentService:
    """One agent process."""

    def __init__(self, settings: Settings) -> None:
        """Take the settings; `run` does the rest."""
        self._settings = settings
        self.agent = settings.agent_id
        self._jobs: dict[str, JobDriver] = {}
        self._leases = LeaseRouter(self.agent, self._jobs)
        self._ending = asyncio.Event()
        self._rejoining = False
        self._fault: TensorHubError | None = None
        self._work = Supervisor(f"agent {self.agent}")
        self._aside: dict[str, tuple[str, float]] = {}
        """Jobs that were set aside: why, and when."""
        self._desk: WorkerSessions
        self._began = time.time()
        self._look_at = 0.0

    def end(self) -> None:
        """Let `run` return soon."""
        self._ending.set()

    async def run(self) -> None:
        """Serve until `end` is called."""
        settings = self._settings
        bus = await self._connect()
        pool = CopyPool(settings.copy_threads)
        beat = HeartbeatThread(settings)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(bus.close)
            stack.callback(pool.close)
            stack.callback(beat.stop)
            around, stores = self._surroundings(bus, pool, beat)
            stack.callback(stores.close)
            desk = self._desk = WorkerSessions(self._job, self._attached)
            around.tell_holds = lambda number, _job, key, version, trouble: desk.holds(number, key, version, trouble)
            self._around = around
            await around.transports.start()
            stack.push_async_callback(around.transports.stop)
            stack.push_async_callback(self._stop_jobs)
            around.incarnation.next()
            for job, adopted in (await stores.adopt(pool, JOBS_MAX)).items():
                job_agent = self._open(job)
                with job_agent.isolated("taking back its memory"):
                    job_agent.adopt(adopted)
            for job_agent in list(self._jobs.values()):
                job_agent.start()
            await self._leases.serve(bus)
            workers = WorkerServer(settings.socket, desk)
            workers.start()
            stack.push_async_callback(workers.stop)
            metrics.watch(self._jobs, around.reads, stores, workers, around.transports, around.deltas)
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

    def _surroundings(self, bus: Bus, pool: CopyPool, beat: HeartbeatThread) -> tuple[AgentContext, ShardStores]:
        settings = self._settings
        store = SegmentStore.of(settings.shm_dir, settings.dir, self.agent, settings.memory_bytes_max)
        devices = DeviceStores(store.prefix, settings.device_bytes_max)
        disk = DiskSegmentStore.in_state(settings.state_dir, settings.cache_disk_bytes)
        stores = ShardStores(store, disk, devices)
        room, blobs = CopyQuota(settings.cache_bytes, settings.cache_disk_bytes), BlobStore(bus)
        config = CoreConfig(
            digests=settings.digests,
            transfer=TransferLimits(
                window_bytes=settings.window_bytes,
                stall_s=settings.stall_s,
                sources_lost_s=settings.sources_lost_s,
            ),
            slow_read_s=settings.slow_read_s,
            refill_drain_s=settings.refill_drain_s,
            cache_bytes=room.total_bytes,
            encodings=settings.encodings,
            deltas=settings.deltas,
        )

        def joined(incarnation: int) -> None:
            beat.incarnation = incarnation
            around.incarnation.accepted()

        around = AgentContext(
            agent=self.agent,
            host=settings.host,
            site=settings.site,
            rack=settings.rack,
            bus=bus,
            blobs=blobs,
            pool=pool,
            transports=self._transports(pool),
            config=config,
            measured=LinkRates(),
            incarnation=IncarnationCounter(settings.state_dir),
            stores=stores,
            deltas=DeltaStore(settings.deltas or KEPT_VERSIONS, settings.delta_bytes),
            copies=CopyAllocator(stores, blobs, room),
            planner=PeerStatus("the planner"),
            registry=RegistryWatch(),
            sources=SourceWatch(),
            reads=ReadCounts(),
            joined=joined,
            tell_holds=lambda *_: None,
            fenced=self._on_fenced,
            fault=self.fault,
            set_aside=self._set_aside,
        )
        return around, stores

    def _transports(self, pool: CopyPool) -> TransportRegistry:
        settings = self._settings
        local = LocalTransport(
            socket=settings.socket.with_suffix(".peers"),
            agent=self.agent,
            pool=pool,
            leases=self._leases,
            on_fault=lambda fault: self.fault(str(fault)),
        )
        if not settings.ucxx:
            return TransportRegistry(local, None)
        address = own_address(settings.address, str(settings.nats))
        return TransportRegistry(
            local, UcxxTransport(address=address, agent=self.agent, pool=pool, leases=self._leases, fault=self.fault)
        )

    async def _turn(self, beat: HeartbeatThread) -> None:
        while not self._ending.is_set():
            beat.turned(self._leases.readers())
            self._leave_what_is_aside()
            self._look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TURN_S):
                    await self._ending.wait()

    def _look(self) -> None:
        """Tell in the log, about once a second, what has begun to be late."""
        now = asyncio.get_running_loop().time()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for job in list(self._jobs.values()):
            job.look()
        line = self._around.registry.look(now, self._around.bus.connected_since)
        if line is not None:
            _log.warning("%s", line)

    def _on_fenced(self) -> None:
        self._fault = AgentUnavailable(
            f"another process joined as agent {self.agent!r}: give each agent a TENSORHUB_AGENT_ID of its own"
        )
        self._ending.set()

    def fault(self, why: str) -> None:
        """End with an error, within a bound: something has failed that no job owns, or that nothing can go on without.

        The next process takes its memory back.
        """
        if self._fault is not None:
            return
        self._fault = TensorHubError(
            f"{why}. This is a fault of TensorHub: the agent ends, and takes its segments back when it is started again"
        )
        _log.error("%s", self._fault)
        self._ending.set()
        # Whatever has failed may be what an orderly end waits for.
        end = threading.Timer(FAULT_END_S_MAX, os._exit, (FAILED,))
        end.daemon = True
        end.start()

    def _set_aside(self, job: JobDriver) -> None:
        """Serve the others: end what the job has under way, and keep its memory as it is for the next process."""
        self._jobs.pop(job.job, None)
        why = job.set_aside_reason or "it failed"
        self._aside[job.job] = why, time.time()
        for lease in job.core.lease_names():
            self._around.transports.break_lease(lease, "its job was set aside by the agent that it is of")
        # Until this has come to its end bytes may still arrive, so a fault in it ends the process.
        self._work.start(self._end_of(job), f"ending job {job.job}")

    async def _end_of(self, job: JobDriver) -> None:
        await job.end_aside()
        await self._desk.end(job)

    def _leave_what_is_aside(self) -> None:
        """End where nothing is left but what was set aside: the next process takes that back, at no cost."""
        if self._aside and not any(job.core.shards for job in self._jobs.values()):
            why, _ = next(iter(self._aside.values()))
            self.fault(f"{why}. No other job has anything here")

    # Jobs.

    async def _job(self, name: str) -> JobDriver:
        await self._forget_deleted()
        if name in self._aside:
            why, _ = self._aside[name]
            raise AgentUnavailable(why)
        job = self._jobs.get(name)
        if job is None:
            job = self._open(name)
            job.start()
        return job

    async def _forget_deleted(self) -> None:
        """Make room for others, and for a job of the same name that begins anew."""
        for name, job in [(name, job) for name, job in self._jobs.items() if job.core.is_over]:
            # Another who attaches may have come first while this one waited.
            if self._jobs.get(name) is job:
                del self._jobs[name]
                await job.stop()

    def _open(self, name: str) -> JobDriver:
        if len(self._jobs) >= JOBS_MAX:
            raise MemoryExhausted(f"agent {self.agent!r} serves {JOBS_MAX} jobs already, which is the limit")
        job = self._jobs[name] = JobDriver(name, self._around, self._rejoin_all)
        return job

    def _rejoin_all(self) -> None:
        """One job's log does not know this incarnation any more: there is one for all jobs, so all join again."""
        if not self._rejoining:
            # Several refusals may have come at once; they all speak of the same incarnation.
            self._rejoining = True
            self._work.call_soon(self._do_rejoin_all, what="joining anew")

    def _do_rejoin_all(self) -> None:
        self._rejoining = False
        number = self._around.incarnation.next()
        for job in list(self._jobs.values()):
            job.rejoin(number)

    async def _stop_jobs(self) -> None:
        for job in list(self._jobs.values()):
            await job.stop()
        await self._work.close()
        await self._around.stores.files.idle()

    def _attached(self) -> Attached:
        settings = self._settings
        return Attached(
            protocol=OLDEST_PROTOCOL,
            newest=PROTOCOL,
            release=release(),
            agent=self.agent,
            incarnation=self._around.incarnation.number,
            nats=str(settings.nats),
            credentials=_absolute(settings.worker_credentials),
            ca=_absolute(settings.nats_ca),
            takes_copied=True,
            takes_handed_back=True,
        )

    def activity(self, job: str, about: Activity) -> Activity:
        """Add what this agent reads in a job, and what it can't do."""
        found = self._jobs.get(job)
        reads, left_out = ((), 0) if found is None else found.reads_under_way()
        silent_s = self._around.planner.silent_s
        return structs.replace(
            about, reads=reads, reads_left_out=left_out, planner_silent_s=silent_s, troubles=self._troubles()
        )

    def _troubles(self) -> tuple[Problem, ...]:
        aside = [
            Problem(kind="job-set-aside", why=why, since=since, job=job) for job, (why, since) in self._aside.items()
        ]
        for job, shards, why in self._around.stores.set_aside():
            said = f"{shards} shards are in memory here and could not be taken back when the agent started: {why}"
            aside.append(Problem(kind="shards-set-aside", why=said, since=self._began, job=job))
        return (*aside, *TROUBLES.told())


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
