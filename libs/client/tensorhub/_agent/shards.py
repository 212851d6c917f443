"""The shards of one session: what the process knows of each, its registration, and its return on each new connection.

An `AttachedShard` is one shard of this process as its agent knows it: where it belongs, its memory, what it holds, and
what became of it. `ShardTable` registers the shards and registers them again on each new connection.

A restarted agent adopts its segments, so a shard that is registered again keeps its memory, and nothing changes for its
tensors. If the agent has other memory for the shard, the shard is lost and says so, because no agent reads the memory
of its tensors any more. A mapped shard has no segment of its own. It shows the segment of a holder, which no agent can
take away.

Invariants:
- `handle` is set exactly while the present connection to the agent has registered the shard.
- `segment` and `spare` never change once a caller's tensors are in one of them: an attachment whose memory was replaced
  is `lost`.
- At most one attachment is kept for each name.
- An attachment is unclaimed only if a register was cancelled or failed after the agent had answered, or if the memory
  was replaced. The next caller that registers the name takes it over.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from tensorhub._agent.channel import AgentChannel, ChannelLost
from tensorhub.errors import closed_error
from tensorhub_common.errors import (
    AgentUnavailable,
    DrainTimeout,
    LayoutMismatch,
    RegistryUnavailable,
    ReplicaConflict,
    TensorHubError,
)
from tensorhub_common.observability import logs
from tensorhub_common.protocol.worker import Loaded, ReadReport, RegisterCall, Registered
from tensorhub_common.runtime.own_descriptors import OwnDescriptors
from tensorhub_common.runtime.peer_status import PeerStatus
from tensorhub_common.runtime.supervision import Fault


class Key(NamedTuple):
    """Names a shard within a job."""

    model: str
    replica: str
    shard: int


class ShardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where a shard belongs and what it looks like. `layout` is a Layout as zstd-compressed MessagePack."""

    model: str
    replica: str
    shard: int
    shards: int
    spot: bool
    layout: bytes
    install: str = "in-place"
    device: str = ""
    """The UUID of the GPU in whose memory it is; empty: the host's."""

    @property
    def key(self) -> Key:
        """Return the shard's name."""
        return Key(self.model, self.replica, self.shard)

    @property
    def where(self) -> str:
        """Name the shard in a sentence."""
        return f"shard {self.shard} of {self.model}/{self.replica}"

    @property
    def is_mapped(self) -> bool:
        """Whether it shows the memory of others."""
        return self.install == "mapped"

    @property
    def keeps(self) -> bool:
        """Whether this process keeps the descriptors of its memory: no name leads back to a GPU's."""
        return bool(self.device) and not self.is_mapped

    def call(self, number: int, timeout_s: float, *, holds: int | None = None, partial: bool = False) -> RegisterCall:
        """Return the frame that registers the shard, and says what is in memory that this process has of it."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return RegisterCall(call=number, timeout_s=timeout_s, keeps=self.keeps, holds=holds, partial=partial, **fields)


_FIELDS = ShardSpec.__struct_fields__

Segment = tuple[int, int]
"""Device and inode: what tells a segment from all others while somebody has it open or mapped."""


class GivenSegment(NamedTuple):
    """Memory that an agent has given this process for a shard."""

    segment: int
    """What the agent calls memory of a GPU; 0: the host's."""
    fds: tuple[int, ...]
    """The memory's, and of a GPU's that of its locks where the agent gave one."""

    @property
    def name(self) -> Segment:
        """Tell it from all others: the descriptor of a GPU's memory says nothing."""
        if self.segment:
            return 0, self.segment
        status = os.fstat(self.fds[0])
        return status.st_dev, status.st_ino

    def close(self) -> None:
        """Close the descriptors."""
        close_all(self.fds)


class Lent(NamedTuple):
    """What a mapped shard is to show next."""

    fds: tuple[int, ...]
    """Of its holder's segment. The last one carries the holder's lock: of host memory it is the only one."""
    version: int


class HandedBackSegment(NamedTuple):
    """Memory of a GPU that this process keeps, so that the next process of its agent can take it back."""

    segment: int
    """What the agent calls it."""
    own: OwnDescriptors
    """The memory's, and that of its locks where the agent gave one. A child of this process has none of them."""


