"""The catalogs of all jobs, kept up to date by following their logs. I/O: it reads from NATS and decides nothing.

A job is followed soon after its log was made, at the latest from its first request on, and from its newest snapshot.
While NATS is away a catalog does not change, and goes on where it was.

Invariants:
- A request for a job gets a catalog that is folded up to the number named, or an error within `FOLD_S_MAX`.
- A job whose log can't be folded, for whatever reason, affects no other: it is set aside with one line in the log, its
  requests are refused with the reason, and the first request after a while, for a plan or for its health, has it folded
  again from its newest snapshot. `RETRY` says how long, and it begins
  again once the fold has got further than where it failed.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Final, NamedTuple

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogGap, LogMissing, LogShorter
from tensorhub_common.catalog.snapshot import Snapshot
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.errors import RegistryUnavailable, TensorHubError
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.jetstream.stream_log import LogExtent
from tensorhub_common.log_follower.follower import LogFollower
from tensorhub_common.log_follower.job_list import LIST_S, JobList
from tensorhub_common.log_follower.set_aside import RetryLimits, SetAside, set_aside
from tensorhub_common.observability.logs import logger
from tensorhub_common.protocol.log.events import Event
from tensorhub_common.protocol.log.levels import LevelUnknown
from tensorhub_common.protocol.queries import JobHealth, JobState
from tensorhub_common.runtime.supervision import Fault, Supervisor
from tensorhub_planner.catalog_view.catalog_replica import CatalogReplica

FOLD_S_MAX: Final = 0.7
"""A request waits this long until the log is folded up to the number that it names: less than an agent waits."""
LIST_AGAIN_S: Final = 0.5
"""The pause before jobs are listed again, after NATS gave no answer."""
JOBS_MAX: Final = 256
"""Limit of the jobs that a planner follows."""
RESTORE_AGAIN_S: Final = 0.2
"""The pause after the snapshots could not be read."""
RETRY: Final = RetryLimits(first_s=5.0, max_s=60.0)
"""The first request after this time has a job folded again that was set aside."""
FOLD_BURST: Final = 32
"""Requests have their turn after this many entries, which take about a millisecond."""
ASIDE_MAX: Final = 1024
"""Limit of jobs that are remembered as set aside."""
WAITING_MAX: Final = 4096
"""Limit of requests that wait for one job's log."""

OnEvent = Callable[[str, int, Event], None]
"""Takes a job, the number of an entry in its log, and an event of it."""
OnEnd = Callable[[str], None]
"""Takes a job whose log is not followed any more: it was removed, or is another one than was folded."""

_log: Final = logger(__name__)


class JobUnknown(RegistryUnavailable):
    """The job has no log."""


class PlannerBehind(RegistryUnavailable):
    """The log is not folded as far as the question needs."""


class FollowedJob:
    """One job: its fold, and the requests that wait for it."""

    def __init__(self, job: str, on_event: OnEvent) -> None:
        self.job = job
        self.fold = CatalogReplica(Catalog(job))
        self._on_event = on_event
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._ticket = 0
        self.tried = 0
        """The number of the entry that was taken last, whether or not it could be folded."""

    @property
    def folded_seq(self) -> int:
        """The last entry that is folded."""
        return self.fold.position

    def restore(self, snapshot: Snapshot, _: LogExtent) -> int:
        """Go on from a snapshot, with the entry after it."""
        self.fold = CatalogReplica(snapshot.catalog, snapshot.seq)
        self._wake()
        return snapshot.seq + 1

    async def take(self, entry: StoredEntry) -> None:
        """Fold the next entry."""
        self.tried = entry.seq
        for event in self.fold.take(entry):
            self._on_event(self.job, entry.seq, event)
        self._wake()

    async def reach(self, seq: int, timeout_s: float) -> None:
        """Return once the log is folded up to `seq`. Raises `PlannerBehind` after the bound."""
        if self.fold.position >= seq:
            return
        if len(self._waiting) >= WAITING_MAX:
            raise PlannerBehind(f"{WAITING_MAX} questions wait for the log of job {self.job!r} already: ask again")
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ticket += 1
        heapq.heappush(self._waiting, (seq, self._ticket, reached))
        try:
            async with asyncio.timeout(timeout_s):
                await reached
        except TimeoutError:
            raise PlannerBehind(
                f"the planner has folded the log of job {self.job!r} up to {self.fold.position}, not to {seq}, "
                f"after {timeout_s:g} s: ask again"
            ) from None
        finally:
            if reached.done() and not reached.cancelled():
                # A bound that ends in the same turn leaves an error that no caller fetches.
                reached.exception()
            else:
                self._waiting = [each for each in self._waiting if each[2] is not reached]
                heapq.heapify(self._waiting)

    def fail(self, error: Exception) -> None:
        """Refuse all requests that wait: this log won't go on."""
        for _, _, reached in self._waiting:
            if not reached.done():
                reached.set_exception(error)
        self._waiting.clear()

    def _wake(self) -> None:
        """Let the requests go on that waited for what is folded now."""
        while self._waiting and self._waiting[0][0] <= self.fold.position:
            reached = heapq.heappop(self._waiting)[2]
            if not reached.done():
                reached.set_result(None)


class _Aside(NamedTuple):
    """A job that is set aside, in the planner's clock."""

    retry: SetAside
    folded: int
    tried: int
    error: RegistryUnavailable
    beyond: int
    """It has recovered once this entry is folded."""


