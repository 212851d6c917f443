"""Deltas of tensors on a GPU, between agents that count as two hosts: the trainer's bytes, and few on the wire."""

import contextlib
import functools
from typing import Final

import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, module_hub
from tests.kit.tensors import assert_same_bytes
from tests.kit.transports import UCXX
from tests.kit.waiting import until

from tensorhub import AsyncShard
from tensorhub.arguments import Install

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="module")]

DEVICE: Final = "cuda"
MADE_S: Final = 5.0
BEGINNINGS_MAX: Final = 20
FEW: Final = 0.003
"""As in the integration's tests of deltas: so few that a patch is sooner there than the piece, over a loopback too."""

hub = module_hub(2, over=[UCXX], TENSORHUB_DELTAS="4", TENSORHUB_LOG_LEVEL="debug")


def change(shard: AsyncShard, share: float, generator: torch.Generator) -> None:
    """Change this share of the values, anywhere."""
    for tensor in shard.tensors.values():
        values = tensor.detach().view(torch.int16)
        which = torch.rand(values.shape, generator=generator, device=DEVICE) < share
        values ^= which.to(torch.int16) * 3


def made(hub: RunningHub) -> int:
    return hub.log("agent-0").count("a delta of ")


def is_another_made(hub: RunningHub, before: int) -> bool:
    return made(hub) > before


@pytest.mark.parametrize("install", ["in-place", "staged"])
@pytest.mark.parametrize("memories", [("device", "device"), ("host", "device"), ("device", "host")], ids="-to-".join)
async def test_either_end_may_be_in_the_gpus_memory(
    hub: RunningHub, memories: tuple[str, str], install: Install
) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    zeros = {f"w{n}": torch.zeros(6 << 20, dtype=torch.bfloat16, device=DEVICE) for n in range(4)}
    async with hub.connected() as (here, there):
        trainer = await here.register("m", zeros, replica="trainer", memory=memories[0])
        engine = await there.register(
            "m",
            {name: torch.zeros_like(each) for name, each in zeros.items()},
            replica="engine",
            memory=memories[1],
            install=install,
        )
        by_delta = 0
        for version in range(1, BEGINNINGS_MAX):
            before = made(hub)
            async with trainer.overwriting(publish=True, timeout_s=WAIT_S):
                change(trainer, FEW, generator)
            if version > 1:
                # None is made where the second version comes too soon.
                with contextlib.suppress(AssertionError):
                    await until(functools.partial(is_another_made, hub, before), "a delta is made", MADE_S)
            assert await engine.update(wait_s=WAIT_S, timeout_s=WAIT_S) == version
            assert_same_bytes(engine.tensors, trainer.tensors)
            assert engine.last_read is not None
            by_delta += any(each.how == "delta" for source in engine.last_read.sources for each in source.encoded)
            if by_delta == 3:
                return
        pytest.fail(f"{by_delta} reads of {BEGINNINGS_MAX} came by delta")
