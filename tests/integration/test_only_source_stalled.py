"""A read whose only holder is stopped, while the log counts it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.bounds import WAIT_S
from tests.integration.hubs import new_job, running_hub
from tests.stopping import stop

import tensorhub
from tensorhub_common.errors import RoundTimeout

LONG_S = 30.0
LEFT = "on agent-0, was left because"
VALUES = {"w": torch.arange(4096, dtype=torch.float32)}


async def refusal(engine: tensorhub.AsyncShard, timeout_s: float) -> str:
    with pytest.raises(RoundTimeout) as why:
        await engine.replicate(timeout_s=timeout_s)
    return str(why.value)


@pytest.mark.long
async def test_a_read_goes_on_while_the_log_counts_its_holder(tmp_path: Path) -> None:
    """It waits past every bound of a source, ends soon after the holder is back, and else at its own deadline."""
    async with (
        running_hub(tmp_path, TENSORHUB_STALL_S="0.3", TENSORHUB_LOST_AFTER_S="600") as hub,
        hub.connected(new_job()) as (there, here),
    ):
        trainer = await there.register("m", VALUES, replica="trainer")
        engine = await here.register("m", {"w": torch.zeros(4096)}, replica="engine")
        assert await trainer.publish() == 1
        holder = hub.file.agents[0].pid
        stop(holder)
        try:
            async with asyncio.timeout(WAIT_S):
                # On a busy machine it takes longer until a source is left.
                bound_s = 4.0
                while LEFT not in await refusal(engine, bound_s):
                    bound_s *= 2
                assert await engine.update(timeout_s=bound_s) is None
            assert engine.last_read is not None
            assert LEFT in engine.last_read.failure
            reading = asyncio.create_task(engine.replicate(timeout_s=LONG_S))
            done, _ = await asyncio.wait({reading}, timeout=2.0)
            assert not done
        finally:
            os.kill(holder, signal.SIGCONT)
        assert await reading == 1
        assert torch.equal(engine.tensors["w"], VALUES["w"])


async def test_a_read_ends_at_once_when_the_log_counts_no_holder(tmp_path: Path) -> None:
    """And later ones are told that the version was published, and which holder of it is lost."""
    async with (
        running_hub(tmp_path, TENSORHUB_STALL_S="0.3", TENSORHUB_LOST_AFTER_S="2") as hub,
        hub.connected(new_job()) as (there, here),
    ):
        trainer = await there.register("m", VALUES, replica="trainer")
        engine = await here.register("m", {"w": torch.zeros(4096)}, replica="engine")
        assert await trainer.publish() == 1
        holder = hub.file.agents[0].pid
        stop(holder)
        try:
            async with asyncio.timeout(LONG_S):
                with pytest.raises(tensorhub.VersionUnavailable):
                    await engine.replicate(1, timeout_s=600)
            lost = r"version 1 of model 'm' was published, but its last holder is lost \(trainer on agent-0, lost \d+ s"
            for wish in (1, "latest"):
                with pytest.raises(tensorhub.VersionUnavailable, match=lost):
                    await engine.replicate(wish, timeout_s=0.5)
        finally:
            os.kill(holder, signal.SIGCONT)
        # A release that the loss overtakes is to be repeated, so the end of this test waits until the agent is back.
        async with asyncio.timeout(WAIT_S):
            while not all(member.live for each in await here.replicas("m") for member in each.members):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
