"""From a published version to the first token on it in vLLM, stage by stage, beside vLLM's reload of a checkpoint.

    .venv-vllm/bin/python -m benchmarks.vllm.updates --layers 8 --hidden 1024

Trainer and server are on two hosts of one machine, so that the bytes go over ucxx. Each stage is a median of the
rounds, also as a multiple of the time in which this machine copies the model's bytes once, measured in the same run.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

import torch
from tests.integrations.trainers import draw
from tests.integrations.vllm.conftest import free_port
from tests.integrations.vllm.processes import VllmProcess

import tensorhub
from benchmarks.vllm.model import saved_model
from tensorhub.local.hub import LocalHub
from tensorhub_common.protocol.rollout.messages import Sampling
from tensorhub_runner.servers.server import WeightSource
from tensorhub_runner.servers.vllm import VllmServer

JOB, MODEL = "bench", "policy"
PROMPT = [1, 5, 9, 33, 7]
STAGES = ("fetched and verified", "stands still", "loaded", "goes on", "first token")
CHECKPOINT = ("stands still", "written to disk", "reloaded", "goes on", "first token")


class Stopwatch:
    """The times of one round, stage by stage."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._at = time.perf_counter()

    async def stage(self, work: Awaitable[object]) -> None:
        """Wait for the work, and note how long it took."""
        await work
        now = time.perf_counter()
        self.seconds.append(now - self._at)
        self._at = now


async def first_token(server: VllmServer) -> None:
    """Wait for one token."""
    stream = server.generate("bench", PROMPT, Sampling(1, 1, temperature=0.0), 0)
    async for _ in stream:
        """One token is all."""


def copied_s(nbytes: int) -> float:
    """Return how long one copy of as many bytes takes, the shortest of five."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return min(times)


async def measure(layers: int, hidden: int, rounds: int, folder: Path) -> None:
    """Measure all rounds, and print both tables."""
    module = saved_model(folder / "model", layers, hidden)
    nbytes = sum(each.nbytes for each in module.parameters())
    process = VllmProcess(folder / "model", free_port(), folder / "server.log")
    process.start()
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    try:
        async with LocalHub(folder / "hub", agents=2, hosts=2) as up:
            await process.ready()
            here, there = [await tensorhub.connect_async(JOB, agent=each.socket) for each in up.hub.agents]
            trainer = await here.register(MODEL, module, replica="trainer")
            server, replica = VllmServer(process.url), None
            for number in range(rounds + 1):
                async with trainer.overwriting():
                    draw(module, number)
                version = await trainer.publish()
                if replica is None:
                    replica = await there.register(MODEL, await there.specs(MODEL), replica="runner")
                watch = Stopwatch()
                await watch.stage(replica.replicate(version))
                await watch.stage(server.stand_still())
                await watch.stage(server.load(WeightSource(JOB, MODEL, "runner", str(there.socket)), version))
                await watch.stage(server.go_on())
                await watch.stage(first_token(server))
                ours.append(watch.seconds)
                watch = Stopwatch()
                await watch.stage(server.stand_still())
                await watch.stage(asyncio.to_thread(module.save_pretrained, folder / "checkpoint"))
                reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder / "checkpoint")}}
                await watch.stage(process.ask("POST", "/collective_rpc", reload))
                await watch.stage(server.go_on())
                await watch.stage(first_token(server))
                theirs.append(watch.seconds)
            await server.close()
            await here.close()
            await there.close()
    finally:
        process.kill()
    copy_s = copied_s(nbytes)
    print(f"A model of {nbytes / 1e6:.0f} MB; this machine copies it once in {1000 * copy_s:.0f} ms.\n")
    # The first round registers, and fills caches.
    table("A version through the hub", STAGES, ours[1:], copy_s)
    table("A checkpoint", CHECKPOINT, theirs[1:], copy_s)


def table(title: str, names: tuple[str, ...], rounds: list[list[float]], copy_s: float) -> None:
    """Print the median of each stage."""
    print(f"| {title} | ms | copies |\n|---|---:|---:|")
    medians = [statistics.median(each) for each in zip(*rounds, strict=True)]
    whole = statistics.median([sum(each) for each in rounds])
    for name, seconds in zip((*names, "together"), (*medians, whole), strict=True):
        print(f"| {name} | {1000 * seconds:.0f} | {seconds / copy_s:.1f} |")
    print()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(given.layers, given.hidden, given.rounds, Path(folder)))


if __name__ == "__main__":
    main()
