"""Real agents measure what they get, and the planner says by which measured rate it chose."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from tests.integration.hubs import running_hub
from tests.integration.transports import LOCAL, UCXX

from tensorhub_agent.rates.link_rates import SAMPLE_BYTES_MIN

READS = 4
MEASURED = re.compile(r"; measured \S+ [KMGT]?i?B/s in (\d+) samples, the last \S+ s ago")


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("hosts", [LOCAL, UCXX])
async def test_a_plan_rests_on_what_the_reader_got_before(tmp_path: Path, hosts: int) -> None:
    """Also that of a planner which was started since: the reader tells it."""
    values = torch.arange(SAMPLE_BYTES_MIN // 4, dtype=torch.int32)
    async with running_hub(tmp_path, hosts=hosts) as hub, hub.connected() as (here, there):
        trainer = await here.register("m", {"w": values}, replica="trainer")
        reader = await there.register("m", {"w": torch.zeros_like(values)}, replica="reader")
        told = []
        for version in range(1, READS + 1):
            await trainer.publish(version)
            if version == READS:
                os.kill(hub.file.planner.pid, signal.SIGKILL)
            assert await reader.replicate(version, timeout_s=60) == version
            assert torch.equal(reader.tensors["w"], trainer.tensors["w"])
            assert reader.last_read is not None
            [source] = reader.last_read.sources
            found = MEASURED.search(source.why)
            told.append(0 if found is None else int(found[1]))
            await trainer.unpublish()
            trainer.tensors["w"].add_(1)
    assert told == [0, 0, 2, 3]
