"""Agents with weights on fake GPUs are killed under readers."""

from pathlib import Path

import pytest
import torch
from tests.chaos import device_kills
from tests.kit.hubs import running_hub

GPU = "GPU-fake-0"


@pytest.mark.long
@pytest.mark.parametrize(("source", "destination"), [(GPU, GPU), ("host", GPU)])
async def test_a_holder_is_killed_while_its_version_comes_into_memory_of_a_gpu(
    tmp_path: Path, source: str, destination: str
) -> None:
    tensors = {f"w{n}": torch.rand(2 << 20) for n in range(4)}
    async with running_hub(tmp_path, agents=3) as hub:
        found = await device_kills.play(hub, tensors, source, destination, rounds=3, seed=1)
    assert not found.wrong
