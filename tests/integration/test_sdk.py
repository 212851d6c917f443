"""The SDK against a real hub: what its interface promises, in one process and in several.

What callers get wrong is refused in test_bad_input.py; replicas of several shards are in test_resharding.py.
"""

import asyncio
import signal

import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, new_job
from tests.kit.tensors import WEIGHTS_BYTES, assert_same_bytes, full, raw, shown, weights
from tests.kit.transports import BOTH, hub_over
from torch import nn

import tensorhub
from tensorhub import AsyncHub

pytestmark = pytest.mark.asyncio(loop_scope="session")

two_hosts = hub_over(BOTH)


async def test_versions_in_a_row_and_a_reader_that_passes_one_on(two_hosts: RunningHub) -> None:
    """Each version arrives as itself, numbers may be left out, and what is held is fetched once.

    A reader that holds a version is a source of it, although the trainer has moved on and gone.
    """
    async with two_hosts.pair(weights(0)) as it:
        assert it.engine.version is None
        for version in (1, 2, 3, 10, 11, 400):
            assert await it.step(weights(version), version) == version
            assert await it.trainer.publish(version) == version, "it is published already"
            assert await (it.engine.replicate() if version == 1 else it.engine.update()) == version
            assert {it.trainer.version, it.engine.version} == {version}
            assert_same_bytes(it.engine.tensors, weights(version))
            assert await it.engine.update() is None
        assert it.engine.last_read is not None
        assert it.engine.last_read.nbytes == WEIGHTS_BYTES
        await it.trainer.unpublish()
        assert repr(it.trainer) == "<m/trainer shard 0 of 1, version None>"
        it.trainer.tensors["a"].zero_()
        assert_same_bytes(it.engine.tensors, weights(400))
        assert await it.versions() == {**dict.fromkeys((1, 2, 3, 10, 11), "unavailable"), 400: "available"}
        assert (await it.here.versions("m"))[-1].holders == ("engine",)
        await it.trainer.release()
        third = await it.here.register("m", weights(99), replica="third")
        assert await third.replicate(400) == 400
        assert_same_bytes(third.tensors, weights(400))
        await it.engine.release()
        assert [each.replica for each in await it.here.replicas("m")] == ["third"]


async def test_equal_bytes_of_another_replica_make_it_a_holder(hub: RunningHub) -> None:
    async with hub.pair(weights(1), weights(1)) as it:
        for shard in (it.trainer, it.engine):
            assert await shard.publish(5) == 5
        assert (await it.here.versions("m"))[-1].holders == ("engine", "trainer")
        await it.trainer.release()
        reader = await it.here.register("m", weights(99), replica="reader")
        assert await reader.replicate(5) == 5
        assert_same_bytes(reader.tensors, weights(1))


async def test_update_waits_for_something_newer(hub: RunningHub) -> None:
    async with hub.pair(full(1)) as it:
        await it.trainer.publish()
        await it.engine.replicate()
        waiting = asyncio.create_task(it.engine.update(wait_s=30, timeout_s=30))
        assert await it.step(full(3)) == 2
        assert await waiting == 2
        assert shown(it.engine) == {3.0}
        assert await it.engine.update(wait_s=0.2) is None


async def first(hub: AsyncHub, count: int, after: int | None = None) -> list[tensorhub.Watched]:
    events: list[tensorhub.Watched] = []
    async with asyncio.timeout(WAIT_S):
        async for event in hub.watch("m", after=after):
            events.append(event)
            if len(events) == count:
                return events
    raise AssertionError


async def test_questions_may_be_the_first_thing_that_is_asked(hub: RunningHub) -> None:
    async with hub.connected() as (here, _):
        assert await here.versions("m") == []
    async with hub.connected() as (here, there):
        watching = asyncio.create_task(first(there, 1))
        await (await here.register("m", full(1), replica="trainer")).publish()
        assert [each.version for each in await watching] == [1]


async def test_watch_resumes_where_it_was_left_and_ends_with_its_hub(hub: RunningHub) -> None:
    async with hub.pair(full(1)) as it:
        for version in (1, 2):
            await it.trainer.publish(version)
            await it.trainer.unpublish()
        events = await first(it.here, 4)
        assert [(each.kind, each.version) for each in events] == [
            (f"version.{what}", version) for version in (1, 2) for what in ("published", "unavailable")
        ]
        assert await first(it.here, 2, after=events[1].seq) == events[2:]
        assert [each.seq for each in events] == sorted(each.seq for each in events)
    async with hub.connected(agents=1) as (here,):
        watching = asyncio.create_task(first(here, 1))
        await asyncio.sleep(0)
        await here.close()
        with pytest.raises(tensorhub.AgentUnavailable, match="closed"):
            await watching


