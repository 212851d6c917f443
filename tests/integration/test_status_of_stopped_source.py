"""What `tensorhub status` shows of a read whose source is stopped in the middle of it."""

import asyncio
import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bounds import WAIT_S
from tests.integration.hubs import RunningHub, held_hub, new_job, until_held
from tests.integration.transports import NO_UCX

import tensorhub
from tensorhub.cli.hub_state import STILL_S
from tensorhub_common.bus.connection import connect
from tensorhub_common.introspection.activity import gather_activity
from tensorhub_common.protocol.activity import ActiveRead

NBYTES = 48 * 1024 * 1024


async def status(hub: RunningHub, job: str, *options: str) -> str:
    script = Path(sys.executable).with_name("tensorhub")
    command = (str(script), "status", "--job", job, "--dir", str(hub.directory / "hub"), *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(WAIT_S):
        return (await process.communicate())[0].decode()


async def until_still(hub: RunningHub, job: str) -> ActiveRead:
    """Return the read, by its agent's word, once nothing has come for so long that it is told as trouble."""
    async with await connect(hub.file.nats, name="test", credentials=hub.file.credentials) as bus:
        async with asyncio.timeout(WAIT_S):
            while True:
                reads = [read for each in await gather_activity(bus, job, ["agent-1"]) for read in each.reads]
                if reads and reads[0].still_s > STILL_S:
                    return reads[0]
                await asyncio.sleep(0.1)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason=NO_UCX)
async def test_a_read_whose_source_is_stopped_is_shown_with_its_share_its_source_and_that_it_does_not_move(
    tmp_path: Path,
) -> None:
    job = new_job()
    patient = {"TENSORHUB_STALL_S": "600", "TENSORHUB_LOST_AFTER_S": "600"}
    async with held_hub(tmp_path, "sending", hosts=2, **patient) as hub, hub.connected(job) as (here, there):
        trainer = await here.register("m", {"w": torch.ones(NBYTES, dtype=torch.uint8)}, replica="trainer")
        engine = await there.register("m", {"w": tensorhub.TensorSpec((NBYTES,), torch.uint8)}, replica="engine")
        await trainer.publish(1)
        read = asyncio.create_task(engine.replicate(1, timeout_s=WAIT_S))
        await until_held(tmp_path)
        try:
            still = await until_still(hub, job)
            told: dict[str, Any] = json.loads(await status(hub, job, "--json"))
            shown = await status(hub, job)
        finally:
            os.kill(hub.file.agents[0].pid, signal.SIGCONT)
        assert await read == 1
    (reading,) = told["reads"]
    done = reading["read"]["done_bytes"]
    assert 0 < done < NBYTES
    assert still.done_bytes == done, "it does not move"
    assert (reading["agent"], reading["read"]["stage"]) == ("agent-1", "filling")
    assert {(each["agent"], each["transport"]) for each in reading["read"]["sources"]} == {("agent-0", "ucxx")}
    not_moving = r"no byte has come to m/engine shard 0 on agent-1 for \d+ s"
    for troubles in (told["troubles"], re.sub(r"\s+", " ", shown).split("! ")):
        assert any(re.search(not_moving, each) for each in troubles), troubles
        assert any("agent-0" in each and "is stopped" in each for each in troubles), troubles
    row = next(each for each in shown.splitlines() if each.startswith("m/engine"))
    assert f" {100 * done // NBYTES} %" in row
    assert "agent-0 (ucxx)" in row
