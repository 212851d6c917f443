"""A holder's agent is killed while a version is read into memory of a GPU; another holder has it too."""

import asyncio
import random
import time
from typing import NamedTuple

import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub

VICTIM = "agent-0"
VERSION = 1


class Kills(NamedTuple):
    """What came of some rounds."""

    rounds: int
    during_reads: int
    """Kills before the read had ended."""
    wrong: list[str]


async def play(
    hub: RunningHub, tensors: dict[str, torch.Tensor], source: str, destination: str, rounds: int, seed: int
) -> Kills:
    """Publish on two agents, read on a third, kill one of the two meanwhile; compare every byte each time."""
    chance, during, wrong, calm_s = random.Random(seed), 0, [], 0.0
    for number in range(rounds + 1):
        async with hub.connected(agents=3) as (first, reading, second):
            trainer = await first.register("m", _copies(tensors), replica="trainer", memory=source)
            await trainer.publish(VERSION)
            holder = await second.register("m", _zeros(tensors), replica="holder", memory=source)
            await holder.replicate(VERSION, timeout_s=WAIT_S)
            engine = await reading.register("m", _zeros(tensors), replica="engine", memory=destination)
            began = time.perf_counter()
            read = asyncio.create_task(engine.replicate(VERSION, timeout_s=WAIT_S))
            if number == 0:
                await read
                calm_s = time.perf_counter() - began
                killed = 0
            else:
                await asyncio.wait([read], timeout=chance.uniform(0, calm_s))
                during += not read.done()
                killed = hub.kill(VICTIM)
            await read
            wrong += [
                f"round {number}: {name}"
                for name, tensor in engine.tensors.items()
                if not torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8))
            ]
            if killed:
                await hub.until_back(VICTIM, killed)
    return Kills(rounds, during, wrong)


def _copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
