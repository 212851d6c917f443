"""A registry: joins the election, folds every job's log, and publishes all outcomes while it leads.

It drives the pure cores: the lease and the connection are inputs of `Election`, beats and folded events are inputs of
`Liveness`, and their outputs are carried out at once. Several registries may run. All fold, and one publishes.

Invariants:
- A job that can't go on is set aside and tried again. No question, entry or publication of one job waits for another
  job's stream.
- An error that escapes anywhere else ends the process, which is started again. The log has all that it knew.
"""

import asyncio
import time
from collections.abc import Collection
from contextlib import AsyncExitStack
from itertools import count
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import UNCERTAIN, LogFull, StreamFailure, StreamMismatch
from tensorhub_common.bus.message import Message
from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import TensorHubError, VersionUnavailable, gone
from tensorhub_common.introspection.ping import answer_follower_survey, answer_pings
from tensorhub_common.jetstream import job_log
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.jetstream.leader_lease import LeaderLease
from tensorhub_common.jetstream.payload_store import PayloadStore
from tensorhub_common.jetstream.rollout_log import open_rollout_log
from tensorhub_common.log_follower.job_list import JobList
from tensorhub_common.log_follower.set_aside import RetryLimits, SetAside, set_aside
from tensorhub_common.machine import Tick
from tensorhub_common.observability import logs
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.heartbeat import Heartbeat
from tensorhub_common.protocol.queries import HEALTH_JOBS_MAX, Health, JobHealth, JobState
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_common.service.systemd import serving
from tensorhub_registry.app.release_survey import ROLE, ReleaseSurvey
from tensorhub_registry.core import election, liveness
from tensorhub_registry.core.job_health import JobFailure, health_of
from tensorhub_registry.core.liveness import LostAgentLog
from tensorhub_registry.jobs.deletion import expired_tombstones
from tensorhub_registry.jobs.job import Job
from tensorhub_registry.queries.server import READY_WAIT_S_MAX, QueryServer

LEASE_KEY: Final = "registry"
LIST_AGAIN_S: Final = 0.2
"""The pause before jobs are listed again, after NATS gave no answer."""

RETRY: Final = RetryLimits(first_s=5.0, max_s=600.0)
"""When a job that was set aside is tried again. The longest wait: a job that fails at each try costs the others two
seconds of folding in ten minutes at most."""

TRY_S_MAX: Final = 30.0
"""A job that was set aside is given this time to get further before the next one is tried."""

GIVE_WAY_LOOK_S: Final = 1.0
"""How often a leader looks for a newer registry that can lead jobs which this release can't fold."""

GIVE_WAY_TTLS: Final = 2
"""A registry that gave its lease to a newer one asks for it again after this many times the length of a lease."""

GIVE_WAY_AGAIN_S: Final = 60.0
"""It gives it away again after this at the earliest, should no other one have taken it."""

FIRST_LEASE_WAIT_S: Final = 1.0
"""A registry says that it is ready once it leads, or once it has become clear that another one does."""

_log: Final = logs.logger(__name__)


