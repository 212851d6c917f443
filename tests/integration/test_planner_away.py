"""A planner that is away is waited for: its silence says nothing about who holds a version."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.integration.hubs import running_hub
from tests.stopping import stop

SOURCES_LOST_S = 0.5
"""So long a read goes on without a source."""

AWAY_S = 1.5


@pytest.mark.long
async def test_a_read_outlives_its_planner(tmp_path: Path) -> None:
    async with (
        running_hub(tmp_path, TENSORHUB_SOURCES_LOST_S=str(SOURCES_LOST_S)) as hub,
        hub.connected() as (here, there),
    ):
        trainer = await here.register("m", {"w": torch.arange(1000)}, replica="trainer")
        await trainer.publish(1)
        reader = await there.register("m", {"w": torch.zeros(1000, dtype=torch.int64)}, replica="reader")
        planner = hub.file.planner.pid
        stop(planner)
        asyncio.get_running_loop().call_later(AWAY_S, os.kill, planner, signal.SIGCONT)
        assert await reader.replicate(1, timeout_s=20) == 1
        assert torch.equal(reader.tensors["w"], torch.arange(1000))