@dataclass(slots=True, eq=False)
class AttachedShard:
    """The session changes it as the agent speaks; a shard reads it."""

    spec: ShardSpec
    claimed: bool = True
    """A caller has it, or is about to. Without one, the next who registers the same shard takes it over."""
    registering: bool = True
    handle: int | None = None
    fd: int | None = None
    segment: Segment | None = None
    spare_fd: int | None = None
    spare: Segment | None = None
    """The other segment of a staged shard."""
    live: int = 0
    """Which the shard's present segment is, as the agent said last."""
    kept: list[HandedBackSegment] = field(default_factory=list)
    is_whole: bool = True
    """No read in place has begun since the memory was last known to be whole."""
    offered: int | None = None
    """The version that the agent was last told to be whole in `kept`, while it has not said what the shard holds."""
    lent: Lent | None = None
    """What a mapped shard is to show next."""
    fresh: bool = False
    found: int | None = None
    """The version that was ready in the memory when it was registered last, unless it was emptied since."""
    found_root: str = ""
    """The root of that version; empty where the agent does not say."""
    version: int | None = None
    report: ReadReport | None = None
    traceparent: str | None = None
    """The span that the last answer belongs to."""
    load_untold: bool = False
    """The values are in the memory, and the agent has not yet answered any frame that was sent after that."""
    busy: bool = False
    releasing: bool = False
    delayed: TensorHubError | None = None
    """Why it could not be brought back yet, while that is tried again."""
    lost: TensorHubError | None = None
    _lending: threading.Lock = field(default_factory=threading.Lock)
    """The agent lends in the event loop's thread, and a shard takes in its caller's."""

    def close_fd(self) -> None:
        """Close the segments' descriptors, if they are still open."""
        fds, self.fd, self.spare_fd = (self.fd, self.spare_fd), None, None
        close_all(fd for fd in fds if fd is not None)

    def take(self, live: GivenSegment, spare: GivenSegment | None) -> None:
        """Take over the memory of a shard that has none yet, of a staged one both segments."""
        self.segment, self.fd = live.name, self._keep(live)
        if spare is not None:
            self.spare, self.spare_fd = spare.name, self._keep(spare)

    def _keep(self, given: GivenSegment) -> int:
        """Keep memory of a GPU for as long as the shard is this process's; return the descriptor to map it by."""
        fd, *locks = given.fds
        if self.spec.keeps:
            self.kept.append(HandedBackSegment(given.segment, OwnDescriptors((os.dup(fd), *locks))))
        else:
            close_all(locks)
        return fd

    def let_go(self) -> None:
        """Close all descriptors."""
        self.close_fd()
        self.lend(None)
        kept, self.kept = self.kept, []
        for each in kept:
            each.own.close()

    def offer(self) -> int | None:
        """Return the version that is whole in the memory, for the registration that hands it back.

        An agent may be killed before it could say that it has it, so it is offered to the next one as well.
        """
        if self.version is not None:
            self.offered = self.version
        return self.offered if self.is_whole else None

    def forget_version(self) -> None:
        """Claim no version until the agent names one: it may be overwriting the tensors' own memory."""
        if self.spec.install == "in-place":
            self.version = None

    def lend(self, lent: Lent | None) -> None:
        """Take what a mapped shard is to show next, in place of what was not shown yet."""
        with self._lending:
            old, self.lent = self.lent, lent
        close_all(() if old is None else old.fds)

    def take_lent(self) -> Lent | None:
        """Return what a mapped shard is to show now; the descriptors are the caller's to close."""
        with self._lending:
            lent, self.lent = self.lent, None
        return lent

    @property
    def segments(self) -> tuple[int, int]:
        """Return which a staged shard's two segments are."""
        assert self.segment is not None
        assert self.spare is not None
        return self.segment[1], self.spare[1]


BRING_BACK_S: Final = 10.0
AGAIN_S: Final = 0.2
CONFLICT_S: Final = 3.0
"""How long the agent may take to notice that the connection before this one has ended."""

Ask = Callable[[AttachedShard, float], Awaitable[None]]
"""Registers a shard on the present connection, within a number of seconds. Raises `ChannelLost` when that ends."""

log = logs.logger(__name__)


