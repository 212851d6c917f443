"""The SDK for programs without an event loop: `connect`, and twins of `AsyncHub` and `AsyncShard`.

Each method does what its twin does, in a thread of the hub's own; so this file decides nothing. A method that only
waits for its twin is made of it by `blocking`, with its signature and docstring; written out is what yields, or runs
the caller's own code. Objects may be used from any thread, one call at a time for each shard.
"""

from collections.abc import AsyncGenerator, Collection, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from tensorhub import arguments
from tensorhub._agent.session import OnProgress
from tensorhub.aio.hub import CONNECT_S, AsyncHub, connect_async
from tensorhub.aio.lifetime import NotCopyable
from tensorhub.aio.shard import AsyncShard
from tensorhub.arguments import Install, Resume
from tensorhub.errors import closed_error
from tensorhub.mapping import Mapping
from tensorhub.sync.blocking import blocking
from tensorhub.sync.loop_thread import LoopThread
from tensorhub_common.errors import NotPublished, TensorHubError
from tensorhub_common.layout.layout import Layout
from tensorhub_common.protocol.worker import ReadReport

if TYPE_CHECKING:
    import torch

    from tensorhub._control.watch import Watched
    from tensorhub._rollouts.prompts import Sampling
    from tensorhub._tensors.description import Tensors
    from tensorhub.sync.rollouts import Rollouts
    from tensorhub_common.protocol.rollout.entries import PolicyName
    from tensorhub_common.protocol.rollout.messages import OnUpdate


