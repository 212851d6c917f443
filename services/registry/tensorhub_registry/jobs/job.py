"""One job in a registry: it follows and folds the log, and publishes the outcomes while this registry leads.

A job begins with the newest snapshot, if there is one. It goes back to a snapshot if the log no longer reaches back to
the entries that it has folded. Two tasks share the pure `JobFold`. `_follow` gives it the log's entries. `_publish_all`
publishes its decided events and gives it the result. Neither task touches the fold between an await and the handling
of its result, so folding goes on while an acknowledgement is awaited.

`CommandCounts` counts the outcomes of a job's commands as they are folded, as plain numbers for the metrics.

Invariants:
- The job publishes only while this registry leads.
- A condition that the job can't go on from (another fold has published, the log was replaced), and any error that
  escapes from its tasks, sets this job aside (`failure`). The process and the other jobs go on, and the registry tries
  the job again.
- No part of another job waits for a task of this one.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import (
    UNCERTAIN,
    LogFull,
    LogMissing,
    MessageTooLarge,
    StreamFailure,
    WrongLastSequence,
)
from tensorhub_common.catalog.snapshot import Snapshot
from tensorhub_common.catalog.transitions import AgentState
from tensorhub_common.errors import RegistryUnavailable, TensorHubError
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.jetstream.stream_log import LogExtent
from tensorhub_common.log_follower.follower import LogFollower
from tensorhub_common.observability import logs
from tensorhub_common.protocol.log.events import (
    AgentJoined,
    AgentLost,
    AnyEvent,
    CommandRejected,
    JobDeleted,
    RegistryLeads,
    kind_of,
)
from tensorhub_common.runtime.peer_status import PeerStatus
from tensorhub_common.runtime.supervision import Fault, Supervisor
from tensorhub_registry.core import snapshot_policy
from tensorhub_registry.core.agent_forgetting import AgentForgetting
from tensorhub_registry.core.hold_ending import HoldEnding
from tensorhub_registry.core.job_fold import (
    CommandDecided,
    EntryIgnored,
    EventBatch,
    JobFold,
    OutcomeStored,
    OutOfOrder,
    Output,
    PublicationRefused,
    PublicationStored,
    PublicationUnknown,
)
from tensorhub_registry.core.job_health import JobFailure, WaitReasons
from tensorhub_registry.core.liveness import ExpireAgent, UnwatchAgent, UnwatchJob, WatchAgent
from tensorhub_registry.jobs.agent_expiry import AgentExpiry
from tensorhub_registry.jobs.deletion import JobDeletion
from tensorhub_registry.jobs.last_event import last_event
from tensorhub_registry.jobs.log_writer import BATCH_EVENTS_MAX, BATCH_EVENTS_MIN, CHAIN_EVENTS_MAX, LogWriter
from tensorhub_registry.jobs.outcome_replies import OutcomeReplies
from tensorhub_registry.jobs.outcome_spans import OutcomeSpans
from tensorhub_registry.jobs.snapshot_maker import SnapshotMaker
from tensorhub_registry.jobs.term_claim import TermClaim


class CommandCounts:
    """The commands of one job that came while this registry was leading. Reading a log again counts nothing."""

    def __init__(self) -> None:
        self.commands: Counter[tuple[str, str]] = Counter()
        """Their number by (outcome, error). The error is "" where the command was not refused."""
        self.events = 0
        self.passed_over = 0
        """Entries on events' subjects that are no events, also of a log that is read again."""

    def add(self, events: tuple[AnyEvent, ...]) -> None:
        """Count a command by the group of events that it led to."""
        first = events[0]
        error = first.error if isinstance(first, CommandRejected) else ""
        self.commands[kind_of(first), error] += 1
        self.events += len(events)


FOLD_BURST: Final = 8
"""The rest of the process has its turn after this many entries, which take a few tenths of a millisecond."""

RETRY_S: Final = 0.1
"""The pause after NATS could not be asked, or gave no answer."""

FULL_RETRY_S: Final = 0.5
"""The pause after a log without room."""

ROOM_WAIT_S: Final = 0.5
"""With the fold full and nothing published for this time, the log's last event is looked up."""