class ShardTable:
    """All shards that this process has at one agent."""

    def __init__(self, link: AgentChannel, ask: Ask) -> None:
        self._link = link
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._by_key: dict[Key, AttachedShard] = {}
        self._by_handle: dict[int, AttachedShard] = {}
        self._attaching = PeerStatus(
            "attaching this process's shards again", lost="fails, so it is tried again", back="is done"
        )

    def is_gone(self, attachment: AttachedShard) -> bool:
        """Whether it was released, lost or replaced."""
        return self._by_key.get(attachment.spec.key) is not attachment

    # ---------------------------------------------------------------------------------------------- registering

    def forsaken(self, spec: ShardSpec) -> AttachedShard | None:
        """Return a shard of this name without a claim that must be freed before `spec` can be registered."""
        known = self._by_key.get(spec.key)
        if known is None or known.registering or known.spec == spec:
            return None
        return None if known.claimed or known.version is not None else known

    async def register(self, spec: ShardSpec, deadline: float) -> AttachedShard:
        """Register a shard, or take over the unclaimed one. Cancelled, it goes on and leaves the shard unclaimed."""
        known = self._by_key.get(spec.key)
        if known is not None:
            return await self._claim(known, spec, deadline)
        attachment = AttachedShard(spec)
        self._by_key[spec.key] = attachment
        what = f"registering {spec.where}"
        task = self._link.work.start(self._register(attachment, deadline), what, awaited=True)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            attachment.claimed = False
            if task.cancelled():
                # Not the caller was cancelled, but the hub was closed.
                raise closed_error() from None
            raise
        return attachment

    async def _claim(self, known: AttachedShard, spec: ShardSpec, deadline: float) -> AttachedShard:
        if known.claimed:
            raise ReplicaConflict(f"{spec.where} is registered by this process already: release it first")
        if known.spec != spec:
            raise LayoutMismatch(
                f"{spec.where} is registered with other tensors than these: register it with the same ones"
            )
        known.claimed = True
        try:
            await self.attached(known, deadline)
        except BaseException:
            known.claimed = False
            raise
        return known

    def leave(self, attachment: AttachedShard) -> None:
        """Keep the shard no longer, and leave it with the agent: the next who registers it gets the agent's word."""
        attachment.lost = attachment.lost or ReplicaConflict(f"{attachment.spec.where} was not registered to its end")
        self.forget(attachment)

    async def _register(self, attachment: AttachedShard, deadline: float) -> None:
        try:
            await self._insist(attachment, deadline)
        except BaseException as error:
            attachment.lost = error if isinstance(error, TensorHubError) else closed_error()
            self.forget(attachment)
            raise
        attachment.registering = False
        if attachment.handle is None and self._link.is_up:
            self._begin_bringing_back(attachment)

    async def _insist(self, attachment: AttachedShard, deadline: float) -> None:
        """Register a shard, again after each break."""
        patient_until = 0.0
        while True:
            await self._link.until_up(deadline)
            try:
                await self._ask(attachment, max(0.0, deadline - self._loop.time()))
            except ChannelLost:
                patient_until = min(deadline, self._loop.time() + CONFLICT_S)
            except ReplicaConflict:
                if self._loop.time() >= patient_until:
                    raise
                await asyncio.sleep(AGAIN_S)
            else:
                return

    def swapped(self, handle: int, segment: int) -> None:
        """Take over which segment a staged shard is in, as the agent says."""
        attachment = self._by_handle.get(handle)
        if attachment is not None:
            attachment.live, attachment.offered = segment, None

    def lend(self, handle: int, fds: tuple[int, ...], version: int) -> None:
        """Take the memory that a mapped shard is to show next."""
        attachment = self._by_handle.get(handle)
        if attachment is None:
            close_all(fds)
        else:
            attachment.lend(Lent(fds, version))

    def registered(
        self, attachment: AttachedShard, frame: Registered, fds: tuple[int, ...], spare: GivenSegment | None
    ) -> None:
        """Take the agent's word for a shard, and its descriptors. `spare`: the other segment of a staged one."""
        live = GivenSegment(frame.segment, fds)
        segment = live.name
        if attachment.segment is None:
            attachment.take(live, spare)
            attachment.fresh = frame.fresh
        elif segment in (attachment.segment, attachment.spare) or attachment.releasing or attachment.spec.is_mapped:
            live.close()
            if spare is not None:
                spare.close()
        else:
            attachment = self._replaced(attachment, live, spare)
        attachment.live = segment[1]
        attachment.handle, attachment.version, attachment.delayed = frame.handle, frame.version, None
        attachment.found, attachment.found_root = frame.version, frame.root
        self._by_handle[frame.handle] = attachment
        if attachment.load_untold and frame.version is None:
            self.loaded(attachment)
        self._link.notify()

    def _replaced(self, old: AttachedShard, live: GivenSegment, spare: GivenSegment | None) -> AttachedShard:
        """The agent has other memory for the shard than that of the caller's tensors."""
        old.lost = AgentUnavailable(
            f"the agent came back without the memory of {old.spec.where}, so what its tensors hold is no longer in "
            "the hub: register it again"
        )
        old.let_go()
        new = AttachedShard(old.spec, claimed=False, registering=False, fresh=True)
        new.take(live, spare)
        self._by_key[old.spec.key] = new
        log.warning("the agent came back without a shard's memory", shard=old.spec.where)
        return new

    async def attached(self, attachment: AttachedShard, deadline: float) -> int:
        """Wait until the shard is registered on the present connection and return its handle there."""
        await self._link.until(lambda: attachment.handle is not None or attachment.lost is not None, deadline)
        if attachment.lost is not None:
            raise attachment.lost
        if attachment.handle is None:
            raise attachment.delayed or self._link.unavailable()
        return attachment.handle

    # ------------------------------------------------------------------------------------------- coming and going

    def loaded(self, attachment: AttachedShard) -> None:
        """Tell the agent that every tensor's values are in the memory; again on a later connection if need be."""
        attachment.load_untold = attachment.is_whole = True
        if attachment.handle is not None:
            with contextlib.suppress(ChannelLost):
                self._link.send(Loaded(handle=attachment.handle))

    def holds(self, handle: int, version: int | None, trouble: str = "") -> None:
        """Take the agent's word for what a shard's replica holds now, and what is wrong with it."""
        attachment = self._by_handle.get(handle)
        if attachment is None:
            return
        attachment.version, attachment.offered = version, None
        if trouble:
            log.error("published tensors were overwritten", shard=attachment.spec.where, why=trouble)

    def detach(self) -> None:
        """The connection ended."""
        self._by_handle.clear()
        for attachment in self._by_key.values():
            attachment.handle = None

    def bring_back(self) -> None:
        """There is a new connection: register every shard on it."""
        for attachment in self._by_key.values():
            if not attachment.registering:
                self._begin_bringing_back(attachment)

    def _begin_bringing_back(self, attachment: AttachedShard) -> None:
        def lose(fault: Fault) -> None:
            why = f"this program failed with {type(fault.error).__name__}; its log says where"
            self._lose(attachment, AgentUnavailable(why))

        where = attachment.spec.where
        self._link.work.start(self._bring_back(attachment), f"attaching {where} again", lose)

    async def _bring_back(self, attachment: AttachedShard) -> None:
        """Register a shard on this connection, and say it once all of them are where that had failed."""
        await self._try_to_bring_back(attachment)
        # A shard that waits for the next connection is still late.
        if not any(each.delayed is not None for each in self._by_key.values()):
            self._attaching.answers()

    async def _try_to_bring_back(self, attachment: AttachedShard) -> None:
        """What can pass is tried again; any other refusal loses the shard."""
        patient_until = self._loop.time() + CONFLICT_S
        epoch = self._link.epoch
        while self._link.is_up and self._link.epoch == epoch and not self.is_gone(attachment):
            try:
                await self._ask(attachment, BRING_BACK_S)
            except ChannelLost:
                return
            except (AgentUnavailable, RegistryUnavailable, DrainTimeout) as error:
                attachment.delayed = error
                # A call whose caller no longer waits may go on at the agent, which refuses a second one meanwhile.
                patient_until = self._loop.time() + CONFLICT_S
                self._attaching.is_silent(f"{attachment.spec.where}: {error}")
            except TensorHubError as error:
                if not isinstance(error, ReplicaConflict) or self._loop.time() >= patient_until:
                    self._lose(attachment, error)
                    return
            else:
                return
            await asyncio.sleep(AGAIN_S)

    def _lose(self, attachment: AttachedShard, error: TensorHubError) -> None:
        attachment.lost = type(error)(f"{attachment.spec.where} could not be attached again, so it is lost: {error}")
        self.forget(attachment)
        log.warning("lost a shard", shard=attachment.spec.where, why=str(error))

    def forget(self, attachment: AttachedShard) -> None:
        """Keep the shard no longer."""
        if not self.is_gone(attachment):
            del self._by_key[attachment.spec.key]
        if attachment.handle is not None:
            self._by_handle.pop(attachment.handle, None)
            attachment.handle = None
        attachment.let_go()
        self._link.notify()

    def close(self) -> None:
        """Forget all shards, which stay with the agent."""
        for attachment in list(self._by_key.values()):
            attachment.lost = closed_error()
            self.forget(attachment)


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
