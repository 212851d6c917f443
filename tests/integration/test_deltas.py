"""Exact deltas between real agents of different hosts: equal bytes, few on the wire, and all of them when they must."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from tests.integration.hubs import RunningHub, assert_same_bytes, new_job, running_hub
from tests.integration.transports import UCXX

import tensorhub
from tensorhub import AsyncShard, ReadReport, TensorSpec

MIB: Final = 1024 * 1024
MODEL: Final = "policy"
SPECS: Final = {
    "blocks.weight": TensorSpec((12, MIB), torch.bfloat16),
    "blocks.scale": TensorSpec((300_001,), torch.float32),
    "norm": TensorSpec((1000,), torch.bfloat16),
    "steps": TensorSpec((), torch.int64),
}
SHARE_MAX: Final = 0.03
READ_S: Final = 60.0


@dataclass
class Stage:
    """A trainer and readers on hosts of their own."""

    hub: RunningHub
    trainer: AsyncShard
    readers: list[AsyncShard]
    hubs: list[tensorhub.AsyncHub]
    version: int = 0
    chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    async def publish(self, share: float) -> None:
        """Change this share of the values, by whole values, NaNs among them, and publish."""
        if self.version:
            await self.trainer.unpublish()
        for name, tensor in self.trainer.tensors.items():
            size = tensor.element_size()
            values = tensor.detach().reshape(-1).view(torch.uint8).numpy().reshape(-1, size)
            which = self.chance.random(len(values)) < (share if name != "steps" else 1.0)
            values[which] = self.chance.integers(0, 256, (int(which.sum()), size), dtype=np.uint8)
        self.version += 1
        assert await self.trainer.publish(timeout_s=READ_S) == self.version

    async def update(self, reader: int) -> ReadReport:
        """Bring one reader to the last version; its bytes are the trainer's."""
        shard = self.readers[reader]
        assert await shard.replicate("latest", timeout_s=READ_S) == self.version
        assert_same_bytes(shard.tensors, self.trainer.tensors)
        assert shard.last_read is not None
        return shard.last_read


@asynccontextmanager
async def stage(hub: RunningHub, install: str = "in-place") -> AsyncIterator[Stage]:
    async with hub.connected(agents=len(hub.file.agents), job=new_job()) as hubs:
        trainer = await hubs[0].register(MODEL, SPECS, replica="trainer")
        readers = [
            await each.register(MODEL, SPECS, replica=f"rollout-{number}", install=install)
            for number, each in enumerate(hubs[1:])
        ]
        yield Stage(hub, trainer, readers, hubs)


@pytest.fixture(params=[UCXX])
async def deltas_hub(tmp_path: Path) -> AsyncIterator[RunningHub]:
    async with running_hub(tmp_path, agents=3, hosts=3, TENSORHUB_DELTAS="4") as hub:
        yield hub


def wire_share(report: ReadReport) -> float:
    """Return which part of the payload has crossed."""
    saved = sum(each.nbytes - each.wire_bytes for source in report.sources for each in source.encoded)
    return (report.got_bytes + report.wasted_bytes - saved) / report.nbytes


def by_delta(report: ReadReport) -> bool:
    return any(each.how == "delta" for source in report.sources for each in source.encoded)


@pytest.mark.parametrize("install", ["in-place", "staged"])
async def test_one_percent_of_the_values_is_far_less_of_the_bytes(deltas_hub: RunningHub, install: str) -> None:
    async with stage(deltas_hub, install) as it:
        await it.publish(1.0)
        first = await it.update(0)
        assert (by_delta(first), wire_share(first)) == (False, 1.0)
        for _ in range(2):
            await it.publish(0.01)
            report = await it.update(0)
            assert by_delta(report)
            assert wire_share(report) <= SHARE_MAX, report
            assert report.base == it.version - 1


async def test_a_chain_leads_over_versions_that_the_reader_skipped(deltas_hub: RunningHub) -> None:
    async with stage(deltas_hub) as it:
        await it.publish(1.0)
        await it.update(0)
        await it.update(1)
        for _ in range(3):
            await it.publish(0.01)
            # A reader that comes at once waits for the delta, so it is whole before the trainer goes on.
            await it.update(1)
        report = await it.update(0)
        assert by_delta(report)
        assert wire_share(report) <= 3 * SHARE_MAX
        assert report.base == 1


async def test_a_reader_serves_the_delta_that_it_has_applied(deltas_hub: RunningHub) -> None:
    """The trainer has gone on to write when the last reader comes: the other reader gives it the delta."""
    async with stage(deltas_hub) as it:
        await it.publish(1.0)
        await it.update(0)
        await it.update(1)
        await it.publish(0.01)
        await it.update(0)
        await it.trainer.unpublish()
        report = await it.update(1)
        assert {source.replica for source in report.sources if source.nbytes} == {"rollout-0"}
        assert by_delta(report)
        assert wire_share(report) <= SHARE_MAX


async def test_when_everything_changed_the_pieces_themselves_come(deltas_hub: RunningHub) -> None:
    async with stage(deltas_hub) as it:
        await it.publish(1.0)
        await it.update(0)
        await it.publish(1.0)
        report = await it.update(0)
        assert wire_share(report) == pytest.approx(1.0, abs=0.01)
        await it.publish(0.01)
        assert wire_share(await it.update(0)) <= SHARE_MAX
