"""Versions in a row, replicas of several shards, several holders, and a model that trains in the hub's memory."""

import asyncio

import pytest
import torch
from tests.integration.hubs import RunningHub, assert_same_bytes, raw
from tests.integration.transports import BOTH, HUB_OF
from torch import nn

import tensorhub

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module", params=BOTH)
def hub(request: pytest.FixtureRequest) -> RunningHub:
    hub: RunningHub = request.getfixturevalue(HUB_OF[request.param])
    return hub


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(77, 1003, generator=generator) for name in ("a", "b")}


def filled(shard: tensorhub.AsyncShard, values: dict[str, torch.Tensor]) -> None:
    for name, tensor in shard.tensors.items():
        tensor.copy_(values[name])


async def test_several_versions_in_a_row(hub: RunningHub) -> None:
    """Each version arrives as itself, numbers may be left out, and what is held is fetched once."""
    async with hub.connected() as (here, there):
        trainer = await here.register("m", weights(0), replica="trainer")
        reader = await there.register("m", weights(99), replica="reader")
        for version in (1, 2, 3, 10, 11, 400):
            filled(trainer, weights(version))
            assert await trainer.publish(version) == version
            assert await reader.update() == version
            assert_same_bytes(reader.tensors, weights(version))
            assert reader.version == version
            assert await reader.update() is None
            await trainer.unpublish()
        assert_same_bytes(reader.tensors, weights(400))


async def test_reader_passes_it_on(hub: RunningHub) -> None:
    """Once a reader holds a version it is a source: a third gets it although the trainer has moved on and gone."""
    async with hub.connected() as (here, there):
        trainer = await here.register("m", weights(1), replica="trainer")
        second = await there.register("m", weights(98), replica="second")
        await trainer.publish()
        await second.replicate()
        await trainer.unpublish()
        filled(trainer, weights(2))
        await trainer.release()
        third = await here.register("m", weights(99), replica="third")
        assert await third.replicate(1) == 1
        assert_same_bytes(third.tensors, weights(1))


async def test_equal_bytes_of_another_replica(hub: RunningHub) -> None:
    """Whoever has the same bytes may publish the same version, and is a holder from then on."""
    async with hub.connected() as (here, there):
        one = await here.register("m", weights(1), replica="one")
        two = await there.register("m", weights(1), replica="two")
        other = await there.register("m", weights(2), replica="other")
        assert await one.publish(5) == 5
        assert await two.publish(5) == 5
        with pytest.raises(tensorhub.VersionConflict):
            await other.publish(5)
        assert (await here.versions("m"))[-1].holders == ("one", "two")
        await one.release()
        reader = await here.register("m", weights(99), replica="reader")
        assert await reader.replicate(5) == 5
        assert_same_bytes(reader.tensors, weights(1))
        assert_same_bytes(other.tensors, weights(2))


async def test_replicas_of_several_shards(hub: RunningHub) -> None:
    """Three shards over two agents: each reader's shard gets its own part, and all become ready together."""
    parts = [weights(10), {"c": torch.randn(5)}, {"d": torch.arange(1_000_000), "e": torch.empty(0)}]
    async with hub.connected() as (here, there):
        on = (here, there, here)
        against = (there, here, there)
        trainers = [
            await on[n].register("m", parts[n], replica="trainer", shard=n, shards=3) for n in range(len(parts))
        ]
        specs = [{name: tensorhub.TensorSpec(each.shape, each.dtype) for name, each in part.items()} for part in parts]
        readers = [
            await against[n].register("m", specs[n], replica="reader", shard=n, shards=3) for n in range(len(parts))
        ]
        for version in (1, 2):
            for shard in trainers:
                for tensor in shard.tensors.values():
                    tensor.add_(version)
            assert await asyncio.gather(*(shard.publish(version) for shard in trainers)) == [version] * 3
            assert await asyncio.gather(*(shard.update() for shard in readers)) == [version] * 3
            for trainer, reader in zip(trainers, readers, strict=True):
                assert_same_bytes(reader.tensors, trainer.tensors)
            await asyncio.gather(*(shard.unpublish() for shard in trainers))


class Tied(nn.Module):
    """A tiny language model whose two tables are one, with buffers of both kinds."""

    seen: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.mix = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(16), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += len(tokens)
        hidden = self.norm(torch.relu(self.mix(self.embed(tokens) * self.mask)))
        logits: torch.Tensor = self.head(hidden)
        return logits


async def test_module_trains_in_hub_memory(hub: RunningHub) -> None:
    """An optimizer that was built before goes on training the same parameters, and each version reaches the reader."""
    torch.manual_seed(0)
    model, copy = Tied(), Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    before = dict(model.named_parameters())
    tokens = torch.randint(0, 50, (64,))
    async with hub.connected() as (here, there):
        trainer = await here.register("m", model, replica="trainer")
        reader = await there.register("m", copy, replica="reader")
        assert all(before[name] is parameter for name, parameter in model.named_parameters())
        assert model.head.weight is model.embed.weight
        assert copy.head.weight is copy.embed.weight
        losses = []
        for version in range(1, 6):
            for _ in range(5):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(tokens), tokens)
                loss.backward()
                optimizer.step()
            losses.append(float(loss.detach()))
            assert await trainer.publish() == version
            assert await reader.update() == version
            assert_same_bytes(reader.tensors, trainer.tensors)
            theirs = dict(copy.named_buffers()) | dict(copy.named_parameters())
            for name, tensor in (dict(model.named_buffers()) | dict(model.named_parameters())).items():
                assert torch.equal(raw(theirs[name]), raw(tensor)), name
            assert int(copy.seen) == 64 * 5 * version
            await trainer.unpublish()
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] / 5
    # The memory is this process's own now, and the model goes on.
    assert torch.equal(model.head.weight, copy.head.weight)
