"""One shard in hub memory, as its worker uses it.

Always true: `tensors` are the same objects for the shard's whole life, standing in memory that the agent owns; they
stay valid while they are referenced, also after `release`. Those of a staged or mapped shard show other memory after a
read, and change only within a call of the shard (installs.py). One call at a time is possible on a shard; a
second one raises `ReplicaConflict` at once and changes nothing.

A call that is cancelled (Ctrl-C, `asyncio.timeout`) ends here and goes on at the agent until its own bound, so the
memory may still be written; until then further calls on the shard raise `ReplicaConflict`.
"""

import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast

import msgspec

from tensorhub import arguments
from tensorhub._agent.calls import UNSENT, PublishRequest, ReadRequest, UnpublishRequest
from tensorhub._agent.session import AgentSession, OnProgress
from tensorhub._agent.shards import AttachedShard
from tensorhub._control import lost_versions
from tensorhub._control.registry_client import RegistryClient
from tensorhub.aio.lifetime import NotCopyable, shielded_in_thread
from tensorhub.arguments import listed
from tensorhub_common.errors import NotPublished, ReplicaConflict, VersionUnavailable
from tensorhub_common.layout.layout import Layout
from tensorhub_common.observability import logs
from tensorhub_common.protocol.worker import PublishCall, ReadCall, ReadReport, UnpublishCall

if TYPE_CHECKING:
    import torch

    from tensorhub._tensors.fsdp import Gathered
    from tensorhub._tensors.host_copy import HostCopy
    from tensorhub._tensors.installs import Mapped, Staged
    from tensorhub._tensors.residency import Residency
    from tensorhub._tensors.streams import Queued
    from tensorhub_common.devices.device import Device


class UnresolvedResume(NamedTuple):
    """The hub holds `version`, and `register` gave other values for the tensors of these names.

    A restarted trainer that has loaded a checkpoint gives other values than those that the hub still holds. Only its
    author knows which are right, so `register(…, resume=…)` says it. Without a choice reading goes on, and what would
    publish or overwrite raises. A choice ends with a read, which replaces the memory, or with `mark_loaded`, which says
    that all was written. Equal values, and specs, which give none, need no choice.
    """

    version: int
    names: Sequence[str]

    def error(self, where: str) -> ReplicaConflict:
        """Return what `publish`, `unpublish` and `overwriting` raise meanwhile."""
        return ReplicaConflict(
            f"{where} was found with version {self.version}, and register was given other values for "
            f"{listed(self.names)}: register it with resume='memory' to go on from version {self.version}, or with "
            "resume='values' to replace it by the given values"
        )


log = logs.logger(__name__)

_copies: Final = itertools.count(1)
"""Numbers the copies of this process to hub memory."""