RANK = """
import sys, torch, tensorhub
role, index, job = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with tensorhub.connect(job, agent=f"agent-{index if role == 'trainer' else 1 - index}") as hub:
    spec = tensorhub.TensorSpec((2, 3), "float32", (4, 3), (2 * index, 0))
    shard = hub.register("m", {"w": spec}, replica=role, shard=index, shards=2)
    if role == "engine":
        print(shard.replicate(), shard.tensors["w"].tolist())
    else:
        shard.tensors["w"].fill_(index + 1)
        shard.publish(1)
        next(event for event in hub.watch("m", kinds=("replica.ready",)) if event.replica == "engine")
"""


async def test_processes_bring_a_model_to_each_other(hub: RunningHub) -> None:
    job = new_job()
    roles = [(role, index) for role in ("trainer", "engine") for index in (0, 1)]
    ended = await asyncio.gather(*(hub.run(RANK, role, str(index), job) for role, index in roles))
    assert [err for _, _, err in ended] == [""] * 4
    assert [out for _, out, _ in ended] == ["", "", *(f"1 {[[float(n)] * 3] * 2}\n" for n in (1, 2))]


@pytest.mark.parametrize("install", ["in-place", "staged"])
async def test_a_worker_that_was_killed_finds_its_memory(hub: RunningHub, install: str) -> None:
    """A trainer what it published. A staged engine what was swapped in: after one swap that is its second segment."""
    async with hub.pair(full(5, 9)) as it:
        await it.trainer.publish(3)
        async with hub.worker(it.job) as first_life:
            await first_life.ask("register_full", "m", "worker", 9, 0.0, {"install": install})
            assert await first_life.ask("replicate", "worker") == 3
            first_life.say('["die"]')
            assert await first_life.code() == -signal.SIGKILL
        worker = await it.here.register("m", full(0, 9), replica="worker", install=install)
        assert (worker.version, shown(worker)) == (3, {5.0})
        assert await it.step(full(6, 9)) == 4
        assert await worker.update() == 4
        assert shown(worker) == {6.0}


async def test_an_agent_that_is_killed_comes_back_to_its_worker(hub: RunningHub) -> None:
    async with hub.pair(full(4)) as it:
        await it.trainer.publish(7)
        await hub.until_back("agent-0", hub.kill("agent-0"))
        # It holds version 7 already, so this shows no more than that it is attached again.
        assert await it.trainer.publish(7) == 7
        assert await it.engine.replicate(7, timeout_s=WAIT_S) == 7
        assert shown(it.engine) == {4.0}
        assert await it.step(full(5)) == 8
        assert await it.engine.update(wait_s=WAIT_S) == 8
        assert shown(it.engine) == {5.0}


async def test_one_shard_has_one_worker(hub: RunningHub) -> None:
    """Another connection, another agent and another process are each refused, and nothing is taken from the first."""
    async with hub.pair(full(1)) as it, hub.connected(it.job, agents=1) as (again,):
        await it.trainer.publish(5)
        before = await hub.catalog(it.job)
        for other in (it.here, again, it.there):
            with pytest.raises(tensorhub.ReplicaConflict, match="m/trainer"):
                await other.register("m", full(1), replica="trainer")
        for agent in (0, 1):
            async with hub.worker(it.job, agent) as other_process:
                with pytest.raises(Exception, match=r"ReplicaConflict: [^\n]*m/trainer[^\n]*$"):
                    await other_process.ask("register_full", "m", "trainer", 1000, 1.0, {})
        assert await hub.catalog(it.job) == before
        assert await it.step(full(2)) == 6


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


async def test_module_trains_in_hub_memory(two_hosts: RunningHub) -> None:
    """An optimizer that was built before goes on training the same parameters, and each version reaches the reader."""
    torch.manual_seed(0)
    model, copy = Tied(), Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    before = dict(model.named_parameters())
    tokens = torch.randint(0, 50, (64,))
    async with two_hosts.pair(model, copy) as it:
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
