"""Agents with weights on a GPU are killed under readers."""

from pathlib import Path

import pytest
import torch
from tests.chaos import device_kills
from tests.kit.hubs import running_hub

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("source", "destination"), [("device", "device"), ("host", "device"), ("device", "host")])
async def test_a_holder_is_killed_while_its_version_comes(tmp_path: Path, source: str, destination: str) -> None:
    tensors = {f"w{n}": torch.randint(0, 256, (128 << 20,), dtype=torch.uint8, device="cuda") for n in range(16)}
    async with running_hub(tmp_path, agents=3) as hub:
        found = await device_kills.play(hub, tensors, source, destination, rounds=4, seed=1)
    assert not found.wrong
    assert found.during_reads, "no kill came before the end of its read"
