"""verl's weights through the hub: a `CheckpointEngine` that its registry knows as "tensorhub".

Actor rank 0 publishes each update as a version, and every rollout worker reads that version, from the actor or from a
worker that has it. There are no buckets, and there is no process group: workers may come and go between updates.

Always true: what a rollout worker yields is one version whole, verified against its digests, and newer than all that
were published before the update began.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Iterable
from secrets import token_hex
from typing import Any, Final, TypeVar

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

import tensorhub
from tensorhub import LayoutMismatch, TensorHubError, TensorSpec
from tensorhub.sync.loop_thread import LoopThread

BACKEND: Final = "tensorhub"

Named = tuple[str, torch.Tensor]
Weights = Iterable[Named] | AsyncIterable[Named]
Result = TypeVar("Result")


@CheckpointEngineRegistry.register(BACKEND)  # type: ignore[untyped-decorator, unused-ignore]  # verl stands in no environment of the checks.
class TensorHubCheckpointEngine(CheckpointEngine):  # type: ignore[misc, unused-ignore]  # As above.
    """Moves one model from the actor's workers to the rollout's, over the hub.

    verl makes one in each worker, with `engine_kwargs.tensorhub` of its configuration. Full tensors are sent, in the
    order in which the actor's engine yields them; all but rank 0 only take part in gathering them. Sender and receivers
    have one copy of the model each in the memory of their host, from the first update on.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        *,
        is_master: bool = False,
        model: str = "policy",
        job: str | None = None,
        agent: str | None = None,
        replica: str = "trainer",
        timeout_s: float = 600,
    ) -> None:
        """Nothing is connected before the first update.

        Args:
            bucket_size: verl gives it; there are no buckets here.
            is_master: Whether this is the worker that publishes. verl says so to rank 0 of the actor.
            model: The model's name in the hub.
            job: An isolated namespace; by default `TENSORHUB_JOB`, else "default".
            agent: An agent's id or socket; by default `TENSORHUB_AGENT`, else the first on the worker's host.
            replica: The name of the actor's copy. A rollout worker has a name of its own.
            timeout_s: The bound in seconds of an update, from the moment that a worker takes part in it.
        """
        self.bucket_size, self.is_master = bucket_size, is_master
        self._model, self._job, self._agent = model, job, agent
        self._replica = replica if is_master else f"rollout-{token_hex(6)}"
        self._timeout_s = timeout_s
        self._loop: LoopThread | None = None
        self._hub: tensorhub.AsyncHub | None = None
        self._shard: tensorhub.AsyncShard | None = None
        self._after: int | None = None
        """The newest version before this update; None: no update was begun."""

    # ------------------------------------------------------------------------------------------ what verl calls

    def prepare(self) -> dict[str, Any]:
        """Connect. Rank 0 of the actor says after which version the update comes."""
        return self._run(self._prepared())

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Hand what rank 0 of the actor has said to all.

        Raises:
            ValueError: Rank 0 is no master, or a worker is in another job.
        """
        after, job = metadata[0]["after"], metadata[0]["job"]
        if after is None:
            raise ValueError("rank 0 of the actor is no master: make its checkpoint engine with is_master=True")
        others = sorted({each["job"] for each in metadata} - {job})
        if others:
            raise ValueError(
                f"rank 0 of the actor is in job {job}, and other workers in {', '.join(others)}: set job in "
                f"engine_kwargs.{BACKEND}, or TENSORHUB_JOB for all of them"
            )
        return {"after": [after] * actor_wg_world_size}, {"after": [after] * rollout_world_size}

    def init_process_group(self, after: int) -> None:
        """Note after which version this update comes. There is no process group."""
        self._after = after

    @torch.no_grad()
    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> None:  # noqa: ARG002 (verl gives it; the hub counts versions)
        """Publish the weights as the next version. Other ranks than 0 take part in gathering them, and send nothing.

        Raises:
            LayoutMismatch: A tensor is missing, new, or of another shape or dtype than in the first update.
            TensorHubError: What `register`, `unpublish` and `publish` raise.
        """
        if not self.is_master:
            async for _ in _following(weights):
                pass
            return
        if self._shard is None:
            # Their names and shapes are known at their end alone. Each is copied, as its memory is used again.
            given = {name: tensor.to("cpu", copy=True) async for name, tensor in _following(weights)}
            await self._in_hub(self._publish_first(given))
            return
        shard = self._shard
        await self._in_hub(_emptied(shard, self._timeout_s))
        left = dict(shard.tensors)
        async for name, tensor in _following(weights):
            into = left.pop(name, None)
            if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
                raise LayoutMismatch(
                    f"{name!r} is {tensor.dtype} of {list(tensor.shape)}, and it was "
                    f"{'not there' if into is None else f'{into.dtype} of {list(into.shape)}'} in the first update, or "
                    "it came twice: a model whose tensors change needs another name of the model"
                )
            into.copy_(tensor)
        if left:
            raise LayoutMismatch(f"{next(iter(left))!r} was in the first update, and is missing in this one")
        await self._in_hub(shard.publish(timeout_s=self._timeout_s))

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Named, None]:  # noqa: ARG002 (as above)
        """Read the version of this update, then yield its tensors by name.

        They are in hub memory of the host, and valid until the next update: copy them, and write none of them.

        Raises:
            TensorHubError: No version came within the bound, or it could not be read.
        """
        if self._after is None:
            raise TensorHubError("no update was begun: prepare, build_topology and init_process_group come before it")
        shard = await self._in_hub(self._received(self._after))
        for name, tensor in shard.tensors.items():
            yield name, tensor

    def finalize(self) -> None:
        """End the update. The copies stay: others read from them, and the next update fills them again."""
        self._after = None

    # ------------------------------------------------------------------------------------------ the end

    def close(self) -> None:
        """Release this worker's copy and end the connection. verl does not call it: the agent frees what is left."""
        loop, hub = self._loop, self._hub
        self._loop = self._hub = self._shard = None
        if loop is not None:
            try:
                if hub is not None:
                    loop.run(hub.close())
            finally:
                loop.stop()

    # ------------------------------------------------------------------------------------------ in the hub's loop

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._loop is None:
            self._loop = LoopThread()
        return self._loop.run(work)

    async def _in_hub(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await asyncio.to_thread(self._run, work)

    async def _prepared(self) -> dict[str, Any]:
        hub = await self._connected()
        after = None
        if self.is_master:
            after = max((each.version for each in await hub.versions(self._model)), default=0)
        return {"after": after, "job": hub.job}

    async def _connected(self) -> tensorhub.AsyncHub:
        if self._hub is None:
            self._hub = await tensorhub.connect_async(self._job, agent=self._agent)
        return self._hub

    async def _publish_first(self, given: dict[str, torch.Tensor]) -> None:
        hub = await self._connected()
        shard = await hub.register(
            self._model, given, replica=self._replica, resume="values", timeout_s=self._timeout_s
        )
        # An actor that was started again finds its memory, published where its values are the same.
        await _emptied(shard, self._timeout_s)
        await shard.publish(timeout_s=self._timeout_s)
        self._shard = shard

    async def _received(self, after: int) -> tensorhub.AsyncShard:
        """Have a version newer than `after`: there is one such, which this update publishes."""
        bound = asyncio.timeout(self._timeout_s)
        try:
            async with bound:
                shard = self._shard or await self._registered_as_sent(after)
                while (shard.version or 0) <= after:
                    await shard.update(wait_s=self._timeout_s, timeout_s=self._timeout_s)
                return shard
        except TimeoutError:
            if not bound.expired():
                raise
            raise TensorHubError(
                f"no version after {after} of {self._model} came within {self._timeout_s:g} s: look at rank 0 of the "
                "actor, or allow more with timeout_s"
            ) from None

    async def _registered_as_sent(self, after: int) -> tensorhub.AsyncShard:
        """Register the tensors that the sender has, once it has published them, and read them."""
        hub = await self._connected()
        version = await published_after(hub, self._model, after)
        holder = next(each for each in await hub.replicas(self._model) if each.version == version)
        layout = await hub.registry.layout(holder.members[0].layout)
        specs = {each.name: TensorSpec(each.shape, each.dtype) for each in layout.tensors}
        shard = await hub.register(self._model, specs, replica=self._replica, spot=True, timeout_s=self._timeout_s)
        await shard.replicate(version, timeout_s=self._timeout_s)
        self._shard = shard
        return shard


async def published_after(hub: tensorhub.AsyncHub, model: str, after: int) -> int:
    """Wait until a version newer than `after` is published, and return the first one."""
    async for event in hub.watch(model, kinds=["version.published"]):
        if event.version is not None and event.version > after:
            return event.version
    raise TensorHubError(f"the hub was closed before a version after {after} of {model} was published")


async def _emptied(shard: tensorhub.AsyncShard, timeout_s: float) -> None:
    """Take back what is published, so that the tensors may be written."""
    async with shard.overwriting(timeout_s=timeout_s):
        pass


async def _following(weights: Weights) -> AsyncGenerator[Named, None]:
    """Yield what a generator of either kind yields."""
    if isinstance(weights, AsyncIterable):
        async for name, tensor in weights:
            yield name, tensor
    else:
        for name, tensor in weights:
            yield name, tensor
