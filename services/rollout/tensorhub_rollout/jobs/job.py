"""One job's rollouts: the fold of their log, and while this manager leads, the leader and what it wants done. I/O.

It drives `core.fold` and `core.leader` and decides nothing itself.

Invariants:
- The leader begins once its own `lead` is folded, and ends with the first later one, whatever the lease says.
- An entry is folded once, in the order of the log.
- What the log no longer names is removed only by the leader.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Final, NoReturn

from msgspec.structs import replace

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import UNCERTAIN, BlobMissing, LogGap
from tensorhub_common.errors import IntegrityError, RolloutUnavailable, TensorHubError
from tensorhub_common.jetstream.api import time_ns_of
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.jetstream.payload_store import PayloadStore
from tensorhub_common.jetstream.rollout_log import RolloutLog, RolloutLogEntry
from tensorhub_common.machine import Tick
from tensorhub_common.observability.logs import logger
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import Hold
from tensorhub_common.protocol.rollout.entries import Lead, RequestId
from tensorhub_common.protocol.rollout.messages import PublishedVersions
from tensorhub_common.protocol.rollout.questions import (
    FollowAnswer,
    FollowQuestion,
    OutcomeAnswer,
    OutcomeQuestion,
    ReadyAnswer,
    ReadyQuestion,
    RolloutStatus,
    SeedingAnswer,
    SeedingQuestion,
    WhyAnswer,
    WhyQuestion,
)
from tensorhub_common.protocol.subjects import command_subject
from tensorhub_common.runtime.supervision import Supervisor, log_only
from tensorhub_rollout.answers.following import Following
from tensorhub_rollout.answers.sdk import answer_outcome, answer_ready, has_ready, newest_of
from tensorhub_rollout.answers.status import status_of
from tensorhub_rollout.answers.why import why_of
from tensorhub_rollout.core.leader import Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import (
    AbortAnswered,
    AssignAnswered,
    BusChanged,
    EntryFolded,
    InstanceLost,
    LeaderEffect,
    LeaderInput,
    LoadingFailed,
    LoadPrefix,
    LoadPrompt,
    RoomSeen,
    SendAbort,
    SendAssign,
    StoreEnd,
    StoreTokens,
    StoringFailed,
    VersionsSeen,
)
from tensorhub_rollout.decisions.decisions import Decisions, PolicyLimits
from tensorhub_rollout.decisions.version_holds import HOLDER, HoldWord
from tensorhub_rollout.jobs.ages import ResponseAges
from tensorhub_rollout.jobs.counts import RolloutCounts
from tensorhub_rollout.jobs.entry_writer import EntryWriter
from tensorhub_rollout.jobs.payload_reader import PayloadReader
from tensorhub_rollout.jobs.payload_removal import PayloadRemoval
from tensorhub_rollout.jobs.published_versions import VersionFollower
from tensorhub_rollout.jobs.response_spans import ResponseSpans
from tensorhub_rollout.jobs.runner_outbox import RunnerOutbox
from tensorhub_rollout.jobs.snapshots import RolloutSnapshots, SnapshotMaker
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.outcomes import Leads, Outcome
from tensorhub_rollout.log.state import RolloutState

OUTCOMES_MAX: Final = 4096
"""Limit of the outcomes that are remembered for those who ask, the latest."""
FOLD_S_MAX: Final = 2.0
"""So long a question waits for the entry that it names."""
VERSION_S_MAX: Final = 1.0
"""So long a question waits for the version that it names, and a request for the one that its trainer knew of."""
FOLLOW_LOOK_S: Final = 0.02
"""How often the responses of a question are looked at that waits for their tokens: frames come more seldom."""
FOLD_BURST: Final = 64
"""Other work has its turn after this many entries."""
CLAIM_AGAIN_S: Final = 1.0
"""A claim of the term that did not count is repeated after this."""
ROOM_LOOK_S: Final = 10.0
"""How often the limit of payloads is looked up."""
HOLD_TIMEOUT_S: Final = 2.0
"""A hold that the log has not taken by then is said anew."""
LOAD_AGAIN_S: Final = 0.2
"""The pause after a payload could not be read because NATS did not answer."""

_log: Final = logger(__name__)


class RolloutJob:
    """The rollouts of one job in one manager: `run` until cancelled, then `close`."""

    def __init__(self, bus: Bus, job: str, manager: str, limits: LeaderLimits, policies: PolicyLimits) -> None:
        """Prepare. `manager` names this process: no other one has ever had this name."""
        self.name, self.manager = job, manager
        self.state = RolloutState(job)
        self.leader: Leader | None = None
        self._bus, self._limits, self._policies = bus, limits, policies
        self._log = RolloutLog(bus, job)
        self._created = ""
        """When the log was made: later ones are higher as text."""
        self._store = PayloadStore(bus)
        self._payloads = PayloadReader(job, self._store)
        self._work = Supervisor(f"rollouts of job {job!r}", on_fault=log_only)
        self._leading = self._work.group()
        self._writer: EntryWriter | None = None
        self._outboxes: dict[str, RunnerOutbox] = {}
        self._versions = VersionFollower(bus, job, self._see_versions)
        self._versions_changed = asyncio.Event()
        self._recent: OrderedDict[int, Outcome] = OrderedDict()
        self._folded = asyncio.Condition()
        self._may_lead = False
        self._decisions = self._new_decisions()
        self._is_unled = asyncio.Event()
        """Set while this manager has the lease and does not lead."""
        self.counts = RolloutCounts()
        self.payload_bytes_max = 0
        """How much payloads may take, as it was last seen while this manager led; 0: not known, or any number."""
        self._spans = ResponseSpans()
        self.ages = ResponseAges(job)
        self._snapshots = RolloutSnapshots(bus, self._log)
        self._snapshot_maker = SnapshotMaker(self._snapshots)
        self._removal = PayloadRemoval(job, self._store, self._payloads, lambda: self.state)

    # ------------------------------------------------------------------------------------------ the log

    async def run(self) -> NoReturn:
        """Fold the log. Raises `LogMissing` without one, and what can't be mended by waiting."""
        self._created = f"{time_ns_of((await self._log.extent()).created):020d}"
        self._work.start(self._versions.run(), "following the versions")
        self._work.start(self._claim_always(), "claiming the term")
        while True:
            await self._restore()
            with suppress(LogGap):
                # The log was trimmed beyond what is folded here: a snapshot bridges that.
                await self._follow()

    async def _restore(self) -> None:
        """Go on from a snapshot that lies ahead, if there is one. Raises `LogGap` where one is needed."""
        while True:
            try:
                state = await self._snapshots.newest(self.state.seq)
                break
            except UNCERTAIN as why:
                _log.debug("the snapshots can't be read yet", job=self.name, why=str(why))
            await asyncio.sleep(LOAD_AGAIN_S)
        if state is not None:
            self._stop_leading()
            self._note_unled()
            self.state = state

    async def _follow(self) -> None:
        taken = 0
        async with aclosing(self._log.follow(self.state.seq + 1)) as entries:
            async for stored in entries:
                await self._take(stored)
                taken += 1
                if taken % FOLD_BURST == 0:
                    await asyncio.sleep(0)

    async def _take(self, stored: RolloutLogEntry) -> None:
        folded = fold(self.state, stored.seq, stored.entry)
        self._recent[stored.seq] = folded.outcome
        if len(self._recent) > OUTCOMES_MAX:
            self._recent.popitem(last=False)
        # Before the leader forgets what has ended.
        self._spans.take(self.leader, stored, folded.outcome)
        self.ages.take(self.leader, folded.outcome)
        if isinstance(folded.outcome, Leads):
            self._led(folded.outcome)
        elif self.leader is not None:
            self._tell(EntryFolded(folded.outcome))
        if self.state.manager == self.manager:
            # By the log, not by the lease: so one manager counts each entry, and no entry is counted twice.
            self.counts.fold(self.state, folded.outcome)
        if self.leader is not None:
            for digest in folded.freed:
                self._removal.free(digest)
            self._snapshot_maker.note(self.state)
        async with self._folded:
            self._folded.notify_all()

    # ------------------------------------------------------------------------------------------ leading

    def lead(self) -> None:
        """Claim the term: this manager has the lease."""
        self._may_lead = True
        self._note_unled()

    def stand_down(self) -> None:
        """Lead no more: the lease is lost, or given back."""
        self._may_lead = False
        self._stop_leading()
        self._note_unled()

    def _note_unled(self) -> None:
        if self._may_lead and self.leader is None:
            self._is_unled.set()
        else:
            self._is_unled.clear()

    async def _claim_always(self) -> NoReturn:
        while True:
            await self._is_unled.wait()
            term = self.state.term + 1
            try:
                await self._log.append(Lead(term, self.manager), f"lead-{term}-{self.manager}")
            except TensorHubError as why:
                _log.debug("the term could not be claimed", job=self.name, why=str(why))
            await self._wait_folded(partial(self._is_below, term), CLAIM_AGAIN_S)

    def _is_below(self, term: int) -> bool:
        return self.state.term < term

    def _led(self, leads: Leads) -> None:
        self._stop_leading()
        if leads.manager != self.manager or not self._may_lead:
            self._note_unled()
            return
        _log.info("leads the rollouts", job=self.name, term=leads.term)
        self.leader = Leader(self.state, self._created, self._limits, time.monotonic())
        self._leading = self._work.group()
        self._writer = EntryWriter(self._log, self._payloads, leads.term, self._storing_failed)
        self._leading.start(self._writer.run(), "writing entries")
        self._leading.start(self._look_always(), "looking at time")
        self._leading.start(self._removal.run_freed(), "removing payloads")
        self._leading.start(self._removal.run_orphans(), "looking for payloads that nothing names")
        self._leading.start(self._snapshot_maker.run(), "keeping snapshots")
        self._leading.start(self._look_at_room_always(), "looking at the room for payloads")
        self._note_unled()
        self._decisions = self._new_decisions()
        for seen in self._versions.seen.values():
            self._tell(seen)

    def _new_decisions(self) -> Decisions:
        return Decisions(self._policies, self._work.fault)

    def _stop_leading(self) -> None:
        if self.leader is None:
            return
        _log.info("stands down", job=self.name, term=self.leader.term)
        self.counts.end(self.leader)
        self.ages.forget()
        self.leader = self._writer = None
        self._leading.cancel()
        for outbox in self._outboxes.values():
            outbox.close()
        self._outboxes.clear()

    def on_connection(self, *, is_connected: bool) -> None:
        """Note that the connection to NATS came or went."""
        self._tell(BusChanged(is_connected))

    async def close(self) -> None:
        """End."""
        self.stand_down()
        self._spans.close()
        await self._work.close()

    # ------------------------------------------------------------------------------------------ the leader

    def tell(self, event: LeaderInput) -> list[LeaderEffect]:
        """Give an event to the leader; carry out what it wants done, and return its answers. None where none leads."""
        leader = self.leader
        if leader is None:
            return []
        return [effect for effect in leader.handle(event, time.monotonic()) if not self._do(effect)]

    def _tell(self, event: LeaderInput) -> None:
        self.tell(event)

    def _do(self, effect: LeaderEffect) -> bool:
        """Carry out what the leader wants; False: it is an answer to what came."""
        match effect:
            case SendAssign(runner=runner, request=assign):
                self._outbox(runner).assign(assign)
            case SendAbort(runner=runner, request=abort):
                self._outbox(runner).abort(abort)
            case LoadPrompt(request=of):
                self._load_prompt(of)
            case LoadPrefix(request=of):
                self._leading.start(self._load_prefix(of), "reading a checkpoint")
            case StoreEnd() if self._writer is not None:
                self._writer.end(effect)
            case StoreTokens() if self._writer is not None:
                self._writer.keep(effect)
            case InstanceLost(runner=runner, reason=reason, is_left=is_left):
                if is_left:
                    _log.info("an instance has left", job=self.name, runner=runner)
                else:
                    _log.warning("an instance is lost", job=self.name, runner=runner, why=reason)
                outbox = self._outboxes.pop(runner, None)
                if outbox is not None:
                    outbox.close()
            case _:
                return False
        return True

    def _outbox(self, runner: str) -> RunnerOutbox:
        found = self._outboxes.get(runner)
        if found is None:
            found = self._outboxes[runner] = RunnerOutbox(self._bus, self.name, runner, self._leading, self._answered)
        return found

    def _answered(self, answer: AssignAnswered | AbortAnswered) -> None:
        self._tell(answer)

    def _load_prompt(self, of: RequestId) -> None:
        found = self._payloads.known_prompt(self.state, of)
        if found is not None and self._versions.has_seen(self.state.model_of(of), found.newest):
            self._tell(found)
        else:
            self._leading.start(self._read_prompt(of), "reading a prompt")

    async def _read_prompt(self, of: RequestId) -> None:
        while self.state.request(of) is not None:
            try:
                await self._payloads.read_prompts(self.state, of)
            except UNCERTAIN as why:
                _log.debug("a prompt can't be read yet", job=self.name, why=str(why))
                await asyncio.sleep(LOAD_AGAIN_S)
                continue
            except (BlobMissing, IntegrityError) as why:
                self._tell(LoadingFailed(of, f"its prompt can't be read: {why}"))
                return
            found = self._payloads.known_prompt(self.state, of)
            if found is not None:
                # Its trainer may have published a moment ago: on what it may begin is judged with that.
                await self._see_version(self.state.model_of(of), found.newest)
                self._tell(found)
            return

    async def _load_prefix(self, of: RequestId) -> None:
        while True:
            try:
                found = await self._payloads.read_prefix(self.state, of)
            except UNCERTAIN as why:
                _log.debug("a checkpoint can't be read yet", job=self.name, why=str(why))
                await asyncio.sleep(LOAD_AGAIN_S)
                continue
            except (BlobMissing, IntegrityError) as why:
                self._tell(LoadingFailed(of, f"the tokens that were kept of it can't be read: {why}"))
                return
            if found is not None:
                self._tell(found)
            return

    def _storing_failed(self, requests: tuple[RequestId, ...]) -> None:
        self._tell(StoringFailed(requests))

    def _see_versions(self, seen: VersionsSeen) -> None:
        self._tell(seen)
        self._versions_changed.set()

    async def _see_version(self, model: str, version: int | None) -> None:
        """Wait until a version that is published is seen here, a moment at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(VERSION_S_MAX):
                while not self._versions.has_seen(model, version):
                    self._versions_changed.clear()
                    await self._versions_changed.wait()

    async def _look_always(self) -> NoReturn:
        """Let the leader look at the time, and the policy at the fleet."""
        while True:
            await asyncio.sleep(self._limits.look_s)
            self._tell(Tick())
            self._follow_policies()

    def _follow_policies(self) -> None:
        leader = self.leader
        if leader is None:
            return
        now = time.monotonic()
        for model in leader.fleet.models():
            for wanted in self._decisions.look(leader, model, now):
                self._tell(wanted)
        # Also where no instance is left.
        for model in self._versions.seen:
            word = self._decisions.hold(leader, model, now)
            if word is not None:
                self._leading.start(self._say_hold(word, leader.term), "holding versions")
        wished = self._decisions.scale(leader, now)
        if wished is not None and self._writer is not None:
            self._writer.scale(wished.instances, wished.reason)

    async def _say_hold(self, word: HoldWord, term: int) -> None:
        """Append what is held. What the log does not take is said again, since it does not stand there."""
        hold = Hold(model=word.model, holder=HOLDER, term=term, n=word.n, versions=word.versions, lasts_s=word.lasts_s)
        msg_id = f"hold-{self._created}-{word.model}-{term}-{word.n}"
        try:
            await JobLog(self._bus, self.name).append(
                command_subject(self.name, "hold"), encode(hold), msg_id, timeout_s=HOLD_TIMEOUT_S
            )
        except TensorHubError as why:
            _log.debug("a hold could not be written", job=self.name, versions=word.versions, why=str(why))

    async def _look_at_room_always(self) -> NoReturn:
        """Tell the leader how much payloads may have: an operator may change that."""
        while True:
            try:
                self.payload_bytes_max = (await self._store.extent(self.name)).bytes_max
            except TensorHubError as why:
                # A leader that does not know takes it for any number, so it is asked again at once.
                _log.debug("the room for payloads can't be read yet", job=self.name, why=str(why))
                await asyncio.sleep(LOAD_AGAIN_S)
                continue
            self._tell(RoomSeen(self.payload_bytes_max))
            await asyncio.sleep(ROOM_LOOK_S)

    # ------------------------------------------------------------------------------------------ questions

    async def outcome(self, question: OutcomeQuestion) -> OutcomeAnswer:
        """Say what became of an entry. Raises `RolloutUnavailable` where it is not folded within `FOLD_S_MAX`."""
        await self._reach(question.seq)
        newest = newest_of(self.state, question, self._published())
        return replace(answer_outcome(self.state, self._recent, question), newest=newest)

    async def ready(self, question: ReadyQuestion) -> ReadyAnswer:
        """Say what has ended. Raises `RolloutUnavailable` where the entry is not folded within `FOLD_S_MAX`."""
        await self._reach(question.seq)
        await self._wait_folded(lambda: not has_ready(self.state, question), question.wait_s)
        leader = self.leader
        serving, is_full = ({}, False) if leader is None else (leader.fleet.serving(), leader.open_requests.is_full())
        return answer_ready(self.state, question, serving, self._published(), is_full=is_full)

    async def follow(self, question: FollowQuestion) -> FollowAnswer:
        """Say what is new of responses. Raises `RolloutUnavailable` as `ready`, and where this manager doesn't lead."""
        await self._reach(question.seq)
        leader, loop = self.leader, asyncio.get_running_loop()
        if leader is None:
            raise self._leads_not()
        following, until = Following(self.state, question), loop.time() + question.wait_s
        # Frames come far more often than this is looked at: nothing is done for a frame because of who follows.
        while not (answer := following.answer(leader.responses)).rows and answer.error is None and loop.time() < until:
            await asyncio.sleep(FOLLOW_LOOK_S)
            if self.leader is not leader:
                raise self._leads_not()
        return answer

    def _published(self) -> dict[str, PublishedVersions]:
        return {model: seen.versions for model, seen in self._versions.seen.items()}

    async def seeding(self, question: SeedingQuestion) -> SeedingAnswer:
        """Say how long to seed. Raises `RolloutUnavailable` where this manager doesn't lead."""
        # What a trainer has just published is under way to here.
        models = {each.model for each in self.state.consumers.values() if each.attachment == question.attachment}
        for model in models:
            await self._see_version(model, question.version)
        if self.leader is None:
            raise self._leads_not()
        return self._decisions.seeding(self.leader, question, self._versions.root_of, time.monotonic())

    def status(self) -> RolloutStatus:
        """Return the state of the job's rollouts. Raises `RolloutUnavailable` where this manager doesn't lead."""
        if self.leader is None:
            raise self._leads_not()
        return status_of(self.leader)

    async def why(self, question: WhyQuestion) -> WhyAnswer:
        """Say what a group's responses wait for. Raises `BadCommand` without one, and as `status` does."""
        if self.leader is None:
            raise self._leads_not()
        held_of = partial(self._decisions.held, self.leader)
        story_of = partial(self._decisions.hold_story, self.leader)
        return why_of(self.leader, question, held_of, story_of, time.monotonic())

    def _leads_not(self) -> RolloutUnavailable:
        return RolloutUnavailable(f"manager {self.manager!r} does not lead the rollouts of job {self.name!r}")

    async def _reach(self, seq: int) -> None:
        if not await self._wait_folded(lambda: self.state.seq < seq, FOLD_S_MAX):
            raise RolloutUnavailable(
                f"the manager has folded the rollouts of job {self.name!r} up to {self.state.seq}, not to {seq}, after "
                f"{FOLD_S_MAX:g} s: ask again"
            )

    async def _wait_folded(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Wait while it is so, at most this long; tell whether it ended to be so."""
        try:
            async with asyncio.timeout(timeout_s), self._folded:
                await self._folded.wait_for(lambda: not is_so())
        except TimeoutError:
            return False
        return True
