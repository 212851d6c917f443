"""A registry: joins the election, folds every job's log, and while it leads speaks the outcomes of all of them.

Here the pure cores meet the world: the lease and the connection drive `Leader`, beats and folded events drive
`Liveness`, and what they say is carried out at once. Several registries may run; all fold, one speaks.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Final

import msgspec

from tensorhub_common import subjects, telemetry
from tensorhub_common.bus import joblog
from tensorhub_common.bus.blobs import Blobs
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.failures import NoAnswer, NoBus, NoResponder, StreamFailure
from tensorhub_common.bus.lease import LeaderLease
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.pings import answer_pings
from tensorhub_common.errors import RegistryUnavailable, VersionUnavailable, gone
from tensorhub_common.machine import Tick
from tensorhub_common.malformed import MALFORMED
from tensorhub_common.service_manager import serving
from tensorhub_common.settings import Settings
from tensorhub_common.wire.asks import Beat
from tensorhub_registry import leader, liveness
from tensorhub_registry.deleting import too_many
from tensorhub_registry.expiring import Expiring
from tensorhub_registry.job import Job
from tensorhub_registry.questions import READY_WAIT_S_MAX, Questions

LEASE_KEY: Final = "registry"

DISCOVER_S: Final = 5.0
"""How often a registry looks for jobs that others opened or deleted, and for logs that are nearly full."""
DISCOVER_AGAIN_S: Final = 0.2
"""The same, where NATS gave no answer."""

FIRST_LEASE_WAIT_S: Final = 1.0
"""A registry says that it is ready once it leads, or once it has become clear that another one does."""

_NO_ANSWER: Final = (NoBus, NoAnswer, NoResponder, StreamFailure)

_log: Final = telemetry.logger(__name__)


class Registry:
    """One registry on one connection: `run`, and then `close`."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self.id = settings.registry_id
        self.jobs: dict[str, Job] = {}
        self._bus = bus
        self._leader = leader.Leader()
        self._liveness = liveness.Liveness(settings.lost_after_s)
        self._expiring = Expiring(self.jobs)
        self._replicas = settings.log_replicas
        self._lease = LeaderLease(
            bus, LEASE_KEY, self.id, settings.leader_ttl_s, replicas=self._replicas, on_change=self._on_lease
        )
        self._questions = Questions(bus, self.id, self._find, self._open, self._forget, lambda: self._lease.held)
        self._timer: asyncio.TimerHandle | None = None
        self._asking = asyncio.Event()

    # ------------------------------------------------------------------------------------------- from outside

    async def run(self) -> None:
        """Fold all jobs, ask for the lease, say that this registry is ready, and go on until cancelled."""
        self._bus.watch(self._on_connection)
        await self._bus.subscribe(subjects.beats(), self._on_beat)
        self._on_connection(self._bus.is_connected)
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._discover_always(), name="discover")
            tasks.create_task(self._subscribe_while_leading(), name="questions")
            tasks.create_task(self._expiring.append_all(), name="expiring")
            await self._lease.start()
            await self._lease.wait(held=True, timeout_s=FIRST_LEASE_WAIT_S)
            await answer_pings(self._bus, self.id, "registry")
            await stack.enter_async_context(serving(f"registry {self.id} serves"))
            _log.info("ready", leads=self._leader.leads, jobs=len(self.jobs))

    @property
    def leads(self) -> bool:
        """Whether this registry is the one that speaks."""
        return self._leader.leads

    async def close(self) -> None:
        """Stop speaking, give the lease back so that another may speak at once, and end."""
        self._obey(leader.Resigned())
        await self._lease.close()
        await self._questions.unsubscribe()
        if self._timer is not None:
            self._timer.cancel()
        for job in self.jobs.values():
            await job.close()

    # ------------------------------------------------------------------------------------------- leading

    def _on_lease(self, held: bool) -> None:  # noqa: FBT001 (the lease calls it so)
        self._obey(leader.Won(self._lease.term) if held else leader.Lost())

    def _on_connection(self, connected: bool) -> None:  # noqa: FBT001 (the bus calls it so)
        self._obey(leader.Connected() if connected else leader.Disconnected())

    def _obey(self, event: leader.Input) -> None:
        """Carry out what follows from a change of the lease or of the connection."""
        for effect in self._leader.handle(event, time.monotonic()):
            match effect:
                case leader.Lead(term):
                    _log.info("leads", term=term)
                    for job in self.jobs.values():
                        job.lead(term)
                case leader.StandDown(term):
                    _log.info("stands down", term=term)
                    for job in self.jobs.values():
                        job.stand_down()
                case leader.Listening(term):
                    self._hear(liveness.Listening(term))
                case leader.Deaf():
                    self._hear(liveness.Deaf())
        self._asking.set()

    async def _subscribe_while_leading(self) -> None:
        while True:
            await self._asking.wait()
            self._asking.clear()
            if self._leader.leads:
                await self._questions.subscribe()
            else:
                await self._questions.unsubscribe()

    # ------------------------------------------------------------------------------------------- agents

    def _on_beat(self, message: Message) -> None:
        try:
            beat = msgspec.json.decode(message.data, type=Beat)
        except MALFORMED:
            return
        # Whoever may publish on this subject is this agent, and speaks for no other.
        if message.subject.rpartition(".")[2] == beat.agent:
            self._hear(beat)

    def _hear(self, event: liveness.Input) -> None:
        self._expiring.say(self._liveness.handle(event, time.monotonic()))
        deadline = self._liveness.deadline()
        if self._timer is None and deadline is not None:
            # A timer that stands is left alone: beats only move deadlines away, and an early tick does nothing.
            wait_s = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._hear(Tick())

    # ------------------------------------------------------------------------------------------- jobs

    async def _discover_always(self) -> None:
        while True:
            wait_s = DISCOVER_S
            try:
                await self._discover()
            except _NO_ANSWER as why:
                wait_s = DISCOVER_AGAIN_S
                _log.debug("the jobs could not be listed", why=str(why))
            await asyncio.sleep(wait_s)

    async def _discover(self) -> None:
        """Begin with jobs that others opened, forget stopped ones whose log is gone, and look for full logs."""
        found = set(await joblog.jobs(self._bus))
        for job in [job for job in self.jobs.values() if job.has_ended]:
            # A deleted job's name may stand for another log by now.
            if job.is_deleted or job.name not in found:
                await self._remove(job)
        for name in sorted(found):
            self._add(name)
        for job in list(self.jobs.values()):
            await job.look_for_room()
        if self._leader.leads:
            tombstones = [(job.fold.catalog.deleted_at, job.name) for job in self.jobs.values() if job.is_deleted]
            for name in too_many(tombstones, time.time()):
                await self._forget(self.jobs[name])

    def _add(self, name: str) -> Job:
        known = self.jobs.get(name)
        if known is not None:
            return known
        job = self.jobs[name] = Job(self._bus, name, self.id, self._hear, self._replicas)
        job.start()
        if self._leader.leads:
            job.lead(self._leader.term)
        return job

    async def _remove(self, job: Job) -> None:
        if self.jobs.get(job.name) is not job:
            # Two that look for jobs at the same time have both found it at its end.
            return
        del self.jobs[job.name]
        self._hear(liveness.Forget(job.name))
        await job.close()

    async def _open(self, name: str) -> Job:
        """Make the job's log and blob store, if they are not there, and fold the log."""
        subjects.check_job(name)
        if name in self.jobs and self.jobs[name].has_ended:
            await self._discover()
        job = self.jobs.get(name)
        if job is not None and job.failure is not None:
            raise RegistryUnavailable(f"job {name!r} is stopped, since {job.failure}")
        if job is not None and job.is_deleted:
            raise gone(name)
        await Blobs(self._bus).open(name, self._replicas)
        await joblog.open_job(self._bus, name, self._replicas)
        return self._add(name)

    async def _forget(self, job: Job) -> None:
        """Remove what is left of a deleted job. Its name is free from then on."""
        if await job.is_ready(READY_WAIT_S_MAX) and job.is_deleted:
            await self._remove(job)
            await job.remove()

    async def _find(self, name: str) -> Job:
        job = self.jobs.get(name)
        if job is None or job.has_ended:
            # Perhaps it was opened by another registry a moment ago.
            await self._discover()
            job = self.jobs.get(name)
        if job is None:
            raise VersionUnavailable(f"there is no job {name!r}: connect to it with the SDK, or ask `open` for it")
        return job
