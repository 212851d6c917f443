"""All that one hub object says to its agent: calls about shards, through whatever becomes of the connection.

Always true: every call ends within its own bound, or within `END_S_MIN`; a call is sent on a connection only after its
shard was registered there; what the agent says is taken in the order in which it was said, before any caller wakes up.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tensorhub._agent.call_spans import Tracing
from tensorhub._agent.calls import UNSENT, AgentCall, ReadRequest, ReleaseRequest, UnpublishRequest
from tensorhub._agent.channel import AgentChannel, ChannelLost
from tensorhub._agent.shards import AttachedShard, GivenSegment, ShardSpec, ShardTable, close_all
from tensorhub.errors import closed_error
from tensorhub_common.errors import AgentUnavailable, NotPublished, ReplicaConflict, TensorHubError, from_code
from tensorhub_common.observability import logs
from tensorhub_common.protocol.call_deadlines import END_S_MIN, bound_of
from tensorhub_common.protocol.worker import (
    CALLS_MAX,
    REGISTERING_MAX,
    Attached,
    Call,
    Copied,
    Done,
    Failed,
    FromAgent,
    HandedBack,
    HoldingChanged,
    Mapped,
    Progress,
    Registered,
    ReleaseCall,
    Spare,
    Swapped,
    UnpublishCall,
)

OnProgress = Callable[[int, int], None]
"""Takes (bytes done, bytes in all) a few times a second. The event loop calls it, so it must return soon."""

log = logs.logger(__name__)


@dataclass(slots=True)
class _Pending:
    """A call that was sent on the present connection."""

    answer: "asyncio.Future[Done | None]"
    attachment: AttachedShard
    question: AgentCall | None = None
    on_progress: OnProgress | None = None
    spare: GivenSegment | None = None
    """Of a registration: the other segment of a staged shard, which the agent gives before its answer."""


class AgentSession:
    """The shards of one hub object at its agent. It belongs to the event loop that made it."""

    def __init__(self, socket_path: Path, job: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._link = AgentChannel(socket_path, job, self._take, self._on_up, self._on_down, self._last_words)
        self._attachments = ShardTable(self._link, self._register)
        self.tracing = Tracing(job, self._link.send, self._link.push)
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._turns = asyncio.Semaphore(REGISTERING_MAX)
        """Of shards that register: the agent refuses more at a time."""

    def _last_words(self) -> None:
        """The event loop ends without `close`: hand over what was made of the calls before."""
        self.tracing.flush()

    @property
    def is_connected(self) -> bool:
        """Whether the agent serves this session now."""
        return self._link.is_up

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that connected."""
        return self._link.is_forked

    @property
    def agent(self) -> Attached:
        """What the agent said of itself last. Only after `open`."""
        assert self._link.agent is not None
        return self._link.agent

    @property
    def socket_path(self) -> Path:
        """Where the agent listens."""
        return self._link.socket_path

    async def open(self, timeout_s: float) -> Attached:
        """Reach the agent for the first time. Raises `AgentUnavailable` at the bound, or the agent's refusal."""
        return await self._link.open(timeout_s)

    def check(self) -> None:
        """Raise `AgentUnavailable` in a child of `fork`, and after `close`."""
        self._link.check()

    async def close(self) -> None:
        """End the connection and all calls. Shards that were not released stay with the agent."""
        pending, self._pending = list(self._pending.values()), {}
        for each in pending:
            if not each.answer.done():
                each.answer.set_exception(closed_error())
        self._attachments.close()
        self.tracing.flush()
        await self._link.close()

    def drop(self) -> None:
        """Close the socket of a session whose event loop has ended."""
        self._link.drop()

    # -------------------------------------------------------------------------------------------------- shards

    def deadline(self, timeout_s: float) -> float:
        """Return the end of a bound that begins now."""
        return self._loop.time() + timeout_s

    async def register(self, spec: ShardSpec, deadline: float) -> AttachedShard:
        """Register a shard. Its descriptor stays open until `close_fd`; if cancelled, the shard is left unclaimed."""
        self.check()
        forsaken = self._attachments.forsaken(spec)
        if forsaken is not None:
            # An interrupted register left it behind, with other tensors and nothing of value in it.
            forsaken.claimed = True
            try:
                await self.release(forsaken, max(0.0, deadline - self._loop.time()))
            except BaseException:
                forsaken.claimed = False
                raise
        return await self._attachments.register(spec, deadline)

    async def empty(self, attachment: AttachedShard, deadline: float) -> None:
        """Unpublish what a shard was found with, before its worker has it. On failure the shard is left to the agent.

        It may be draining then: another process that registers it first waits for the end of that, and this one gets
        `ReplicaConflict`.
        """
        try:
            await self.ask(
                attachment, UnpublishRequest(UnpublishCall(**UNSENT)), max(0.0, deadline - self._loop.time())
            )
        except NotPublished:
            pass
        except BaseException:
            self._attachments.leave(attachment)
            raise
        attachment.found = None

    def loaded(self, attachment: AttachedShard) -> None:
        """Tell the agent that every tensor's values are in the memory."""
        self._attachments.loaded(attachment)

    def copied(self, attachment: AttachedShard, copy: int, nbytes: int) -> None:
        """Tell the agent that a copy has brought the first bytes of a shard's memory. It is called from any thread."""
        work = self._link.work
        # Where the loop has ended, the call has too.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work.guarded(self._tell_copied, "a copy"), attachment, copy, nbytes)

    def _tell_copied(self, attachment: AttachedShard, copy: int, nbytes: int) -> None:
        if attachment.handle is not None and self.agent.takes_copied:
            with suppress(ChannelLost, AgentUnavailable):
                self._link.send(Copied(handle=attachment.handle, copy=copy, nbytes=nbytes))

    async def release(self, attachment: AttachedShard, timeout_s: float) -> None:
        """Drain a shard and free it. One that is gone already is no error."""
        self.check()
        if self._attachments.is_gone(attachment):
            return
        attachment.releasing = True
        try:
            await self.ask(attachment, ReleaseRequest(ReleaseCall(**UNSENT)), timeout_s)
        finally:
            attachment.releasing = False
        attachment.lost = ReplicaConflict(f"{attachment.spec.where} is released: register it again")
        self._attachments.forget(attachment)

    async def _register(self, attachment: AttachedShard, timeout_s: float) -> None:
        epoch, deadline = self._link.epoch, self._loop.time() + timeout_s
        await self._take_turn(attachment, deadline)
        try:
            if self._link.epoch != epoch:
                raise ChannelLost(self._link.reason)
            left_s = max(0.0, deadline - self._loop.time())
            pending = _Pending(self._loop.create_future(), attachment)
            end = self._loop.time() + bound_of(left_s).end_s
            await self._send(pending, lambda number: self._registration(attachment, number, left_s), timeout_s, end)
        finally:
            self._turns.release()
        if attachment.lost is not None:
            raise attachment.lost

    def _registration(self, attachment: AttachedShard, number: int, left_s: float) -> Call:
        """Return the frame that registers a shard, once the memory that this process keeps for it was sent ahead."""
        for kept in attachment.kept if self.agent.takes_handed_back else ():
            is_live, fds = kept.segment == attachment.live, kept.own.fds
            frame = HandedBack(call=number, segment=kept.segment, is_live=is_live, descriptors=len(fds))
            self._link.send(frame, *fds)
        return attachment.spec.call(number, left_s, holds=attachment.offer(), partial=not attachment.is_whole)

    async def _take_turn(self, attachment: AttachedShard, deadline: float) -> None:
        """Wait until one of the turns is free. Raises `AgentUnavailable` at the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._turns.acquire()
        except TimeoutError:
            raise AgentUnavailable(
                f"the agent at {self._link.socket_path} was still busy with {REGISTERING_MAX} other shards of this "
                f"process when the time for {attachment.spec.where} was over: allow more"
            ) from None

    # -------------------------------------------------------------------------------------------------- calling

    async def ask(
        self, attachment: AttachedShard, question: AgentCall, timeout_s: float, on_progress: OnProgress | None = None
    ) -> Done:
        """Ask about a shard, again after each break, and return the answer. One call at a time for each shard."""
        self.check()
        with self.occupied(attachment):
            return await self._ask(attachment, question, timeout_s, on_progress)

    @contextmanager
    def occupied(self, attachment: AttachedShard) -> Iterator[None]:
        """Have no other call on the shard within the block. Raises `ReplicaConflict` where there is one."""
        if attachment.busy:
            raise ReplicaConflict(
                f"{attachment.spec.where} has a call under way: wait for its end, one at a time is possible"
            )
        attachment.busy = True
        try:
            yield
        finally:
            attachment.busy = False

    async def _ask(
        self, attachment: AttachedShard, question: AgentCall, timeout_s: float, on_progress: OnProgress | None
    ) -> Done:
        began, before, live_before, broken = self._loop.time(), attachment.version, attachment.live, False
        # The memory may be another version's after this call.
        attachment.offered = None
        end = began + bound_of(timeout_s).end_s
        while True:
            handle = await self._attachments.attached(attachment, began + timeout_s)
            answer = question.settled(before, attachment.version) if broken else None
            if isinstance(question, ReadRequest) and attachment.spare is not None and attachment.live != live_before:
                # The read was done before the connection broke, and its bytes are where the tensors do not show them.
                answer = Done(call=0, version=attachment.version)
            if answer is not None:
                return answer
            spent_s = self._loop.time() - began
            left_s = max(0.0, timeout_s - spent_s)
            pending = _Pending(self._loop.create_future(), attachment, question, on_progress)

            def frame(number: int, handle: int = handle, left_s: float = left_s, spent_s: float = spent_s) -> Call:
                return question.frame(number, handle, left_s, spent_s)

            # With an answer it is whole again where the agent has not said that the version there is given up.
            was_whole = attachment.is_whole
            attachment.is_whole = was_whole and not question.may_tear(attachment.spec.install)
            try:
                done = await self._send(pending, frame, timeout_s, end)
            except ChannelLost:
                broken = True
                continue
            except TensorHubError as error:
                attachment.is_whole = attachment.is_whole or attachment.version is not None
                excuse = question.excused(error, before, attachment.version) if broken else None
                if excuse is None:
                    raise
                return excuse
            assert done is not None
            attachment.is_whole = was_whole or attachment.version is not None
            return question.answered(done, before, attachment.version) if broken else done

    async def _send(self, pending: _Pending, frame: Callable[[int], Call], timeout_s: float, end: float) -> Done | None:
        """Send a call and wait for its answer until `end`, in the loop's time: that of the caller's bound."""
        if len(self._pending) >= CALLS_MAX:
            raise AgentUnavailable(f"{CALLS_MAX} calls are under way on this connection: wait for some of them")
        number = next(self._numbers)
        self._pending[number] = pending
        try:
            self._link.send(frame(number))
            async with asyncio.timeout_at(end):
                return await pending.answer
        except TensorHubError:
            # Some of the agent's answers are a `TimeoutError` too.
            raise
        except TimeoutError:
            raise AgentUnavailable(
                f"the agent at {self._link.socket_path} did not answer within {max(timeout_s, END_S_MIN):.3g} s: see "
                "'tensorhub doctor', then call again"
            ) from None
        finally:
            if pending.spare is not None:
                # The agent has not come to its answer, and its next process may have other memory.
                pending.spare.close()
            if self._pending.pop(number, None) is not None and isinstance(pending.question, ReadRequest):
                # Without an answer the read goes on at the agent, which may have begun to overwrite the memory.
                pending.attachment.forget_version()

    # --------------------------------------------------------------------------------- what the agent tells us

    def _on_up(self) -> None:
        self._attachments.bring_back()

    def _on_down(self) -> None:
        self._attachments.detach()
        pending, self._pending = list(self._pending.values()), {}
        for each in pending:
            if not each.answer.done():
                each.answer.set_exception(ChannelLost(self._link.reason))

    def _take(self, frame: FromAgent, fds: tuple[int, ...]) -> None:
        """Take a frame. A fault of ours fails the call that it is about, or else ends the connection."""
        try:
            self._take_frame(frame, fds)
        except Exception as error:
            pending = self._pending.pop(getattr(frame, "call", 0), None)
            if pending is None:
                raise
            self._link.work.fault(f"taking {type(frame).__name__}", error)
            if not pending.answer.done():
                why = f"this program failed with {type(error).__name__} on the agent's answer; its log says where"
                pending.answer.set_exception(TensorHubError(why))

    def _take_frame(self, frame: FromAgent, fds: tuple[int, ...]) -> None:
        match frame:
            case Registered():
                self._take_registered(frame, fds)
            case Spare():
                self._take_spare(frame, fds)
            case Swapped():
                self._attachments.swapped(frame.handle, frame.segment)
            case Mapped():
                self._attachments.lend(frame.handle, fds, frame.version)
            case Done():
                self._take_done(frame)
            case Failed():
                pending = self._answered(frame.call)
                if pending is not None:
                    pending.attachment.traceparent = frame.traceparent
                    pending.answer.set_exception(from_code(frame.error, frame.message))
            case Progress():
                self._take_progress(frame)
            case HoldingChanged():
                self._attachments.holds(frame.handle, frame.version, frame.trouble)
            case _:
                log.warning("the agent sent a frame out of turn", frame=type(frame).__name__)

    def _answered(self, call: int) -> _Pending | None:
        """Return the call that this answers, or None when its caller no longer waits."""
        pending = self._pending.pop(call, None)
        if pending is None or pending.answer.done():
            return None
        if pending.question is not None:
            pending.attachment.load_untold = False
        return pending

    def _take_spare(self, frame: Spare, fds: tuple[int, ...]) -> None:
        given, pending = GivenSegment(frame.segment, fds), self._pending.get(frame.call)
        if pending is None:
            given.close()
        else:
            pending.spare = given

    def _take_registered(self, frame: Registered, fds: tuple[int, ...]) -> None:
        pending = self._answered(frame.call)
        if pending is not None:
            spare, pending.spare = pending.spare, None
            self._attachments.registered(pending.attachment, frame, fds, spare)
            pending.answer.set_result(None)
        else:
            close_all(fds)

    def _take_done(self, done: Done) -> None:
        pending = self._answered(done.call)
        if pending is None:
            return
        attachment = pending.attachment
        if pending.question is not None:
            attachment.version = pending.question.holds(done, attachment.version)
        attachment.report = done.report or attachment.report
        attachment.traceparent = done.traceparent
        pending.answer.set_result(done)

    def _take_progress(self, frame: Progress) -> None:
        pending = self._pending.get(frame.call)
        if pending is None or pending.on_progress is None:
            return
        try:
            pending.on_progress(frame.done_bytes, frame.total_bytes)
        except Exception:
            log.exception("a progress callback failed, and is not called again")
            pending.on_progress = None
