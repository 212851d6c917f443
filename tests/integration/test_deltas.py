"""Exact deltas between real agents of different hosts: equal bytes, few on the wire, and all of them when they must."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, module_hub
from tests.kit.tensors import assert_same_bytes
from tests.kit.transports import NEEDS_UCX
from tests.kit.waiting import retried, until

import tensorhub
from tensorhub import AsyncShard, ReadReport, TensorSpec
from tensorhub.arguments import Install

pytestmark = pytest.mark.asyncio(loop_scope="module")
MIB: Final = 1024 * 1024
MODEL: Final = "policy"
GPU: Final = "GPU-fake-0"
SPECS: Final = {
    "blocks.weight": TensorSpec((12, MIB), torch.bfloat16),
    "blocks.scale": TensorSpec((300_001,), torch.float32),
    "norm": TensorSpec((1000,), torch.bfloat16),
    "steps": TensorSpec((), torch.int64),
}
SHARE_MAX: Final = 0.03
FEW: Final = 0.003
"""Of the values so many change where a patch is to be sooner there than the piece, over a loopback too."""
FIRST_MADE_S: Final = 5.0
BEGINNINGS_MAX: Final = 20
KEPT: Final = 4
KILLS: Final = 4
KILLED_WITHIN_S: Final = 0.08
THREE_HOSTS: Final = pytest.param(3, id="ucxx", marks=NEEDS_UCX)


@dataclass
class Training:
    hub: RunningHub
    trainer: AsyncShard
    readers: list[AsyncShard]
    version: int = 0
    chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    async def publish(self, share: float) -> None:
        """Change this share of the values, by whole values, NaNs among them, and publish."""
        if self.version:
            # An agent that was killed is started again, and finds the shard in its memory.
            await retried(self.trainer.unpublish, tensorhub.AgentUnavailable)
        for name, tensor in self.trainer.tensors.items():
            size = tensor.element_size()
            values = tensor.detach().reshape(-1).view(torch.uint8).numpy().reshape(-1, size)
            which = self.chance.random(len(values)) < (share if name != "steps" else 1.0)
            values[which] = self.chance.integers(0, 256, (int(which.sum()), size), dtype=np.uint8)
        self.version += 1
        assert await self.trainer.publish(timeout_s=WAIT_S) == self.version

    async def begin(self) -> None:
        """Publish, and let all readers read, until the trainer's agent makes deltas: its first copy takes a moment."""
        await self.publish(1.0)
        for _ in range(BEGINNINGS_MAX):
            reports = [await self.update(reader) for reader in range(len(self.readers))]
            if all(map(by_delta, reports)):
                return
            with contextlib.suppress(AssertionError):
                await self.publish_with_delta(FEW, FIRST_MADE_S)
        pytest.fail("no delta was made")

    async def publish_with_delta(self, share: float, bound_s: float = WAIT_S) -> None:
        """Publish, and wait until the delta is made: over a fast link no read would wait for it."""
        made = self._made()
        await self.publish(share)
        await until(lambda: self._made() > made, "a delta is made", bound_s)

    def _made(self) -> int:
        return self.hub.log("agent-0").count("a delta of ")

    async def update(self, reader: int) -> ReadReport:
        """Bring one reader to the last version; its bytes are the trainer's."""
        shard = self.readers[reader]
        assert await shard.replicate("latest", timeout_s=WAIT_S) == self.version
        assert_same_bytes(shard.tensors, self.trainer.tensors)
        assert shard.last_read is not None
        return shard.last_read


@asynccontextmanager
async def training(
    hub: RunningHub, install: Install = "in-place", memories: tuple[str, str] = ("host", "host")
) -> AsyncIterator[Training]:
    """Register a trainer and two readers, in these memories."""
    async with hub.connected(agents=3) as hubs:
        trainer = await hubs[0].register(MODEL, SPECS, replica="trainer", memory=memories[0])
        readers = [
            await each.register(MODEL, SPECS, replica=f"rollout-{number}", install=install, memory=memories[1])
            for number, each in enumerate(hubs[1:])
        ]
        yield Training(hub, trainer, readers)


