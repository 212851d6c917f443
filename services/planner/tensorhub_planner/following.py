"""The catalogs of all jobs, kept up to date by following their logs. I/O: it reads from NATS and decides nothing.

A job is followed soon after its log came to stand, at the latest from its first question on; from its newest snapshot,
also where the log was trimmed beyond what is folded here. While NATS is away a catalog stands still, and goes on where
it was. Always true: whoever asks for a job gets a catalog that is folded up to
the number named, or an error within `FOLD_S_MAX`.
"""

import asyncio
import heapq
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

from tensorhub_common import restoring
from tensorhub_common.bus import joblog
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.entry import Entry
from tensorhub_common.bus.failures import (
    LogGap,
    LogMissing,
    LogShorter,
    NoAnswer,
    NoBus,
    NoResponder,
    StreamFailure,
)
from tensorhub_common.catalog.snapshot import Snapshot
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.errors import RegistryUnavailable, TensorHubError
from tensorhub_common.levels import LevelUnknown
from tensorhub_common.telemetry import logger
from tensorhub_common.wire.events.event import Event
from tensorhub_planner.fold import Fold

FOLD_S_MAX: Final = 0.7
"""A question waits for so long until the log is folded up to the number that it names: less than an agent waits."""
DISCOVER_S: Final = 5.0
"""How often it looks for jobs that are new."""
DISCOVER_AGAIN_S: Final = 0.5
"""The same, where NATS gave no answer."""
JOBS_MAX: Final = 256
"""A planner follows at most so many jobs."""
LOAD_AGAIN_S: Final = 0.2
"""The pause after NATS gave no answer to who asked for a snapshot."""
STOPPED_S: Final = 5.0
"""A log that could not be folded is tried again by the first question after this."""
FOLD_BURST: Final = 32
"""After so many entries folded at a stretch, questions have their turn: about a millisecond."""
WAITING_MAX: Final = 4096
"""So many questions wait for one job's log at most."""

Follow = Callable[[str, int], AsyncGenerator[Entry, None]]
Load = Callable[[str, int], Awaitable[Snapshot | None]]
"""Returns the newest snapshot of a job after this entry, or None."""
OnEvent = Callable[[str, int, Event], None]
"""Takes a job, the number of an entry in its log, and what happened by that."""
OnEnd = Callable[[str], None]
"""Is told of a job whose log goes on no more: it was removed, or is another one than was folded."""

_log: Final = logger(__name__)


class JobUnknown(RegistryUnavailable):
    """The job has no log."""


class PlannerBehind(RegistryUnavailable):
    """The log is not folded as far as the question needs."""


class _Followed:
    """One job: its fold, the task that follows its log, and who waits for it."""

    def __init__(self, job: str, follow: Follow, load: Load, on_event: OnEvent) -> None:
        self.job = job
        self.fold = Fold(Catalog(job))
        self._follow = follow
        self._load = load
        self._on_event = on_event
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._ticket = 0

    async def run(self) -> None:
        """Fold the log for ever. Ends only by an error that no waiting can mend."""
        await self._restore()
        while True:
            try:
                await self._fold_on()
            except LogGap:
                # The log was trimmed beyond what is folded here.
                if not await self._restore():
                    raise

    async def _restore(self) -> bool:
        """Go on from a snapshot that lies ahead; False: there is none."""
        snapshot = await self._load(self.job, self.fold.position)
        if snapshot is None:
            return False
        _log.info("restored from a snapshot", job=self.job, seq=snapshot.seq, after=self.fold.position)
        self.fold = Fold(snapshot.catalog, snapshot.seq)
        self._tell()
        return True

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
            if not reached.done() or reached.cancelled():
                self._waiting = [each for each in self._waiting if each[2] is not reached]
                heapq.heapify(self._waiting)

    def fail(self, error: Exception) -> None:
        """Tell everybody who waits that this log won't go on."""
        for _, _, reached in self._waiting:
            if not reached.done():
                reached.set_exception(error)
        self._waiting.clear()

    async def _fold_on(self) -> None:
        async with aclosing(self._follow(self.job, self.fold.position + 1)) as entries:
            async for entry in entries:
                if entry.seq % FOLD_BURST == 0:
                    await asyncio.sleep(0)
                for event in self.fold.take(entry):
                    self._on_event(self.job, entry.seq, event)
                self._tell()

    def _tell(self) -> None:
        """Let those go on who waited for what is folded now."""
        while self._waiting and self._waiting[0][0] <= self.fold.position:
            reached = heapq.heappop(self._waiting)[2]
            if not reached.done():
                reached.set_result(None)