class CatalogReplicas:
    """The catalogs of all jobs that this planner follows."""

    def __init__(self, bus: Bus, on_event: OnEvent, on_end: OnEnd, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus, self._clock = bus, clock
        self._on_event, self._on_end = on_event, on_end
        self._work = Supervisor("the planner's catalogs")
        self._job_list = JobList(bus, self._work, self._take_list, LIST_AGAIN_S, (TensorHubError,))
        self._jobs: dict[str, FollowedJob] = {}
        self._aside: dict[str, _Aside] = {}

    def start(self) -> None:
        """Follow all jobs that have a log, now and later."""
        self._work.start(self._job_list.watch(), "looking for jobs", on_fault=self._discover_again)

    async def at(self, job: str, seq: int, timeout_s: float = FOLD_S_MAX) -> CatalogReplica:
        """Return the job's fold, which has taken the log up to `seq` at least.

        Raises `PlannerBehind` when it can't be within the bound, `JobUnknown` for a job without a log.
        """
        followed = self._followed(job)
        # A job that is new here is followed up to its first entry at least, which shows that it has a log at all.
        await followed.reach(max(1, seq), timeout_s)
        return followed.fold

    def folded(self, job: str) -> Catalog | None:
        """Return what is folded of a job now, if it is followed."""
        followed = self._jobs.get(job)
        return None if followed is None else followed.fold.catalog

    def health(self, job: str) -> JobHealth:
        """Return the health of a job; an unknown one is healthy, and not folded."""
        followed, aside = self._jobs.get(job), self._aside.get(job)
        if aside is None or self._has_recovered(job):
            return JobHealth(job=job, state=JobState.WELL, seq=0 if followed is None else followed.fold.position)
        now = time.time() - self._clock()
        return JobHealth(
            job=job,
            state=JobState.SET_ASIDE,
            why=str(aside.error),
            advice="its reads wait for another planner, or for this one's next try: see this planner's log",
            seq=aside.folded,
            since=now + aside.retry.since,
            again_at=now + aside.retry.again_at,
        )

    @property
    def ailing(self) -> list[str]:
        """The jobs that are set aside, and those that are tried again and have not recovered yet."""
        return [job for job in self._aside if not self._has_recovered(job)]

    def _has_recovered(self, job: str) -> bool:
        """Tell whether a job that was set aside is folded again, beyond what it failed at."""
        followed = self._jobs.get(job)
        return followed is not None and followed.fold.position >= self._aside[job].beyond

    def try_due(self) -> None:
        """Try those again whose time has come, as the first request about each would."""
        for job in self.ailing:
            if self._clock() >= self._aside[job].retry.again_at and len(self._jobs) < JOBS_MAX:
                self._followed(job)

    async def stop(self) -> None:
        """Follow nothing any more."""
        await self._work.close()
        for followed in self._jobs.values():
            followed.fail(RegistryUnavailable("the planner is ending: ask another one"))

    def _take_list(self, jobs: Collection[str], _: float) -> None:
        for gone in set(self.ailing).difference(jobs):
            del self._aside[gone]
        for job in sorted(jobs)[:JOBS_MAX]:
            if job not in self._aside:
                self._followed(job)

    def _discover_again(self, _: Fault) -> None:
        self._work.call_later(LIST_S, self.start, what="looking for jobs again")

    def _followed(self, job: str) -> FollowedJob:
        followed = self._jobs.get(job)
        if followed is None:
            self._check_not_aside(job)
            if len(self._jobs) >= JOBS_MAX:
                raise PlannerBehind(f"this planner follows {JOBS_MAX} jobs already, which is its limit: start another")
            followed = self._jobs[job] = FollowedJob(job, self._on_event)
            self._work.start(
                self._run(followed),
                f"following the log of job {job!r}",
                # Every error concerns this job alone.
                on_fault=partial(self._set_aside_after, followed),
            )
        return followed

    def _check_not_aside(self, job: str) -> None:
        aside = self._aside.get(job)
        if aside is not None and self._clock() < aside.retry.again_at:
            raise aside.error

    async def _run(self, followed: FollowedJob) -> None:
        job = followed.job
        try:
            await LogFollower(self._bus, job, followed, burst=FOLD_BURST, retry_s=RESTORE_AGAIN_S).run()
        except LogMissing:
            followed.fail(JobUnknown(f"job {job!r} has no log: a registry must open the job first"))
            self._aside.pop(job, None)
            self._end(followed)
        except (LogGap, LogShorter, LevelUnknown) as why:
            # This log can't be folded now. It may be opened again, or this process be upgraded. Another log in its
            # place may end before the entry that this one failed at.
            self._set_aside(followed, str(why), beyond=1 if isinstance(why, LogShorter) else followed.tried)

    def _set_aside_after(self, followed: FollowedJob, fault: Fault) -> None:
        why = f"entry {followed.tried} can't be folded: {fault.error!r}"
        report = "This is a fault of TensorHub: report it with the planner's log"
        self._set_aside(followed, f"{why}. {report}", beyond=followed.tried)

    def _set_aside(self, followed: FollowedJob, why: str, *, beyond: int) -> None:
        """Refuse the job's requests for a while; the first one after that tries again."""
        job, before = followed.job, self._aside.pop(followed.job, None)
        error = RegistryUnavailable(f"the planner can't follow the log of job {job!r}: {why}")
        folded, tried = followed.fold.position, followed.tried
        has_recovered = before is not None and tried > before.tried
        retry = set_aside(
            None if before is None else before.retry, folded, self._clock(), RETRY, has_recovered=has_recovered
        )
        self._aside[job] = _Aside(retry, folded, tried, error, max(1, beyond))
        while len(self._aside) > ASIDE_MAX:
            del self._aside[next(iter(self._aside))]
        _log.error("the job is set aside", job=job, why=why, again_s=retry.wait_s)
        followed.fail(error)
        self._end(followed)

    def _end(self, followed: FollowedJob) -> None:
        del self._jobs[followed.job]
        self._on_end(followed.job)
