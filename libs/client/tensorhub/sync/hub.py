"""The SDK for programs without an event loop: `connect`, and twins of `AsyncHub` and `AsyncShard`.

Each method does what its twin does, in a thread of the hub's own; so this file decides nothing. Objects may be used
from any thread, one call at a time for each shard.
"""

from collections.abc import AsyncGenerator, Collection, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tensorhub import arguments
from tensorhub._agent.session import OnProgress
from tensorhub._control.registry_client import ASK_S
from tensorhub.aio.hub import CONNECT_S, AsyncHub, connect_async
from tensorhub.aio.lifetime import NotCopyable
from tensorhub.aio.shard import AsyncShard
from tensorhub.arguments import Resume
from tensorhub.errors import closed_error
from tensorhub.mapping import Mapping
from tensorhub.sync.loop_thread import LoopThread
from tensorhub_common.errors import NotPublished, TensorHubError
from tensorhub_common.layout.layout import Layout
from tensorhub_common.protocol.queries import ReplicaInfo, VersionInfo
from tensorhub_common.protocol.worker import ReadReport

if TYPE_CHECKING:
    import torch

    from tensorhub._control.watch import Watched
    from tensorhub._tensors.description import Tensors


class Shard(NotCopyable):
    """A shard that this process has registered; `Hub.register` makes it."""

    def __init__(self, background: LoopThread, shard: AsyncShard) -> None:
        self._background = background
        self._shard = shard

    def __repr__(self) -> str:
        return repr(self._shard)

    @property
    def tensors(self) -> "dict[str, torch.Tensor]":
        """The tensors, by every name, standing in hub memory."""
        return self._shard.tensors

    @property
    def layout(self) -> Layout:
        """What stands where in the shard's segment."""
        return self._shard.layout

    @property
    def model(self) -> str:
        """The model that it belongs to."""
        return self._shard.model

    @property
    def replica(self) -> str:
        """The replica that it belongs to."""
        return self._shard.replica

    @property
    def shard(self) -> int:
        """Its number within the replica."""
        return self._shard.shard

    @property
    def shards(self) -> int:
        """How many shards the replica has."""
        return self._shard.shards

    @property
    def version(self) -> int | None:
        """What it holds now, or None."""
        return self._shard.version

    @property
    def is_new(self) -> bool:
        """Whether `register` brought it, rather than came back to it."""
        return self._shard.is_new

    @property
    def last_read(self) -> ReadReport | None:
        """How the last `replicate` or `update` that found something went: bytes, seconds, sources and why these.

        Where an `update` has found a newer version and could not have it, `failure` says why.
        """
        return self._shard.last_read

    def publish(self, version: int | None = None, *, timeout_s: float = 60) -> int:
        """Publish what the tensors hold and return the version; None means the last published one and one more.

        Returns when every shard of the replica has published it; from then on the memory is immutable until
        `unpublish`. Raises `VersionConflict`, `NotFilled`, `RoundTimeout`.
        """
        return self._background.run(self._shard.publish(version, timeout_s=timeout_s))

    def unpublish(self, *, timeout_s: float = 60) -> None:
        """Return when the tensors may be overwritten: no reader is left, or all were told that their lease is over.

        Raises `NotPublished`, and `DrainTimeout` while a mapped reader remains: don't write, call again.
        """
        self._background.run(self._shard.unpublish(timeout_s=timeout_s))

    @contextmanager
    def overwriting(
        self, *, publish: bool = False, version: int | None = None, timeout_s: float = 60
    ) -> "Generator[dict[str, torch.Tensor], None, None]":
        """Unpublish what is published, and let the block overwrite the tensors, which it gets.

        With `publish` the tensors are published at the block's end, as `version` or the next one; without it, and
        after an exception in the block, they stay unpublished. `timeout_s` bounds each of the two calls. Raises what
        `unpublish` raises, before the block, but for `NotPublished`; and what `publish` raises, after it.
        """
        arguments.overwriting(version, publish=publish)
        with suppress(NotPublished):
            self.unpublish(timeout_s=timeout_s)
        yield self.tensors
        if publish:
            self.publish(version, timeout_s=timeout_s)

    def replicate(
        self,
        version: int | str = "latest",
        *,
        timeout_s: float = 120,
        on_progress: OnProgress | None = None,
        swap_under: AbstractContextManager[Any] | None = None,
    ) -> int:
        """Fill the tensors with a version, verified, and return its number, once all shards of the replica hold it.

        Every shard of the replica must call it. "latest" waits for a first version up to the bound. `on_progress` is
        called in the hub's own thread. Raises `VersionUnavailable`, `LayoutMismatch`, `RoundTimeout`, `IntegrityError`.
        `swap_under`: a lock (or another context manager) to hold while the tensors of a staged or mapped shard swap.
        """
        arguments.lock(swap_under, is_async=False)
        with self._swapping(swap_under):
            return self._background.run(self._shard._fetch(version, timeout_s, on_progress))  # noqa: SLF001 (twins)

    def update(
        self,
        wait_s: float = 0,
        *,
        timeout_s: float = 120,
        on_progress: OnProgress | None = None,
        swap_under: AbstractContextManager[Any] | None = None,
    ) -> int | None:
        """Fetch a newer version than the one held, if there is one, and return its number, or None.

        `wait_s`: how long to wait for one. Every shard of the replica must call it; all get the same answer. None also
        where a newer version can't be had just now: then the shard holds what it held, `last_read.failure` says why,
        and the next call tries again.
        `swap_under`: a lock (or another context manager) to hold while the tensors of a staged or mapped shard swap.
        """
        arguments.lock(swap_under, is_async=False)
        with self._swapping(swap_under):
            return self._background.run(self._shard._fetch_newer(wait_s, timeout_s, on_progress))  # noqa: SLF001

    @contextmanager
    def _swapping(self, swap_under: AbstractContextManager[Any] | None) -> Generator[None, None, None]:
        """Show what an interrupted read has left, and at the end what the block has brought: in the caller's thread."""
        self._show(swap_under)
        yield
        self._show(swap_under)

    def _show(self, swap_under: AbstractContextManager[Any] | None) -> None:
        must = self._shard._must_swap()  # noqa: SLF001
        with swap_under if must and swap_under is not None else nullcontext():
            self._shard._show()  # noqa: SLF001

    def release(self, *, timeout_s: float = 60) -> None:
        """Drain the shard, then free it; twice is no error. The tensors stay valid, but are this process's alone."""
        self._background.run(self._shard.release(timeout_s=timeout_s))

    def mark_loaded(self) -> None:
        """Say that every tensor was written, so that a shard which a failed fill left partial may be published."""

        async def mark() -> None:
            self._shard.mark_loaded()

        self._background.run(mark())


