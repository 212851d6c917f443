"""What an update takes through a whole hub, by where the weights are: stages, and shares of the limit of each way."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import torch

import tensorhub
from tensorhub.local.hub import LocalHub

TENSOR_BYTES = 128 << 20


class Update(NamedTuple):
    """One way, over several versions: medians, in seconds."""

    way: str
    nbytes: int
    publish_s: float
    update_s: float
    wire_s: float
    rate_bps: float
    """By the time between the first piece asked for and the last one verified."""


@asynccontextmanager
async def two_agents(folder: Path) -> AsyncIterator[LocalHub]:
    """Start a hub with two agents on this host."""
    async with LocalHub(folder, agents=2) as hub:
        yield hub


async def measure(hub: LocalHub, source: str, destination: str, nbytes: int, versions: int = 5) -> Update:
    """Publish and fetch some versions of `nbytes`, of which the first is not counted."""
    job = f"bench-{source}-{destination}-{time.time_ns()}"
    agents = hub.hub.agents
    here = await tensorhub.connect_async(job, agent=agents[0].socket, nats=hub.hub.nats_all)
    there = await tensorhub.connect_async(job, agent=agents[1].socket, nats=hub.hub.nats_all)
    count = nbytes // TENSOR_BYTES
    given = {f"w{n}": torch.full((TENSOR_BYTES,), n, dtype=torch.uint8, device="cuda") for n in range(count)}
    into = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    trainer = await here.register("m", given, replica="trainer", memory=source, timeout_s=120)
    engine = await there.register("m", into, replica="engine", memory=destination, timeout_s=120)
    del given, into
    torch.cuda.empty_cache()
    published, updated, wires = [], [], []
    for version in range(1, versions + 1):
        async with trainer.overwriting() as mine:
            for tensor in mine.values():
                tensor.add_(1)
            torch.cuda.synchronize()
        began = time.perf_counter()
        await trainer.publish()
        middle = time.perf_counter()
        assert await engine.update(wait_s=60) == version
        end = time.perf_counter()
        assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in trainer.tensors.items())
        if version > 1 and engine.last_read is not None:
            published.append(middle - began)
            updated.append(end - middle)
            wires.append(engine.last_read.wire_s)
    await here.close()
    await there.close()
    wire_s = statistics.median(wires)
    return Update(
        f"{source} to {destination}",
        nbytes,
        statistics.median(published),
        statistics.median(updated),
        wire_s,
        nbytes / wire_s,
    )


async def measure_all(folder: Path, nbytes: int) -> list[Update]:
    """Measure all four ways, one after the other."""
    found = []
    async with two_agents(folder) as hub:
        for source in ("device", "host"):
            for destination in ("device", "host"):
                found.append(await measure(hub, source, destination, nbytes))
                await asyncio.sleep(0)
    return found
