"""A trainer that writes to what it has published: its reader is told why, and so is the trainer."""

import asyncio
import logging
from pathlib import Path

import pytest
import torch
from tests.integration.hubs import new_job, running_hub

from tensorhub_common.errors import IntegrityError

WAIT_S = 30.0


@pytest.mark.long
async def test_stepping_without_overwriting_is_named_to_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_hub(tmp_path) as hub, hub.connected(new_job()) as (there, here):
        policy = await there.register("m", {"w": torch.ones(4096), "b": torch.ones(8)}, replica="trainer")
        engine = await here.register("m", {"w": torch.zeros(4096), "b": torch.zeros(8)}, replica="engine")
        await policy.publish()
        policy.tensors["w"].add_(1)
        with pytest.raises(IntegrityError, match="most likely its worker wrote to the tensors") as told:
            await engine.replicate(timeout_s=WAIT_S)
        assert "trainer/0 on agent-0" in str(told.value)
        assert "publish a new version there" in str(told.value)
        async with asyncio.timeout(WAIT_S):
            while not (errors := [each for each in caplog.records if each.levelno == logging.ERROR]):  # noqa: ASYNC110 (a log tells nobody)
                await asyncio.sleep(0.01)
        (line,) = errors
        assert "published tensors were overwritten" in line.getMessage()
        assert "(w)" in line.getMessage()
        async with policy.overwriting(publish=True):
            policy.tensors["w"].fill_(3)
        assert await engine.replicate(timeout_s=WAIT_S) == 2
        assert torch.equal(engine.tensors["w"], policy.tensors["w"])
    assert "1 of the tensors of version 1 were overwritten" in (tmp_path / "logs" / "agent-0.log").read_text()
