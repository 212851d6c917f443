"""Real agents measure what they get, and a plan names the measured rate that it rests on."""

import re
from pathlib import Path

import pytest
import torch
from tests.kit.hubs import running_hub
from tests.kit.transports import LOCAL, UCXX

from tensorhub_agent.rates.link_rates import SAMPLE_BYTES_MIN

READS = 4
MEASURED = re.compile(r"; measured \S+ [KMGT]?i?B/s in (\d+) samples, the last \S+ s ago")


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("hosts", [LOCAL, UCXX])
async def test_a_plan_rests_on_what_the_reader_got_before(tmp_path: Path, hosts: int) -> None:
    """Also that of a planner which was started since: the reader sends it."""
    values = {"w": torch.arange(SAMPLE_BYTES_MIN // 4, dtype=torch.int32)}
    async with running_hub(tmp_path, hosts=hosts) as hub, hub.pair(values) as it:
        samples = []
        for version in range(1, READS + 1):
            await it.trainer.publish(version)
            if version == READS:
                hub.kill("planner-0")
            assert await it.engine.replicate(version, timeout_s=60) == version
            assert torch.equal(it.engine.tensors["w"], it.trainer.tensors["w"])
            assert it.engine.last_read is not None
            [source] = it.engine.last_read.sources
            found = MEASURED.search(source.why)
            samples.append(0 if found is None else int(found[1]))
            async with it.trainer.overwriting() as mine:
                mine["w"].add_(1)
    assert samples == [0, 0, 2, 3]
