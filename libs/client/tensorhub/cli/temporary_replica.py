"""The replica that a command is while it reads weights.

Always true: it is gone afterwards, also where the command failed or was interrupted; `release` takes back what is left.
"""

from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple

from tensorhub.aio.hub import AsyncHub
from tensorhub.aio.shard import AsyncShard
from tensorhub.cli.runner import TIDY_S, CommandDeadline
from tensorhub.mapping import Mapping
from tensorhub.specs import TensorSpec
from tensorhub_common.layout.layout import Layout
from tensorhub_common.protocol.queries import ReplicaInfo

if TYPE_CHECKING:
    from torch import nn


class _Place(NamedTuple):
    """One of its shards."""

    shard: int
    shards: int
    specs: dict[str, TensorSpec]


class TemporaryReplica:
    """One replica of a model, with a name of its own."""

    def __init__(self, model: str, command: str) -> None:
        self.model, self.name = model, f"{command}-{token_hex(6)}"
        self._places: list[_Place] = []

    async def register_as(self, hub: AsyncHub, holder: ReplicaInfo, bound: CommandDeadline) -> list[AsyncShard]:
        """Bring the same shards as the holder's, without values."""
        shards = []
        for member in holder.members:
            place = _Place(member.shard, holder.shards, _specs(await hub.registry.layout(member.layout)))
            self._places.append(place)
            shards.append(await self._registered(hub, place, bound.left_s(f"registering shard {member.shard}")))
        return shards

    async def register_module(
        self, hub: AsyncHub, module: "nn.Module", mapping: Mapping | None, bound: CommandDeadline
    ) -> AsyncShard:
        """Bring one shard, whose memory becomes that of the module's parameters. `mapping`: as `register` has it."""
        from tensorhub._tensors.description import describe  # noqa: PLC0415 (it imports torch, which other commands do without)

        self._places.append(_Place(0, 1, _specs(describe(module, mapping).layout)))
        timeout_s = bound.left_s("registering the model")
        return await hub.register(
            self.model, module, replica=self.name, spot=True, mapping=mapping, timeout_s=timeout_s
        )

    async def release(self, hub: AsyncHub) -> None:
        """Take back, on another connection, what is left there."""
        if not self._places:
            return
        there = {(each.replica, member.shard) for each in await hub.replicas(self.model) for member in each.members}
        for place in self._places:
            if (self.name, place.shard) in there:
                await (await self._registered(hub, place, TIDY_S)).release(timeout_s=TIDY_S)

    async def _registered(self, hub: AsyncHub, place: _Place, timeout_s: float) -> AsyncShard:
        return await hub.register(
            self.model,
            place.specs,
            replica=self.name,
            shard=place.shard,
            shards=place.shards,
            spot=True,
            timeout_s=timeout_s,
        )


def _specs(layout: Layout) -> dict[str, TensorSpec]:
    return {
        entry.name: TensorSpec(entry.shape, entry.dtype, entry.global_shape, entry.offset, entry.parts)
        for entry in layout.tensors
    }