class Registry:
    """One registry on one connection: `run`, and then `close`."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self.id = settings.registry_id
        self.jobs: dict[str, Job] = {}
        self._bus = bus
        self._work = Supervisor(f"registry {self.id!r}")
        self._leader = election.Election()
        self._liveness = liveness.Liveness(settings.lost_after_s)
        self._lost_agents = LostAgentLog()
        self._numbers = count(1)
        self._replicas = settings.log_replicas
        self._lease = LeaderLease(
            bus,
            LEASE_KEY,
            self.id,
            settings.leader_ttl_s,
            replicas=self._replicas,
            on_change=self._work.guarded(self._on_lease, "a change of the lease"),
        )
        self._folders = ReleaseSurvey(bus, settings.new_job_level)
        self._questions = QueryServer(bus, self.id, self, lambda: self._lease.held, self._folders.behind)
        self._timer: asyncio.TimerHandle | None = None
        self._asking = asyncio.Event()
        self._aside: dict[str, SetAside] = {}
        """The jobs that were set aside, until they are gone: one that fails at the same place again waits longer."""
        self._due: asyncio.Queue[Job] = asyncio.Queue()
        """Those that are to be tried again, each once, so there are no more of them than jobs."""
        self._raised: set[str] = set()
        """Those of the jobs that were raised to a level which this release can't fold; a level never goes down."""
        self._giving_way: asyncio.Task[None] | None = None
        self._job_list = JobList(bus, self._work, self._reconcile, LIST_AGAIN_S, UNCERTAIN)
        self._without_rollouts: set[str] = set()
        """Jobs for whose rollouts NATS made no streams, so that it is told once."""
        self._forgetting: set[str] = set()
        """Jobs whose streams are being deleted."""
        self._forgotten: dict[str, float] = {}
        """The end of that in the loop's time: a list of all jobs that was requested before it may still name them."""

    # ------------------------------------------------------------------------------------------- from outside

    async def run(self) -> None:
        """Fold all jobs, ask for the lease, answer pings, and go on until cancelled."""
        on_connection = self._work.guarded(self._on_connection, "a change of the connection")
        self._bus.watch(on_connection)
        await self._bus.subscribe(subjects.beats(), self._work.guarded(self._on_beat, "a beat"))
        on_connection(self._bus.is_connected)
        await answer_follower_survey(self._bus, self.id, ROLE)
        async with AsyncExitStack() as stack:
            self._work.start(self._folders.watch(), "asking which registries and planners there are")
            self._work.start(self._job_list.watch(), "looking for jobs")
            self._work.start(self._subscribe_while_leading(), "listening for questions")
            self._work.start(self._try_again_always(), "trying jobs again that were set aside")
            await self._lease.start()
            self._giving_way = self._work.start(self._give_way_always(), "giving way to a newer registry")
            await self._lease.wait(held=True, timeout_s=FIRST_LEASE_WAIT_S)
            await answer_pings(self._bus, self.id, ROLE)
            await stack.enter_async_context(serving(f"registry {self.id} serves"))
            _log.info("ready", leads=self._leader.leads, jobs=len(self.jobs))
            await asyncio.Event().wait()

    @property
    def leads(self) -> bool:
        """Whether this registry leads."""
        return self._leader.leads

    async def close(self) -> None:
        """Stop publishing, give the lease back so that another registry may lead at once, and end."""
        self._drive_election(election.Resigned())
        if self._giving_way is not None:
            # Else it might ask for the lease again.
            self._giving_way.cancel()
            await asyncio.wait((self._giving_way,))
        await self._lease.close()
        await self._questions.unsubscribe()
        await self._work.close()
        await asyncio.gather(*(job.close() for job in self.jobs.values()))

    # ------------------------------------------------------------------------------------------- leading

    def _on_lease(self, held: bool) -> None:  # noqa: FBT001 (the lease calls it so)
        self._drive_election(election.LeaseWon(self._lease.term) if held else election.LeaseLost())

    def _on_connection(self, connected: bool) -> None:  # noqa: FBT001 (the bus calls it so)
        self._drive_election(election.Connected() if connected else election.Disconnected())

    def _drive_election(self, event: election.Input) -> None:
        """Carry out what follows from a change of the lease or of the connection."""
        for effect in self._leader.handle(event, time.monotonic()):
            match effect:
                case election.StartLeading(term):
                    _log.info("leads", term=term)
                    for job in self.jobs.values():
                        job.lead(term)
                case election.StopLeading(term):
                    _log.info("stands down", term=term)
                    for job in self.jobs.values():
                        job.stand_down()
                case liveness.MonitoringStarted() | liveness.MonitoringStopped():
                    self._drive_liveness(effect)
        self._asking.set()

    async def _subscribe_while_leading(self) -> None:
        while True:
            await self._asking.wait()
            self._asking.clear()
            if self._leader.leads:
                await self._questions.subscribe()
            else:
                await self._questions.unsubscribe()

    async def _give_way_always(self) -> None:
        """Give the lease to a newer registry while there is a job that only that one can lead.

        A lease can't go round in circles, since it is given only to a release that folds a higher level than this one.
        """
        while True:
            await asyncio.sleep(GIVE_WAY_LOOK_S)
            newer = self._folders.newer_registry
            if newer is None or not self._raised or not self._leader.leads:
                continue
            _log.warning("gives way to a newer registry", to=newer.id, release=newer.release, jobs=len(self._raised))
            await self._lease.close()
            await asyncio.sleep(GIVE_WAY_TTLS * self._lease.ttl_s)
            await self._lease.start()
            await asyncio.sleep(GIVE_WAY_AGAIN_S)

    # ------------------------------------------------------------------------------------------- agents

    def _on_beat(self, message: Message) -> None:
        try:
            beat = msgspec.json.decode(message.data, type=Heartbeat)
        except MALFORMED:
            return
        # NATS lets only this agent publish on this subject, and it reports no other agent's beat.
        if message.subject.rpartition(".")[2] == beat.agent:
            self._drive_liveness(beat)
            away_s = self._lost_agents.beats(beat.agent, time.monotonic())
            if away_s is not None:
                _log.warning("a lost agent is back", agent=beat.agent, after_s=round(away_s, 1))

    def _drive_liveness(self, event: liveness.Input) -> None:
        now = time.monotonic()
        expiries = list(self._liveness.handle(event, now))
        for agent, jobs in self._lost_agents.lost(expiries, now):
            _log.warning("an agent is silent and counts as lost", agent=agent, jobs=jobs)
        for lost in expiries:
            job = self.jobs.get(lost.job)
            if job is not None:
                job.expire(lost)
        deadline = self._liveness.deadline()
        if self._timer is None and deadline is not None:
            # A running timer is left alone: beats only move deadlines away, and an early tick does nothing.
            wait_s = max(0.0, deadline - time.monotonic())
            self._timer = self._work.call_later(wait_s, self._tick, what="looking for lost agents")

    def _tick(self) -> None:
        self._timer = None
        self._drive_liveness(Tick())

    # ------------------------------------------------------------------------------------------- jobs

    async def find(self, name: str) -> Job:
        """Return a job that is folded here, or was set aside. Raises `VersionUnavailable` where there is none."""
        job = self.jobs.get(name)
        if job is None or job.has_ended:
            # Perhaps it was opened by another registry a moment ago.
            await self._job_list.read()
            job = self.jobs.get(name)
        if job is None:
            raise VersionUnavailable(f"there is no job {name!r}: connect to it with the SDK, or ask `open` for it")
        return job

    async def open(self, name: str) -> Job:
        """Make the job's streams, if they are not there, and fold the log, which is made last since it is listed."""
        subjects.check_job(name)
        if name in self._forgetting:
            raise gone(name)
        if name in self.jobs and self.jobs[name].has_ended:
            await self._job_list.read()
        job = self.jobs.get(name)
        if job is not None:
            job.refuse()
            if job.is_deleted:
                raise gone(name)
        await BlobStore(self._bus).open(name, self._replicas)
        await self._open_rollouts(name)
        await job_log.open_job(self._bus, name, self._replicas)
        return self._add(name)

    async def _open_rollouts(self, name: str) -> None:
        """Make the streams of the job's rollouts. A job for which NATS refuses them goes on without rollouts."""
        try:
            await PayloadStore(self._bus).open(name, self._replicas)
            await open_rollout_log(self._bus, name, self._replicas)
            self._without_rollouts.discard(name)
        except (LogFull, StreamFailure, StreamMismatch) as why:
            if name not in self._without_rollouts:
                self._without_rollouts.add(name)
                _log.warning("the job goes on without rollouts", job=name, why=str(why))

    async def forget(self, job: Job) -> None:
        """Remove what is left of a deleted job. Its name is free from then on."""
        if not await job.is_ready(READY_WAIT_S_MAX) or not job.is_deleted or self.jobs.get(job.name) is not job:
            return
        self._forgetting.add(job.name)
        self._drop(job)
        try:
            await job.close()
            await job.remove()
        finally:
            self._forgetting.discard(job.name)
            self._forgotten[job.name] = asyncio.get_running_loop().time()

    def health_of(self, job: Job) -> Health:
        """Return the health of one job."""
        found = self._job_health(job)
        return Health(id=self.id, role=ROLE, ailing=int(found.state != JobState.WELL), jobs=(found,))

    def health(self) -> Health:
        """Return the jobs that are not healthy."""
        ailing = [each for job in self.jobs.values() if (each := self._job_health(job)).state != JobState.WELL]
        return Health(id=self.id, role=ROLE, ailing=len(ailing), jobs=tuple(ailing[:HEALTH_JOBS_MAX]))

    def _job_health(self, job: Job) -> JobHealth:
        # A job that is tried again is shown as set aside until it has recovered, so that its state does not flicker.
        failure = job.failure or (None if job.is_deleted else job.trial)
        return health_of(job.name, job.fold.seq, failure, self._aside.get(job.name), job.troubles, time.time())

    # ------------------------------------------------------------------------------------------- coming and going

    def _reconcile(self, listed: Collection[str], asked_at: float) -> None:
        """Begin with jobs that others opened, and let those go whose log is gone. `listed`: all that have a log."""
        self._forgotten = {name: at for name, at in self._forgotten.items() if at >= asked_at}
        names = set(listed) - self._forgetting - set(self._forgotten)
        for job in [job for job in self.jobs.values() if job.has_ended]:
            # A deleted job's name may belong to another log by now.
            if job.is_deleted or job.name not in names:
                self._drop(job)
                self._work.start(job.close(), "closing a job")
        for name in sorted(names):
            self._add(name)
        if self._leader.leads:
            tombstones = [(job.fold.catalog.deleted_at, job.name) for job in self.jobs.values() if job.is_deleted]
            for name in expired_tombstones(tombstones, time.time()):
                self._work.start(self._forget_deleted(self.jobs[name]), "forgetting a deleted job")

    async def _forget_deleted(self, job: Job) -> None:
        try:
            await self.forget(job)
        except TensorHubError as why:
            _log.warning("a deleted job can't be forgotten yet", job=job.name, why=str(why))

    def _add(self, name: str, beyond: int = -1, trial: JobFailure | None = None) -> Job:
        known = self.jobs.get(name)
        if known is not None:
            return known
        job = self.jobs[name] = Job(
            self._bus,
            name,
            self.id,
            self._work.guarded(self._drive_liveness, "a change of an agent"),
            self._work.guarded(self._set_aside, "setting a job aside"),
            self._folders.level_for_new_jobs,
            self._numbers,
            replicas=self._replicas,
            beyond=beyond,
            trial=trial,
        )
        job.start()
        if self._leader.leads:
            job.lead(self._leader.term)
        return job

    def _drop(self, job: Job) -> None:
        """Remove a job from the tables; the caller closes it."""
        if self.jobs.get(job.name) is job:
            del self.jobs[job.name]
            self._aside.pop(job.name, None)
            self._raised.discard(job.name)
            self._without_rollouts.discard(job.name)
            self._drive_liveness(liveness.UnwatchJob(job.name))
            self._questions.drop(job.name)

    def _set_aside(self, job: Job) -> None:
        before, now = self._aside.get(job.name), time.time()
        # How far it folded says nothing: each try adds to its log that a registry leads.
        has_recovered = before is not None and before.has_lasted(now)
        aside = set_aside(before, job.fold.seq, now, RETRY, has_recovered=has_recovered)
        self._aside[job.name] = aside
        if job.failure is not None and job.failure.is_raised:
            self._raised.add(job.name)
        self._drive_liveness(liveness.UnwatchJob(job.name))
        self._work.call_later(aside.wait_s, self._due.put_nowait, job, what="trying a job again")

    async def _try_again_always(self) -> None:
        """Try the jobs that were set aside, one after the other: each folds a part of its log anew."""
        while True:
            job = await self._due.get()
            await job.close()
            aside = self._aside.get(job.name)
            if self.jobs.get(job.name) is not job or aside is None:
                continue
            del self.jobs[job.name]
            _log.info("the job is tried again", job=job.name, seq=aside.seq, failures=aside.failures)
            again = self._add(job.name, aside.seq, job.failure)
            try:
                async with asyncio.timeout(TRY_S_MAX):
                    await again.wait_tried()
            except TimeoutError:
                _log.info("the job that is tried again gets no further yet", job=job.name, seq=again.fold.seq)