class Shard(NotCopyable):
    """A shard that this process has registered; `Hub.register` makes it."""

    def __init__(self, background: LoopThread, shard: AsyncShard) -> None:
        self._background = background
        self._twin = shard

    def __repr__(self) -> str:
        return repr(self._twin)

    @property
    def tensors(self) -> "dict[str, torch.Tensor]":
        """The tensors, by every name, standing in hub memory."""
        return self._twin.tensors

    @property
    def layout(self) -> Layout:
        """Where each tensor is in the shard's segment."""
        return self._twin.layout

    @property
    def model(self) -> str:
        """The model that it belongs to."""
        return self._twin.model

    @property
    def replica(self) -> str:
        """The replica that it belongs to."""
        return self._twin.replica

    @property
    def shard(self) -> int:
        """Its number within the replica."""
        return self._twin.shard

    @property
    def shards(self) -> int:
        """How many shards the replica has."""
        return self._twin.shards

    @property
    def version(self) -> int | None:
        """The version that it holds, or None; see `AsyncShard.version`."""
        return self._twin.version

    @property
    def is_asked_back(self) -> bool:
        """Whether the publisher waits for this mapped shard to let go of what it shows; see `let_go`."""
        return self._twin.is_asked_back

    @property
    def is_new(self) -> bool:
        """Whether `register` brought it, rather than came back to it."""
        return self._twin.is_new

    @property
    def root(self) -> str:
        """The root of the digests of `version`, as the log has it.

        Empty where digests are off, and for a version that this process has published itself.
        """
        return self._twin.root

    @property
    def last_read(self) -> ReadReport | None:
        """How the last `replicate` or `update` that found something went: bytes, seconds, sources and why these.

        Where an `update` has found a newer version and could not have it, `failure` says why.
        """
        return self._twin.last_read

    publish = blocking(AsyncShard.publish)
    """Publish what the tensors hold and return the version; see `AsyncShard.publish`."""

    unpublish = blocking(AsyncShard.unpublish)
    """Return when the tensors may be overwritten; see `AsyncShard.unpublish`."""

    @contextmanager
    def overwriting(
        self, *, publish: bool = False, version: int | None = None, timeout_s: float = 60
    ) -> "Generator[dict[str, torch.Tensor], None, None]":
        """Unpublish what is published, and let the block overwrite the tensors, which it gets.

        Examples:
            >>> with shard.overwriting(publish=True):
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
        with suppress(NotPublished):
            self.unpublish(timeout_s=timeout_s)
        yield self.tensors
        if publish:
            self.publish(version, timeout_s=timeout_s)

    def replicate(
        self,
        version: int | Literal["latest"] = "latest",
        *,
        timeout_s: float = 120,
        on_progress: OnProgress | None = None,
        swap_under: AbstractContextManager[Any] | None = None,
    ) -> int:
        """Fill the tensors with a version, each byte verified, and return its number.

        Every shard of the replica must call it; it returns when all of them hold the version.

        Args:
            version: A number, or "latest", which waits up to the bound where nothing is published yet.
            timeout_s: The bound in seconds.
            on_progress: Called with the bytes that have come and the bytes of the whole, in the hub's own thread.
            swap_under: A lock, or another context manager, to hold while the tensors of a staged or mapped shard
                change to other memory, or those on a GPU are overwritten.

        Raises:
            VersionUnavailable: No live replica holds the version.
            LayoutMismatch: The version's tensors can't be laid out as this shard's.
            RoundTimeout: Not every shard of the replica called within the bound.
            IntegrityError: Bytes differed from the log's digests, from every source.
        """
        arguments.lock(swap_under, is_async=False)
        with self._swapping(swap_under):
            return self._background.run(self._twin._fetch(version, timeout_s, on_progress))  # noqa: SLF001 (twins)

    def update(
        self,
        wait_s: float = 0,
        *,
        timeout_s: float = 120,
        on_progress: OnProgress | None = None,
        swap_under: AbstractContextManager[Any] | None = None,
    ) -> int | None:
        """Fetch a version newer than the held one, if there is one, and return its number, or None.

        Every shard of the replica must call it, and all get the same answer. It is None also where a newer version
        can't be had just now: the shard then holds what it held, `last_read.failure` says why, and the next call
        tries again.

        Examples:
            >>> if (version := shard.update(wait_s=1)) is not None:
            ...     print(f"generating with version {version}")

        Args:
            wait_s: How long to wait for a newer version, in seconds.
            timeout_s: The bound of the whole call in seconds.
            on_progress: Called with the bytes that have come and the bytes of the whole, in the hub's own thread.
            swap_under: A lock, or another context manager, to hold while the tensors of a staged or mapped shard
                change to other memory, or those on a GPU are overwritten.

        Raises:
            TensorHubError: What calling again can't mend, as `replicate` raises it.
        """
        arguments.lock(swap_under, is_async=False)
        with self._swapping(swap_under):
            return self._background.run(self._twin._fetch_newer(wait_s, timeout_s, on_progress))  # noqa: SLF001

    @contextmanager
    def _swapping(self, swap_under: AbstractContextManager[Any] | None) -> Generator[None, None, None]:
        """Show what an interrupted read has left, and at the end what the block has brought: in the caller's thread."""
        self._show(swap_under)
        yield
        self._show(swap_under)

    def _show(self, swap_under: AbstractContextManager[Any] | None) -> None:
        copy = self._twin._copy  # noqa: SLF001
        if copy is not None and copy.wants_stage:
            self._background.run(self._twin._stage())  # noqa: SLF001
        must = self._twin._must_swap()  # noqa: SLF001
        with swap_under if must and swap_under is not None else nullcontext():
            if copy is None:
                self._twin._show()  # noqa: SLF001
            else:
                self._background.run(self._twin._catch_up())  # noqa: SLF001

    release = blocking(AsyncShard.release)
    """Drain the shard, then free it; see `AsyncShard.release`."""

    def let_go(self) -> None:
        """Stop showing the publisher's memory, so that it may be overwritten; see `AsyncShard.let_go`."""
        self._twin.let_go()

    def mark_loaded(self) -> None:
        """Declare that every tensor was written, so that a shard which a failed read left partial may be published."""

        async def mark() -> None:
            self._twin.mark_loaded()

        self._background.run(mark())