# Three agents on hosts of their own; at debug an agent's log has a line for each delta that it has made.
hub = module_hub(3, over=[THREE_HOSTS], TENSORHUB_DELTAS=str(KEPT), TENSORHUB_LOG_LEVEL="debug")


def wire_share(report: ReadReport) -> float:
    saved = sum(each.nbytes - each.wire_bytes for source in report.sources for each in source.encoded)
    return (report.got_bytes + report.wasted_bytes - saved) / report.nbytes


def by_delta(report: ReadReport) -> bool:
    return any(each.how == "delta" for source in report.sources for each in source.encoded)


@pytest.mark.long
@pytest.mark.parametrize("install", ["in-place", "staged"])
async def test_one_percent_of_the_values_is_far_less_of_the_bytes(hub: RunningHub, install: Install) -> None:
    async with training(hub, install) as it:
        await it.begin()
        for _ in range(2):
            await it.publish_with_delta(FEW)
            report = await it.update(0)
            assert by_delta(report)
            assert wire_share(report) <= SHARE_MAX, report
            assert report.base == it.version - 1


@pytest.mark.parametrize("install", ["in-place", pytest.param("staged", marks=pytest.mark.long)])
@pytest.mark.parametrize("memories", [(GPU, GPU), ("host", GPU), (GPU, "host")], ids="-to-".join)
async def test_either_end_may_be_in_a_gpus_memory(hub: RunningHub, memories: tuple[str, str], install: Install) -> None:
    """And a reader there serves the delta that it has applied, after its trainer has gone on to write."""
    async with training(hub, install, memories) as it:
        await it.begin()
        await it.publish_with_delta(FEW)
        first = await it.update(0)
        await it.trainer.unpublish()
        second = await it.update(1)
        assert {source.replica for source in second.sources if source.nbytes} == {"rollout-0"}
        for report in (first, second):
            assert by_delta(report)
            assert wire_share(report) <= SHARE_MAX, report


@pytest.mark.long
async def test_a_reader_serves_the_delta_that_it_has_applied(hub: RunningHub) -> None:
    """The trainer has gone on to write when the last reader comes: the other reader gives it the delta."""
    async with training(hub) as it:
        await it.begin()
        await it.publish_with_delta(FEW)
        await it.update(0)
        await it.trainer.unpublish()
        report = await it.update(1)
        assert {source.replica for source in report.sources if source.nbytes} == {"rollout-0"}
        assert by_delta(report)
        assert wire_share(report) <= SHARE_MAX


@pytest.mark.long
async def test_all_is_read_where_no_delta_leads_to_it_and_deltas_come_again_later(hub: RunningHub) -> None:
    """Where everything changed, to a reader that is further behind than deltas are kept, and from one restarted."""
    async with training(hub) as it:
        await it.begin()
        await it.publish_with_delta(1.0)
        assert wire_share(await it.update(0)) == pytest.approx(1.0, abs=0.01)
        await it.publish_with_delta(FEW)
        assert wire_share(await it.update(0)) <= SHARE_MAX
        for _ in range(KEPT + 1):
            await it.publish_with_delta(FEW)
        report = await it.update(0)
        assert not by_delta(report)
        assert wire_share(report) == pytest.approx(1.0, abs=0.01)
        await it.publish_with_delta(FEW)
        assert by_delta(await it.update(0))
        hub.kill("agent-0")
        await it.publish(FEW)
        assert not by_delta(await it.update(0))
        await it.begin()


@pytest.mark.long
async def test_what_was_half_patched_when_its_agent_was_killed_is_no_base_and_read_whole(hub: RunningHub) -> None:
    """Killed at a moment of chance within the read; the next one of the shard ends with the trainer's bytes."""
    async with training(hub) as it:
        await it.begin()
        for _ in range(KILLS):
            await it.publish_with_delta(FEW)
            reading = asyncio.create_task(it.readers[0].replicate("latest", timeout_s=WAIT_S))
            await asyncio.sleep(it.chance.random() * KILLED_WITHIN_S)
            hub.kill("agent-1")
            with contextlib.suppress(tensorhub.TensorHubError):
                await reading
            await retried(lambda: it.update(0), tensorhub.AgentUnavailable)
            # The other reader has what it held, and goes on by deltas.
            await it.update(1)