class Catalogs:
    """The catalogs of all jobs that this planner follows."""

    def __init__(self, bus: Bus, on_event: OnEvent, on_end: OnEnd) -> None:
        self._bus = bus
        self._on_event, self._on_end = on_event, on_end
        self._jobs: dict[str, _Followed] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopped: dict[str, tuple[float, RegistryUnavailable]] = {}
        self._discovering: asyncio.Task[None] | None = None
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises once something failed that can't fail: the process must end."""

    def start(self) -> None:
        """Follow all jobs that have a log, now and later."""
        self._discovering = asyncio.create_task(self._discover(), name="discover jobs")

    async def at(self, job: str, seq: int, timeout_s: float = FOLD_S_MAX) -> Fold:
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

    async def stop(self) -> None:
        """Follow nothing any more."""
        tasks = [*self._tasks.values(), *([] if self._discovering is None else [self._discovering])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for followed in self._jobs.values():
            followed.fail(RegistryUnavailable("the planner is ending: ask another one"))

    async def _discover(self) -> None:
        while True:
            try:
                for job in (await joblog.jobs(self._bus))[:JOBS_MAX]:
                    if job not in self._stopped:
                        self._followed(job)
                await asyncio.sleep(DISCOVER_S)
            except TensorHubError as why:
                _log.debug("jobs could not be looked for", why=str(why))
                await asyncio.sleep(DISCOVER_AGAIN_S)

    def _followed(self, job: str) -> _Followed:
        followed = self._jobs.get(job)
        if followed is None:
            self._check_not_stopped(job)
            if len(self._jobs) >= JOBS_MAX:
                raise PlannerBehind(f"this planner follows {JOBS_MAX} jobs already, which is its limit: start another")
            followed = self._jobs[job] = _Followed(job, self._follow, self._load, self._on_event)
            self._tasks[job] = asyncio.create_task(self._run(followed), name=f"follow {job}")
        return followed

    def _check_not_stopped(self, job: str) -> None:
        until, error = self._stopped.get(job, (0.0, None))
        if error is not None and asyncio.get_running_loop().time() < until:
            raise error
        self._stopped.pop(job, None)

    def _follow(self, job: str, seq: int) -> AsyncGenerator[Entry, None]:
        return joblog.JobLog(self._bus, job).follow(seq)

    async def _load(self, job: str, beyond: int) -> Snapshot | None:
        while True:
            try:
                return (await restoring.newest(self._bus, job, beyond))[0]
            except (NoBus, NoAnswer, NoResponder, StreamFailure) as why:
                _log.debug("the snapshots can't be read yet", job=job, why=str(why))
            await asyncio.sleep(LOAD_AGAIN_S)

    async def _run(self, followed: _Followed) -> None:
        job = followed.job
        try:
            await followed.run()
        except LogMissing:
            followed.fail(JobUnknown(f"job {job!r} has no log: a registry must open the job first"))
        except (LogGap, LogShorter, LevelUnknown) as error:
            # This log can't be folded now. Others can; and this one may be opened anew, so it is tried again later.
            _log.error("the job's log can't be folded", job=job, why=str(error))
            stopped = RegistryUnavailable(f"the planner can't follow the log of job {job!r}: {error}")
            self._stopped[job] = (asyncio.get_running_loop().time() + STOPPED_S, stopped)
            followed.fail(stopped)
        except Exception as error:  # noqa: BLE001 (whatever it is, `broken` raises it where the service runs)
            followed.fail(RegistryUnavailable(f"the planner can't follow the log of job {job!r} any more: {error}"))
            if not self.broken.done():
                self.broken.set_exception(error)
                # Whoever runs the service looks at it; nobody else has to.
                self.broken.exception()
        self._on_end(job)
        self._jobs.pop(job, None)
        self._tasks.pop(job, None)