class Hub(NotCopyable):
    """A connection to one agent, for one job. `connect` makes it; `with` releases everything at its end."""

    def __init__(self, background: LoopThread, hub: AsyncHub) -> None:
        background.before_its_end(hub._leave)  # noqa: SLF001 (twins)
        self._background = background
        self._twin = hub
        self.job = hub.job

    def __repr__(self) -> str:
        return repr(self._twin)

    @property
    def agent(self) -> str:
        """The id of the agent that holds the shards."""
        return self._twin.agent

    @property
    def socket(self) -> Path:
        """Where another process of this host reaches the same agent; see `AsyncHub.socket`."""
        return self._twin.socket

    def register(
        self,
        model: str,
        module_or_tensors: "Tensors",
        *,
        replica: str,
        shard: int = 0,
        shards: int = 1,
        spot: bool = False,
        install: Install = "in-place",
        memory: str = "host",
        mapping: Mapping | None = None,
        resume: Resume | None = None,
        timeout_s: float = 30,
    ) -> Shard:
        """Bring a shard into hub memory, or come back to it. Waits for no other shard.

        The tensors move into memory of this host's agent and stay the same objects, so an optimizer or an engine goes
        on with them. Those on a GPU stay where they are, unless `memory` says otherwise. Where the hub already holds
        the shard with a version, that memory wins: `.version` says so.

        Examples:
            >>> shard = hub.register("policy", module, replica="trainer")

        Args:
            model: The model's name: letters, digits, "_" and "-", at most 64.
            module_or_tensors: A torch module (its parameters and buffers), or a dict of tensors or
                `TensorSpec`s by name. A spec gives shape and dtype of a tensor whose values come from the hub.
            replica: The name of this copy of the model.
            shard: The number of this shard, from 0.
            shards: How many shards the replica has, each registered by a process of its own.
            spot: The replica may vanish at any moment, and never counts for retention.
            install: "in-place" reads into the tensors' own memory. "staged" takes twice the memory: a read goes
                beside what the tensors show, which changes only at its end; tensors on a GPU whose hub memory is the
                host's are overwritten from other memory of the GPU then, and keep their addresses. "mapped" takes none:
                the tensors show the memory of a holder on this host, read-only; with memory="device", on their GPU.
            memory: Where hub memory is. "host": tensors on a GPU stay where they are, given ones of a dict too, and hub
                memory has a pinned copy. "device": they move into the agent's memory of their GPU (specs: of torch's
                current one). The UUID of a GPU names one.
            mapping: What the tensors consist of in the model's own names, from `tensorhub.mapping`, where the shards
                of trainer and engine are cut or named differently.
            resume: Which values count where the hub holds a version with others than the given ones: "memory", or
                "values", which replaces it and waits for its readers as `unpublish` does. None leaves it open:
                `replicate` and `update` work, and `publish`, `unpublish` and `overwriting` raise `ReplicaConflict`.
            timeout_s: The bound in seconds.

        Raises:
            ReplicaConflict: Another live process has the shard.
            LayoutMismatch: The tensors don't fit those of the sibling shards, of an earlier registration or the
                mapping.
            MemoryExhausted: The agent has no room. A staged read of tensors on a GPU may raise it later.
            AgentUnavailable: The agent does not answer within the bound.
        """
        shard_made = self._background.run(
            self._twin.register(
                model,
                module_or_tensors,
                replica=replica,
                shard=shard,
                shards=shards,
                spot=spot,
                install=install,
                memory=memory,
                mapping=mapping,
                resume=resume,
                timeout_s=timeout_s,
            )
        )
        return Shard(self._background, shard_made)

    versions = blocking(AsyncHub.versions)
    """Return the versions of a model, oldest first; see `AsyncHub.versions`."""

    replicas = blocking(AsyncHub.replicas)
    """Return the replicas of a model with their shards; see `AsyncHub.replicas`."""

    specs = blocking(AsyncHub.specs)
    """Return what the newest version that can be had consists of; see `AsyncHub.specs`."""

    def watch(
        self, model: str, after: int | None = None, *, kinds: Collection[str] | None = None
    ) -> "Generator[Watched, None, None]":
        """Yield the version events of a model in order: those of the past, then new ones, until the hub is closed.

        Args:
            model: The model's name.
            after: Go on after the event with this `seq`.
            kinds: Kinds of events in place of those of versions; an empty collection means all.

        Raises:
            LogGap: The log no longer reaches back to `after`.
        """

        async def begin() -> "AsyncGenerator[Watched, None]":
            return self._twin.watch(model, after, kinds=kinds)

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

    def rollouts(
        self,
        model: str,
        *,
        name: str = "main",
        epoch: int = 0,
        group_size: int = 1,
        staleness: int = 0,
        max_age: int | None = None,
        on_update: "OnUpdate" = "continue",
        policy: "PolicyName" = "arrival",
        sampling: "Sampling | None" = None,
        timeout_s: float = 30,
    ) -> "Rollouts":
        """Attach to a consumer's name of this job's rollouts: prompts in, finished responses out.

        An earlier trainer of the name is replaced: it gets nothing more. What is open goes on, and what it had no
        `done` for comes again, to this one.

        Examples:
            >>> rollouts = hub.rollouts("policy", group_size=8, sampling=tensorhub.Sampling(max_tokens=64))

        Args:
            model: The model whose versions generate.
            name: The consumer's name. One trainer at a time has it.
            epoch: A number that rises when the trainer goes back to a checkpoint: what is open of a lower one is
                cancelled, what was not done is dropped, and its ids are free.
            group_size: How many responses a prompt gets.
            staleness: A response may begin on a version while at most so many newer ones are published.
            max_age: How many newer versions may be published behind the oldest token of a response: of more, it begins
                anew, once. Then it is delivered as old as it is; see `Response.age`.
            on_update: What becomes of a response when its engine's weights change: "finish" ends it on the old
                version, "continue" goes on with the new one from this token, its cache computed again, "keep" goes on
                with the old cache, and "restart" begins it anew.
            policy: How requests are placed. "arrival": where all is done soonest; "rlboost" is that paper's;
                "streamrl" gives the longest responses instances of their own, by what their prompts let expect.
            sampling: How tokens are drawn.
            timeout_s: The bound in seconds.

        Raises:
            RolloutUnavailable: No manager answered within the bound, or a trainer with a higher epoch was here.
            BadCommand: An argument is not possible.
            BadPrompt: The sampling is not possible.
        """
        from tensorhub.sync.rollouts import Rollouts  # noqa: PLC0415 (only trainers need it)

        attaching = self._twin.rollouts(
            model,
            name=name,
            epoch=epoch,
            group_size=group_size,
            staleness=staleness,
            max_age=max_age,
            on_update=on_update,
            policy=policy,
            sampling=sampling,
            timeout_s=timeout_s,
        )
        return Rollouts(self._background, self._background.run(attaching))

    retain = blocking(AsyncHub.retain)
    """Keep the last versions of a model from now on; see `AsyncHub.retain`."""

    pin = blocking(AsyncHub.pin)
    """Keep one version until `unpin`; see `AsyncHub.pin`."""

    unpin = blocking(AsyncHub.unpin)
    """Keep a version no longer than `retain` says; see `AsyncHub.unpin`."""

    rewind = blocking(AsyncHub.rewind)
    """Go back to a checkpoint, and return the versions that retired; see `AsyncHub.rewind`."""

    delete = blocking(AsyncHub.delete)
    """Forget a model with its versions and their copies; see `AsyncHub.delete`."""

    delete_job = blocking(AsyncHub.delete_job)
    """Delete the whole job; see `AsyncHub.delete_job`."""

    def close(self, *, release: bool = True, timeout_s: float = 60) -> None:
        """Release all shards and end the connection. A second call does nothing.

        The connection ends in any case; then the first error of a release is raised. An agent that is away keeps the
        shards.

        Args:
            release: False leaves the shards with the agent, published as they are, for the next process that
                registers them.
            timeout_s: The bound in seconds.
        """
        if self._background.is_ended:
            return
        try:
            self._background.run(self._twin.close(release=release, timeout_s=timeout_s))
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
            self._background.run(self._twin.__aexit__(kind, error, trace))
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

    Examples:
        >>> hub = tensorhub.connect()

    Args:
        job: An isolated namespace; by default `TENSORHUB_JOB`, else "default".
        agent: An agent's id or socket; by default `TENSORHUB_AGENT`, else the first on this host.
        nats: The address of NATS, or of several nodes of a cluster with commas between; by default the agent's.
        timeout_s: The bound in seconds.

    Raises:
        AgentUnavailable: No agent answers within the bound.
        RegistryUnavailable: `nats` is given and not reached.
    """
    background = LoopThread()
    try:
        hub = background.run(connect_async(job, agent=agent, nats=nats, timeout_s=timeout_s))
    except BaseException:
        background.stop()
        raise
    return Hub(background, hub)