class AsyncShard(NotCopyable):
    """A shard that this process has registered; `AsyncHub.register` makes it."""

    def __init__(
        self,
        session: AgentSession,
        registry: RegistryClient,
        attachment: AttachedShard,
        layout: Layout,
        tensors: "dict[str, torch.Tensor]",
        on_release: Callable[["AsyncShard"], None],
        swaps: "Staged | Mapped | Gathered | None" = None,
        *,
        copy: "HostCopy | None" = None,
        devices: "Collection[Device]" = (),
        standing: "Residency | None" = None,
        choice: UnresolvedResume | None = None,
    ) -> None:
        self.tensors = tensors
        self.layout = layout
        self._session = session
        self._registry = registry
        self._attachment = attachment
        self._on_release = on_release
        self._swaps = swaps
        self._mapped = cast("Mapped", swaps) if attachment.spec.is_mapped else None
        self._copy = copy
        self._devices = devices
        self._standing = standing
        self._choice = choice
        self._told_of_left = self._told_of_unregistered = False
        self._last_read: ReadReport | None = None
        self._rooted: tuple[int | None, str] = (attachment.found, attachment.found_root)
        """A version that was here, and its root."""

    def __repr__(self) -> str:
        spec = self._attachment.spec
        return f"<{spec.model}/{spec.replica} shard {spec.shard} of {spec.shards}, version {self.version}>"

    @property
    def model(self) -> str:
        """The model that it belongs to."""
        return self._attachment.spec.model

    @property
    def replica(self) -> str:
        """The replica that it belongs to."""
        return self._attachment.spec.replica

    @property
    def shard(self) -> int:
        """Its number within the replica."""
        return self._attachment.spec.shard

    @property
    def shards(self) -> int:
        """How many shards the replica has."""
        return self._attachment.spec.shards

    @property
    def version(self) -> int | None:
        """The version that it holds, or None. Of a staged or mapped shard: the one that its tensors show.

        None too after a read without an answer (a bound or a cancellation came first): the agent may overwrite the
        memory still. The next read that is answered says what the shard holds.
        """
        if self._copy is not None:
            return self._copy.version
        return self._attachment.version if self._swaps is None else self._swaps.version

    @property
    def root(self) -> str:
        """The root of the digests of `version`, as the log has it.

        Empty where digests are off, and for a version that this process has published itself.
        """
        version, root = self._rooted
        return root if version == self.version else ""

    @property
    def is_asked_back(self) -> bool:
        """Whether the publisher waits for this mapped shard to let go of what it shows; see `let_go`."""
        return self._mapped is not None and self._mapped.is_asked_back

    @property
    def is_new(self) -> bool:
        """Whether `register` brought it, rather than came back to it."""
        return self._attachment.fresh

    @property
    def last_read(self) -> ReadReport | None:
        """How the last `replicate` or `update` that found something went: bytes, seconds, sources and why these.

        Where an `update` has found a newer version and could not have it, `failure` says why.
        """
        return self._last_read

    async def publish(self, version: int | None = None, *, timeout_s: float = 60) -> int:
        """Publish the values of the tensors as a version, and return its number.

        Returns when every shard of the replica has published it. From then on the memory is immutable until
        `unpublish`.

        Args:
            version: Its number, higher than every published one. None is the last published one and one more.
            timeout_s: The bound in seconds.

        Raises:
            VersionConflict: The number is not higher, the shards name several, or an earlier version is still
                published.
            NotFilled: A failed read has left a part of the memory without values; see `mark_loaded`.
            RoundTimeout: Not every shard of the replica published within the bound.
            ReplicaConflict: Another call on this shard is under way, or `resume` was left open.
        """
        wanted, bound_s = arguments.published_version(version), arguments.seconds("timeout_s", timeout_s)
        self._check_chosen()
        queued = self._queued()
        # An unpublish that was interrupted may have gone on to its end, and swapped.
        self._show()
        await self._check_standing()
        copy = await self._hand_over(queued, bound_s)
        with self._session.tracing.call("publish", self._attachment) as call:
            asked = PublishRequest(PublishCall(**UNSENT, version=wanted, traceparent=call.traceparent, copy=copy))
            done = await self._session.ask(self._attachment, asked, bound_s)
            assert done.version is not None
            call.version = done.version
        self._filled()
        if self._copy is not None:
            self._copy.published(done.version)
        return done.version

    async def unpublish(self, *, timeout_s: float = 60) -> None:
        """Take the version back, and return when the tensors may be overwritten: no reader reads them any more.

        A reader that is still busy at the bound loses its lease and reads elsewhere. A staged shard goes on in its
        other memory, with the same values: it waits only for readers that map a version before this one.

        Args:
            timeout_s: The bound in seconds.

        Raises:
            NotPublished: No version is published.
            DrainTimeout: A mapped reader remains at the bound. Don't write; call again.
        """
        bound_s = arguments.seconds("timeout_s", timeout_s)
        self._check_writable()
        try:
            await self._emptied(bound_s)
        finally:
            # A staged shard whose memory is mapped by readers goes on in its other one.
            self._show()

    @asynccontextmanager
    async def overwriting(
        self, *, publish: bool = False, version: int | None = None, timeout_s: float = 60
    ) -> "AsyncGenerator[dict[str, torch.Tensor], None]":
        """Unpublish what is published, and let the block overwrite the tensors, which it gets.

        Examples:
            >>> async with shard.overwriting(publish=True):
            ...     optimizer.step()

        Args:
            publish: Publish at the block's end. After an exception in the block the tensors stay unpublished.
            version: The number to publish as; None is the next one.
            timeout_s: The bound in seconds of each of the two calls.

        Raises:
            TensorHubError: What `unpublish` raises but `NotPublished`, before the block; what `publish` raises, after
                it.
        """
        arguments.overwriting(version, publish=publish)
        self._check_writable()
        with suppress(NotPublished):
            await self.unpublish(timeout_s=timeout_s)
        yield self.tensors
        if publish:
            await self.publish(version, timeout_s=timeout_s)

    async def replicate(
        self,
        version: int | Literal["latest"] = "latest",
        *,
        timeout_s: float = 120,
        on_progress: OnProgress | None = None,
        swap_under: AbstractAsyncContextManager[Any] | None = None,
    ) -> int:
        """Fill the tensors with a version, each byte verified, and return its number.

        Every shard of the replica must call it; it returns when all of them hold the version.

        Args:
            version: A number, or "latest", which waits up to the bound where nothing is published yet.
            timeout_s: The bound in seconds.
            on_progress: Called with the bytes that have come and the bytes of the whole.
            swap_under: A lock, or another asynchronous context manager, to hold while the tensors of a staged or
                mapped shard change to other memory, or those on a GPU are overwritten.

        Raises:
            VersionUnavailable: No live replica holds the version.
            LayoutMismatch: The version's tensors can't be laid out as this shard's.
            RoundTimeout: Not every shard of the replica called within the bound.
            IntegrityError: Bytes differed from the log's digests, from every source.
        """
        arguments.lock(swap_under, is_async=True)
        async with self._swapping(swap_under):
            return await self._fetch(version, timeout_s, on_progress)

    async def update(
        self,
        wait_s: float = 0,
        *,
        timeout_s: float = 120,
        on_progress: OnProgress | None = None,
        swap_under: AbstractAsyncContextManager[Any] | None = None,
    ) -> int | None:
        """Fetch a version newer than the held one, if there is one, and return its number, or None.

        Every shard of the replica must call it, and all get the same answer. It is None also where a newer version
        can't be had just now: the shard then holds what it held, `last_read.failure` says why, and the next call
        tries again.

        Examples:
            >>> if (version := await shard.update(wait_s=1)) is not None:
            ...     print(f"generating with version {version}")

        Args:
            wait_s: How long to wait for a newer version, in seconds.
            timeout_s: The bound of the whole call in seconds.
            on_progress: Called with the bytes that have come and the bytes of the whole.
            swap_under: A lock, or another asynchronous context manager, to hold while the tensors of a staged or
                mapped shard change to other memory, or those on a GPU are overwritten.

        Raises:
            TensorHubError: What calling again can't mend, as `replicate` raises it.
        """
        arguments.lock(swap_under, is_async=True)
        async with self._swapping(swap_under):
            return await self._fetch_newer(wait_s, timeout_s, on_progress)

    def let_go(self) -> None:
        """Stop showing the publisher's memory, so that it may be overwritten: a mapped shard's tensors are zeros then.

        They show zeros until the next `replicate` or `update` brings a version. An engine that calls this computes
        nothing meanwhile. Views and arrays of the tensors still map the memory: drop them too. A read that is under way
        may return the version that was let go of; call again then.

        Examples:
            >>> if shard.is_asked_back:
            ...     shard.let_go()

        Raises:
            ReplicaConflict: The shard is not mapped, so it has nothing to let go of.
        """
        if self._mapped is None:
            raise ReplicaConflict(
                f"{self._attachment.spec.where} shows memory of its own: only a shard with install='mapped' lets go"
            )
        self._mapped.let_go()

    async def release(self, *, timeout_s: float = 60) -> None:
        """Drain the shard, then free it. A second call does nothing.

        The tensors stay valid, as this process's own memory.

        Args:
            timeout_s: The bound in seconds.
        """
        try:
            await self._session.release(self._attachment, arguments.seconds("timeout_s", timeout_s))
        finally:
            self._show()
        self._on_release(self)

    def mark_loaded(self) -> None:
        """Declare that every tensor was written, so that a shard which a failed read left partial may be published."""
        self._session.check()
        if self._attachment.version is None:
            self._filled()
        self._session.loaded(self._attachment)

    def _check_writable(self) -> None:
        """Refuse to hand out for writing what can't be written; `NotPublished` would be taken for "go on"."""
        if self._attachment.spec.is_mapped:
            raise ReplicaConflict(
                f"{self._attachment.spec.where} is mapped read-only: its tensors are in its publisher's memory; "
                "overwrite and publish there, or register with install='in-place'"
            )
        self._check_chosen()

    def _check_chosen(self) -> None:
        """Refuse to publish or overwrite what `register` has found in place of the given values."""
        if self._choice is not None:
            raise self._choice.error(self._attachment.spec.where)

    async def _check_standing(self) -> None:
        """Refuse to publish hub memory where the weights are elsewhere, or were never written."""
        if self._standing is None:
            return
        left = self._standing.left()
        if left:
            raise self._standing.error(self._attachment.spec.where, left)
        if self._standing.is_blank:
            standing, where = self._standing, self._attachment.spec.where
            await shielded_in_thread(lambda: standing.check_filled(where))

    def _filled(self) -> None:
        """Every tensor has the values that are to be published."""
        self._choice = None
        if self._standing is not None:
            self._standing.loaded()

    def _tell_of_left(self) -> None:
        """An engine whose module lies elsewhere goes on with its old weights: it may want that, so one line says so."""
        if self._told_of_left or self._standing is None:
            return
        left = self._standing.left()
        if left:
            self._told_of_left = True
            log.warning(
                "a read has filled memory in which tensors lie no longer: they show what they held before",
                shard=self._attachment.spec.where,
                tensors=listed(left),
            )

    def _tell_of_unregistered(self, report: ReadReport) -> None:
        """A tensor may be missing by mistake, so one shard of a replica says once what all of them left out."""
        if report.unregistered_count and not self._told_of_unregistered:
            self._told_of_unregistered = True
            log.warning(
                "the version has tensors that no shard of the replica registered, so they were not read",
                shard=self._attachment.spec.where,
                tensors=listed(report.unregistered, report.unregistered_count),
            )

    @asynccontextmanager
    async def _swapping(self, swap_under: AbstractAsyncContextManager[Any] | None) -> AsyncGenerator[None, None]:
        """Show what an interrupted read has left, and at the end what the block has brought."""
        await self._stage()
        async with self._under(swap_under):
            await self._catch_up()
        yield
        await self._stage()
        async with self._under(swap_under):
            await self._catch_up()

    def _under(self, swap_under: AbstractAsyncContextManager[Any] | None) -> AbstractAsyncContextManager[Any]:
        return nullcontext() if swap_under is None or not self._must_swap() else swap_under

    def _must_swap(self) -> bool:
        """Whether the tensors are to change: to other memory, or to what was read for them into the host's."""
        return (self._swaps is not None and self._swaps.is_due) or (self._copy is not None and self._copy.is_due)

    # ------------------------------------------------------------------------------------------ tensors on GPUs

    def _queued(self) -> "Queued | None":
        """Take what the caller has queued on the shard's GPUs. It is called before the first await of a call."""
        if self._copy is not None:
            return self._copy.queued()
        if not self._devices:
            return None
        from tensorhub._tensors.streams import Queued  # noqa: PLC0415 (it imports torch)

        return Queued(self._devices)

    async def _hand_over(self, queued: "Queued | None", bound_s: float) -> int | None:
        """Have hub memory hold what the tensors do, behind all that was queued; return the copy's number."""
        copy, attachment = self._copy, self._attachment
        if copy is None:
            await self._settled(queued)
            return None
        if attachment.version is not None:
            # It is published, so it must not change; what that means for the call is for the agent to say.
            return None
        if not copy.is_free:
            # A call that was interrupted may still read it or write it.
            with suppress(NotPublished):
                await self._emptied(bound_s)
        assert queued is not None
        number = next(_copies)
        came = partial(self._session.copied, attachment, number)
        with self._session.occupied(attachment):
            await shielded_in_thread(lambda: copy.bring_to_host(queued, came))
        return number

    async def _settled(self, queued: "Queued | None") -> None:
        """Wait until what was queued is done: the agent, which touches the memory next, sees nothing of streams."""
        if queued is not None:
            await shielded_in_thread(queued.wait)

    async def _emptied(self, bound_s: float) -> None:
        """Have the agent take back what is published, and wait until the memory may be written."""
        copy = self._copy
        try:
            await self._session.ask(self._attachment, UnpublishRequest(UnpublishCall(**UNSENT)), bound_s)
        except NotPublished:
            if copy is not None:
                copy.freed()
            raise
        if copy is not None:
            copy.freed()

    async def _stage(self) -> None:
        """Bring what has come onto the GPU, beside what the tensors show."""
        copy = self._copy
        if copy is not None and copy.wants_stage:
            with self._session.occupied(self._attachment):
                await shielded_in_thread(copy.stage)

    async def _catch_up(self) -> None:
        """Let the tensors show what has come for them."""
        copy = self._copy
        if copy is not None and copy.is_due:
            queued = copy.queued()
            with self._session.occupied(self._attachment):
                await shielded_in_thread(lambda: copy.bring_to_gpu(queued))
        self._show()

    def _show(self) -> None:
        """Let the tensors of a staged or mapped shard show its present memory, and FSDP gather it."""
        if self._swaps is not None:
            self._swaps.show()

    async def _fetch(self, version: int | Literal["latest"], timeout_s: float, on_progress: OnProgress | None) -> int:
        """Do what `replicate` does; but tensors that swap show it only after `show`."""
        bound_s = arguments.seconds("timeout_s", timeout_s)
        asked = ReadCall(**UNSENT, want=arguments.wanted_version(version))
        held = await self._read("replicate", asked, bound_s, on_progress)
        assert held is not None
        return held

    async def _fetch_newer(self, wait_s: float, timeout_s: float, on_progress: OnProgress | None) -> int | None:
        """Do what `update` does; but tensors that swap show it only after `show`."""
        bound_s = arguments.seconds("timeout_s", timeout_s)
        asked = ReadCall(**UNSENT, want="newer", wait_s=arguments.patience(wait_s, bound_s))
        version = await self._read("update", asked, bound_s, on_progress)
        if version is None and self._copy is not None and self._copy.is_due:
            # It came by a call that was interrupted, and is news to the tensors.
            return self._attachment.version
        return version

    async def _read(self, name: str, asked: ReadCall, timeout_s: float, on_progress: OnProgress | None) -> int | None:
        arguments.function("on_progress", on_progress)
        if self._copy is not None:
            self._copy.read_begins()
        else:
            await self._settled(self._queued())
        shown = getattr(self._swaps, "shown", None)
        with self._session.tracing.call(name, self._attachment) as call:
            has_let_go = self._mapped is not None and self._mapped.has_let_go
            asked = msgspec.structs.replace(asked, segment=shown, has_let_go=has_let_go, traceparent=call.traceparent)
            try:
                done = await self._session.ask(self._attachment, ReadRequest(asked), timeout_s, on_progress)
            except VersionUnavailable as error:
                wanted = asked.want if isinstance(asked.want, int) else None
                became = await lost_versions.ask(self._registry, self.model, wanted)
                raise VersionUnavailable(became) if became else error from error
            call.version = done.version
        if done.version is not None:
            self._filled()
        if done.report is not None:
            self._note(done.report)
            if done.version is not None:
                self._rooted = (done.version, done.report.root)
            if not done.report.failure:
                self._tell_of_left()
            self._tell_of_unregistered(done.report)
        return done.version

    def _note(self, report: ReadReport) -> None:
        """Keep how a read went; why one has brought nothing is logged once, however often that is tried again."""
        before = "" if self._last_read is None else self._last_read.failure
        if report.failure and not before:
            log.warning("no update", shard=self._attachment.spec.where, why=report.failure)
        self._last_read = report