LOOK_S: Final = 5.0
"""How often a leader looks for a snapshot that is due, whether the log is nearly full, for agents lost long ago."""

READING: Final = "reading"
WRITING: Final = "writing"
"""What a job may be unable to do, as `WaitReasons` names it."""

_log: Final = logs.logger(__name__)

OnAgent = Callable[[WatchAgent | UnwatchAgent | UnwatchJob], None]
OnAside = Callable[["Job"], None]
NewJobLevel = Callable[[], Awaitable[int]]
"""Returns the level at which a job begins whose log is empty."""


class Job:
    """One job of this registry, from `start` to `close`, or until it is set aside."""

    def __init__(
        self,
        bus: Bus,
        name: str,
        registry: str,
        on_agent: OnAgent,
        on_aside: OnAside,
        new_job_level: NewJobLevel,
        numbers: Iterator[int],
        *,
        replicas: int = 1,
        beyond: int = -1,
        trial: JobFailure | None = None,
    ) -> None:
        """Prepare. `numbers` are those of the registry's expiries; `beyond`: where the job was set aside before.

        `trial`: why that was, so that the job is shown as set aside until it has recovered.
        """
        self.name = name
        self.fold = JobFold(name)
        self.failure: JobFailure | None = None
        """Why the job was set aside, if it was."""
        self.trial = trial
        """Why it was set aside before, until it has recovered: has folded further and published."""
        self.troubles = WaitReasons()
        self.counts = CommandCounts()
        self.term: int | None = None
        """The term in which this registry leads, or None while it does not."""
        self.log = JobLog(bus, name)
        self._log_taking = PeerStatus(
            f"the log of job {name}",
            lost="takes nothing from this registry, so it waits and is tried again",
            back="takes what this registry says again",
        )
        self._work = Supervisor(f"job {name!r}", on_fault=self._on_fault)
        self.claim = TermClaim(self.log, registry, lambda: self.fold.catalog, self._work, self._note_writing)
        self._expiring = AgentExpiry(self.log, self.claim, self._work, numbers, self._note_writing)
        self._forgetting = AgentForgetting()
        self._hold_ending = HoldEnding()
        self._bus = bus
        self._on_agent, self._on_aside = on_agent, on_aside
        self._storing = LogWriter(bus, self.log, self._work)
        self._snapshotting = SnapshotMaker(bus, self.log, replicas, self._work)
        self._clearing = JobDeletion(bus, self._snapshotting, self._work)
        self._new_job_level = new_job_level
        self._tracing = OutcomeSpans(name)
        self._goal: int | None = None
        self._ready = asyncio.Event()
        self._begun = asyncio.Event()
        """Set once this registry has led and known the log's end; an empty log then has the level of its job."""
        self._raised = asyncio.Event()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._replies = OutcomeReplies(bus, name)
        self._batch_max = BATCH_EVENTS_MAX
        """Lower after a full log, since a batch may be larger than the room that is left."""
        self._beyond = beyond
        self._has_published = False
        self._tried = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------- from outside

    def start(self) -> None:
        """Begin to fold."""
        self._following = self._work.start(self._follow(), "folding the log", self._on_fold_fault)

    async def close(self) -> None:
        """Stop folding and publishing."""
        self.stand_down()
        await self._work.close()
        self._tracing.close()

    async def wait_tried(self) -> None:
        """Return once the job has folded what it was set aside for the last time, or was set aside again."""
        await self._tried.wait()

    def lead(self, term: int) -> None:
        """Publish from now on: this registry holds the lease."""
        if self.failure is not None or self.term == term:
            return
        self.stand_down()
        self.term = term
        self._publishing = self._work.start(self._publish_all(), "publishing outcomes", self._on_publish_fault)
        self._looking = self._work.start(self._look_regularly(), "looking at what no entry calls for")

    def stand_down(self) -> None:
        """Publish no more. A publication in progress may still be stored; the fold will read it in the log."""
        ending = (self._publishing, self._looking)
        self._publishing = self._looking = None
        self.term = self._goal = None
        self._ready.clear()
        self.troubles.clear(WRITING)
        self._snapshotting.cancel()
        self._clearing.cancel()
        self._expiring.cancel()
        self.claim.drop()
        for task in ending:
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def expire(self, lost: ExpireAgent) -> None:
        """Append to the log that an agent is lost."""
        if self.term == lost.term:
            self._expiring.expire(lost)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is folded here any more."""
        return self.failure is not None or self._following is None or self._following.done()

    async def remove(self) -> None:
        """Delete all that NATS has of the job, once it is closed here and was deleted."""
        await self._clearing.remove(self.name)

    async def is_ready(self, timeout_s: float) -> bool:
        """Tell, within the bound, whether this registry leads and has folded the whole log as it was before."""
        if self.term is None:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        return self._ready.is_set()

    async def has_begun(self, timeout_s: float) -> None:
        """Wait within the bound until the first command of an empty log is stored."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._begun.wait()

    def refuse(self) -> None:
        """Raise `RegistryUnavailable` where the job was set aside."""
        if self.failure is not None:
            raise RegistryUnavailable(
                f"job {self.name!r} is set aside, since {self.failure.why}: {self.failure.advice}; the registry tries "
                "it again by itself, and 'tensorhub doctor' says when"
            )

    async def _look_regularly(self) -> None:
        """While this registry leads, do what no entry of the log calls for.

        Agents lost long ago are forgotten, and holds end that were not stated again. A snapshot is made that became due
        while another was being stored, or could not be stored then. A log that is nearly full is given room.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._ready.is_set():
                continue
            if self.claim.term is not None:
                self._expiring.forget(self._forgetting.due(self.fold.catalog, time.time()))
                self._expiring.end_holds(self._hold_ending.due(self.fold.catalog, time.time()))
            self._snapshotting.look(self.fold)
            try:
                await self._snapshotting.look_for_room(self.fold)
            except TensorHubError as why:
                _log.debug("how full the log is could not be learnt", job=self.name, why=str(why))

    # ------------------------------------------------------------------------------------------- folding

    async def _follow(self) -> None:
        follower = LogFollower(
            self._bus, self.name, self, burst=FOLD_BURST, retry_s=RETRY_S, on_read_state=self._note_reading
        )
        try:
            await follower.run()
        except TensorHubError as why:
            self._fail(JobFailure.of(why))

    @property
    def folded_seq(self) -> int:
        """The last entry that is folded."""
        return self.fold.seq

    def restore(self, snapshot: Snapshot, extent: LogExtent) -> int:
        """Go on from a snapshot; reading begins before it, for the outcomes that may still be asked for."""
        term = self.term
        self.stand_down()
        self.fold = JobFold.restored(snapshot)
        for agent in snapshot.catalog.agents.values():
            if agent.state is AgentState.LIVE:
                self._on_agent(WatchAgent(self.name, agent.name, agent.incarnation))
            else:
                self._on_agent(UnwatchAgent(self.name, agent.name))
        if term is not None:
            self.lead(term)
        return min(snapshot.seq, max(extent.first, snapshot.seq - snapshot_policy.LOG_KEEP_ENTRIES_MIN)) + 1

    async def take(self, entry: StoredEntry) -> None:
        """Fold the next entry; of one before the snapshot, keep the outcome that it tells."""
        if entry.seq <= self.fold.seq:
            self.fold.recall(entry)
            return
        await self._fold_in(entry)
        if self._ready.is_set():
            self._snapshotting.look(self.fold)
            self._check_recovered()

    def _note_reading(self, error: Exception | None) -> None:
        if error is None:
            self.troubles.clear(READING)
        else:
            self.troubles.note(READING, error, time.time())

    def _note_writing(self, error: Exception | None) -> None:
        if error is None:
            self.troubles.clear(WRITING)
            self._log_taking.answers()
            return
        self.troubles.note(WRITING, error, time.time())
        # The bus itself has logged once that NATS is away.
        if self.log.is_reachable:
            self._log_taking.is_silent(str(error))

    async def _fold_in(self, entry: StoredEntry) -> None:
        if self.fold.is_full:
            await self._make_room()
        await self._carry_out(self.fold.handle(entry, time.monotonic()))
        self._snapshotting.note(entry)
        if entry.seq > self._beyond:
            self._tried.set()
        if self.fold.can_publish:
            self._wake.set()
        if self._goal is not None:
            await self._check_ready()

    async def _make_room(self) -> None:
        """Wait until events were published, here or by the leader, so that the queue of others stays bounded."""
        while self.fold.is_full:
            self._room.clear()
            try:
                async with asyncio.timeout(ROOM_WAIT_S):
                    await self._room.wait()
            except TimeoutError:
                with contextlib.suppress(*UNCERTAIN):
                    await self._look_at_end()

    async def _look_at_end(self) -> None:
        last = await last_event(self.log, self.fold)
        if last is not None:
            await self._carry_out(self.fold.handle(last, time.monotonic()))

    async def _carry_out(self, effects: Iterable[Output]) -> None:
        for effect in effects:
            match effect:
                case CommandDecided():
                    if self._ready.is_set():
                        self.counts.add(effect.events)
                    self._note(effect)
                case OutcomeStored():
                    self._has_published = self._has_published or self._ready.is_set()
                    if effect.causes and self._ready.is_set():
                        self._tracing.stored(effect.causes)
                    if effect.origin is not None:
                        await self._replies.answer(effect, ready=self._ready.is_set())
                case EntryIgnored():
                    self.counts.passed_over += 1
                    if self.counts.passed_over == 1:
                        _log.warning("an entry on an event's subject is no event", job=self.name, at=effect.subject)
                case OutOfOrder(expected, found):
                    raise TensorHubError(f"the log gave entry {found} where {expected} was due: its reader is at fault")

    def _note(self, decided: CommandDecided) -> None:
        match decided.events[0]:
            case RegistryLeads():
                self.claim.see(decided.events[0])
                self._raised.set()
            case AgentJoined(agent=agent, incarnation=incarnation):
                self._on_agent(WatchAgent(self.name, agent, incarnation))
            case AgentLost(agent=agent):
                self._on_agent(UnwatchAgent(self.name, agent))
            case JobDeleted():
                self._on_agent(UnwatchJob(self.name))
            case _:
                pass

    @property
    def is_deleted(self) -> bool:
        """Whether the job was deleted, as far as is folded here."""
        return self.fold.catalog.deleted > 0

    def _check_recovered(self) -> None:
        """End the trial once each part has worked: the fold, the claim and the publication of outcomes.

        A leader appends to each log that it leads, and the outcome of that is stored last. An empty log gets none.
        """
        has_published = self._has_published or (self._ready.is_set() and self.fold.seq == 0)
        if self.trial is not None and has_published and self.claim.term is not None:
            self.trial = None
            _log.info("the job that was set aside has recovered", job=self.name, seq=self.fold.seq)

    def _check_deleted(self) -> None:
        """Remove the rest once the log says that the job is deleted. `JobDeletion` begins only once."""
        if self.is_deleted and self._ready.is_set() and not self.fold.is_pending(self.fold.catalog.deleted):
            self._clearing.begin(self.fold)

    def _on_fold_fault(self, fault: Fault) -> None:
        """Set the job aside: a fault in the fold is the same on every machine."""
        self._fail(JobFailure.of(fault.error, f"entry {self.fold.seq + 1} can't be folded: {fault.error!r}"))

    def _on_publish_fault(self, fault: Fault) -> None:
        self._fail(JobFailure.of(fault.error, f"outcomes can't be published: {fault.error!r}"))

    def _on_fault(self, fault: Fault) -> None:
        self._fail(JobFailure.of(fault.error, f"{fault.work} failed: {fault.error!r}"))

    def _fail(self, failure: JobFailure) -> None:
        """Set the job aside. That the log of a deleted job goes is no failure; where it exists, it is folded again."""
        if self.is_deleted:
            _log.info("the deleted job is not folded any more", job=self.name, why=failure.why)
            self.stand_down()
            self._tried.set()
            self._stop_following()
            return
        if self.failure is not None:
            return
        self.failure = failure
        _log.error("the job is set aside", job=self.name, seq=self.fold.seq, why=failure.why, advice=failure.advice)
        self.stand_down()
        self._tried.set()
        self._stop_following()
        self._on_aside(self)

    def _stop_following(self) -> None:
        if self._following is not None and self._following is not asyncio.current_task():
            self._following.cancel()

    # ------------------------------------------------------------------------------------------- publishing

    async def _publish_all(self) -> None:
        try:
            await self._begin_to_lead()
            while True:
                waiting = self.fold.unpublished
                many = self._storing.batches.allowed and waiting >= BATCH_EVENTS_MIN
                publication = self.fold.to_publish(self._batch_max if many else self._storing.chain_max)
                if publication is None:
                    await self._wake.wait()
                    self._wake.clear()
                else:
                    await self._publish(publication)
        except TensorHubError as why:
            self._fail(JobFailure.of(why))

    async def _begin_to_lead(self) -> None:
        """Learn how far the log is and how far publication is, so that no stored event is published again."""
        while True:
            try:
                await self._look_at_end()
                self._goal = await self.log.last_seq() or await self._begin_log()
                refusal = await self._storing.batches.try_allow()
                await self._snapshotting.learn()
                self._begun.set()
                break
            except UNCERTAIN as why:
                # A stream without a leader, as after each change of NATS, is usual and not logged.
                self.troubles.note(WRITING, why, time.time())
                _log.debug("the log's end is unknown", job=self.name, why=str(why))
            await asyncio.sleep(RETRY_S)
        self.troubles.clear(WRITING)
        if refusal is not None:
            _log.warning("events are published one by one", job=self.name, why=refusal)
        await self._check_ready()

    async def _begin_log(self) -> int:
        """Append to the empty log at which level its job begins. Return the entry, or 0 where it begins at level 0."""
        level = await self._new_job_level()
        return await self.claim.say_first(self.term, level) if level and self.term is not None else 0

    async def raise_to(self, level: int, timeout_s: float) -> bool:
        """Raise the job to a level that all its folders know; tell whether it is so within the bound."""
        self.claim.raise_to(level)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.fold.catalog.level < level:
                    self._raised.clear()
                    await self._raised.wait()
        return self.fold.catalog.level >= level

    async def _check_ready(self) -> None:
        if self._goal is None or self.fold.seq < self._goal:
            return
        self._goal = None
        self._ready.set()
        _log.debug("leading", job=self.name, term=self.term, seq=self.fold.seq)
        if self.term is not None:
            self.claim.begin(self.term)
        self._snapshotting.look(self.fold)
        self._check_recovered()
        await self._replies.send_late(self.fold.time)
        self._check_deleted()

    async def _publish(self, publication: EventBatch) -> None:
        """Publish, and give the fold the result."""
        result: PublicationStored | PublicationRefused | PublicationUnknown = PublicationUnknown()
        pause_s = RETRY_S
        try:
            result = await self._storing.store(publication)
            pause_s = 0.0
        except WrongLastSequence:
            result, pause_s = PublicationRefused(), 0.0
        except LogFull as why:
            pause_s = FULL_RETRY_S
            self._batch_max = max(CHAIN_EVENTS_MAX, self._batch_max // 2)
            self._note_writing(why)
            self._snapshotting.make_room(self.fold)
        except (LogMissing, MessageTooLarge):
            raise
        except UNCERTAIN as why:
            self._note_writing(why)
            self._storing.batches.allowed = self._storing.batches.allowed and not isinstance(why, StreamFailure)
        finally:
            effects = self.fold.handle(result, time.monotonic())
        await self._carry_out(effects)
        if isinstance(result, PublicationStored):
            self._room.set()
            self._note_writing(None)
            self._batch_max = min(BATCH_EVENTS_MAX, 2 * self._batch_max)
            self._check_recovered()
            self._check_deleted()
        elif isinstance(result, PublicationRefused) and self.fold.is_full:
            with contextlib.suppress(*UNCERTAIN):
                await self._look_at_end()
        if pause_s:
            await asyncio.sleep(pause_s)