class Hub(NotCopyable):
    """A connection to one agent, for one job. `connect` makes it; `with` releases everything at its end."""

    def __init__(self, background: LoopThread, hub: AsyncHub) -> None:
        background.before_its_end(hub._leave)  # noqa: SLF001 (twins)
        self._background = background
        self._hub = hub
        self.job = hub.job

    def __repr__(self) -> str:
        return repr(self._hub)

    @property
    def agent(self) -> str:
        """The id of the agent whose memory the shards stand in."""
        return self._hub.agent

    def register(
        self,
        model: str,
        module_or_tensors: "Tensors",
        *,
        replica: str,
        shard: int = 0,
        shards: int = 1,
        spot: bool = False,
        install: str = "in-place",
        mapping: Mapping | None = None,
        resume: Resume | None = None,
        timeout_s: float = 30,
    ) -> Shard:
        """Bring a shard into hub memory, or come back to it; waits for no other shard.

        If the hub holds it ready, its memory stays (`.version` tells); otherwise the given values are copied in.
        `resume` says what counts where the given values differ from ready memory: "memory", or "values", which replaces
        it and waits for its readers as `unpublish` does. Left open, `replicate` and `update` work, and `publish`,
        `unpublish` and `overwriting` raise `ReplicaConflict`. `spot`: the replica may vanish, and never counts for
        retention. Raises `ReplicaConflict` while its worker lives, `LayoutMismatch` when it doesn't fit its siblings or
        what was registered before, `MemoryExhausted`. `install`: "staged" takes twice the memory, and a read goes
        beside what the tensors show, which changes only at its end; "mapped" takes none, and the tensors show a
        holder's on this host, read-only.
        `mapping`: what the tensors consist of in the model's own names (`tensorhub.mapping`); `LayoutMismatch` names a
        tensor that it has no rule for, or that is not as its rule says.
        """
        shard_made = self._background.run(
            self._hub.register(
                model,
                module_or_tensors,
                replica=replica,
                shard=shard,
                shards=shards,
                spot=spot,
                install=install,
                mapping=mapping,
                resume=resume,
                timeout_s=timeout_s,
            )
        )
        return Shard(self._background, shard_made)

    def versions(self, model: str, *, timeout_s: float = ASK_S) -> list[VersionInfo]:
        """Return the versions of a model, oldest first. Raises `RegistryUnavailable`."""
        return self._background.run(self._hub.versions(model, timeout_s=timeout_s))

    def replicas(self, model: str, *, timeout_s: float = ASK_S) -> list[ReplicaInfo]:
        """Return the replicas of a model with their shards, in the order of their registration."""
        return self._background.run(self._hub.replicas(model, timeout_s=timeout_s))

    def watch(
        self, model: str, after: int | None = None, *, kinds: Collection[str] | None = None
    ) -> "Generator[Watched, None, None]":
        """Yield the version events of a model in order: all that happened, then what happens, until the hub is closed.

        `after`: go on after the event with this `seq`; raises `LogGap` when the log no longer reaches back to it.
        `kinds`: other kinds of events than those of versions; an empty collection means all.
        """

        async def begin() -> "AsyncGenerator[Watched, None]":
            return self._hub.watch(model, after, kinds=kinds)

        return self._each(self._background.run(begin()))

    def _each(self, events: "AsyncGenerator[Watched, None]") -> "Generator[Watched, None, None]":
        async def following() -> "Watched | None":
            return await anext(events, None)

        try:
            while (event := self._background.run(following())) is not None:
                yield event
        finally:
            with suppress(TensorHubError):
                self._background.run(events.aclose())

    def retain(self, model: str, *, last: int, timeout_s: float = ASK_S) -> None:
        """Keep the last `last` versions of a model from now on; 0, as it begins, keeps none.

        A kept version doesn't lose its last copy by an orderly act: agents with room make a copy in the background,
        and `unpublish` or a refill waits until one stands, or raises `RetentionFull`. Spot replicas don't count.
        """
        self._background.run(self._hub.retain(model, last=last, timeout_s=timeout_s))

    def pin(self, model: str, version: int, *, timeout_s: float = ASK_S) -> None:
        """Keep one version, however many come after it, until `unpin`. Raises `VersionUnavailable`."""
        self._background.run(self._hub.pin(model, version, timeout_s=timeout_s))

    def unpin(self, model: str, version: int, *, timeout_s: float = ASK_S) -> None:
        """Keep a version no longer than `retain` says."""
        self._background.run(self._hub.unpin(model, version, timeout_s=timeout_s))

    def rewind(self, model: str, *, to: int, timeout_s: float = ASK_S) -> list[int]:
        """Go back to a checkpoint: versions above `to` retire, and the next published one is above them all.

        Returns what was retired. Reads of these are decided anew or fail; publications under way fail; an engine that
        holds one is led back by `update`. Raises `VersionConflict` while one of them is pinned.
        """
        return self._background.run(self._hub.rewind(model, to=to, timeout_s=timeout_s))

    def delete(self, model: str, *, timeout_s: float = ASK_S) -> None:
        """Forget a model with its versions and the copies of them. Its replicas must have been released."""
        self._background.run(self._hub.delete(model, timeout_s=timeout_s))

    def delete_job(self, *, timeout_s: float = ASK_S) -> None:
        """Delete the whole job, for everybody; see `AsyncHub.delete_job`."""
        self._background.run(self._hub.delete_job(timeout_s=timeout_s))

    def close(self, *, release: bool = True, timeout_s: float = 60) -> None:
        """Release all shards and end the connection. A second call does nothing.

        With `release=False` they stay with the agent, published as they are, for whoever registers them next.

        The connection ends in any case; then the first error of a release is raised. An agent that is away keeps the
        shards.
        """
        if self._background.is_ended:
            return
        try:
            self._background.run(self._hub.close(release=release, timeout_s=timeout_s))
        finally:
            self._background.stop()

    def __enter__(self) -> Self:
        if self._background.is_ended:
            raise closed_error()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._background.is_ended or self._background.is_forked:
            return
        try:
            self._background.run(self._hub.__aexit__(kind, error, trace))
        finally:
            self._background.stop()


def connect(
    job: str | None = None,
    *,
    agent: str | PathLike[str] | None = None,
    nats: str | None = None,
    timeout_s: float = CONNECT_S,
) -> Hub:
    """Connect to an agent of this host.

    `job`: an isolated namespace, by default `TENSORHUB_JOB`, else "default". `agent`: an agent's id or socket, by
    default `TENSORHUB_AGENT`, else the first on this host. `nats`: where questions go, by default where the agent is;
    of a cluster the addresses of several nodes, with commas between.
    Raises `AgentUnavailable` when no agent answers within the bound, and `RegistryUnavailable` when `nats` is given and
    not reached.
    """
    background = LoopThread()
    try:
        hub = background.run(connect_async(job, agent=agent, nats=nats, timeout_s=timeout_s))
    except BaseException:
        background.stop()
        raise
    return Hub(background, hub)
