"""Versions in a row, replicas of several shards, several holders, and a model that trains in the hub's memory."""

import asyncio

import pytest
import torch
from tests.kit.hubs import RunningHub
from tests.kit.tensors import assert_same_bytes, raw, specs_of, weights
from tests.kit.transports import BOTH, hub_over
from torch import nn

import tensorhub

pytestmark = pytest.mark.asyncio(loop_scope="session")


hub = hub_over(BOTH)


async def test_several_versions_in_a_row_and_a_reader_that_passes_one_on(hub: RunningHub) -> None:
    """Each version arrives as itself, numbers may be left out, and what is held is fetched once.

    A reader that holds a version is a source of it, although the trainer has moved on and gone.
    """
    async with hub.pair(weights(0)) as it:
        for version in (1, 2, 3, 10, 11, 400):
            assert await it.step(weights(version), version) == version
            assert await it.engine.update() == it.engine.version == version
            assert_same_bytes(it.engine.tensors, weights(version))
            assert await it.engine.update() is None
        async with it.trainer.overwriting():
            it.trainer.tensors["a"].zero_()
        assert_same_bytes(it.engine.tensors, weights(400))
        await it.trainer.release()
        third = await it.here.register("m", weights(99), replica="third")
        assert await third.replicate(400) == 400
        assert_same_bytes(third.tensors, weights(400))


async def test_equal_bytes_of_another_replica(hub: RunningHub) -> None:
    """A replica with the same bytes may publish the same version, and is a holder from then on."""
    async with hub.connected() as (here, there):
        one, two, other = [
            await at.register("m", weights(seed), replica=name)
            for at, name, seed in ((here, "one", 1), (there, "two", 1), (there, "other", 2))
        ]
        for shard in (one, two):
            assert await shard.publish(5) == 5
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
    async with hub.connected() as hubs:
        trainers = [
            await hubs[n % 2].register("m", part, replica="trainer", shard=n, shards=3) for n, part in enumerate(parts)
        ]
        readers = [
            await hubs[1 - n % 2].register("m", specs_of(part), replica="reader", shard=n, shards=3)
            for n, part in enumerate(parts)
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
    async with hub.pair(model, copy) as it:
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
            assert await it.trainer.publish() == version
            assert await it.engine.update() == version
            assert_same_bytes(it.engine.tensors, it.trainer.tensors)
            theirs = dict(copy.named_buffers()) | dict(copy.named_parameters())
            for name, tensor in (dict(model.named_buffers()) | dict(model.named_parameters())).items():
                assert torch.equal(raw(theirs[name]), raw(tensor)), name
            assert int(copy.seen) == 64 * 5 * version
            await it.trainer.unpublish()
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] / 5
    # The memory is this process's own now, and the model goes on.
    assert torch.equal(model.head.weight, copy.head.weight)
