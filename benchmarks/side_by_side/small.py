"""The time from publishing 1 MiB until each of four waiting replicas holds it, and what it costs in processor time."""

import asyncio
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet import JOB, READERS, Fleet
from benchmarks.processor import used_s
from benchmarks.side_by_side.log import end_of_log
from benchmarks.side_by_side.ours import check_reads, stages
from benchmarks.side_by_side.results import Small
from tensorhub._control.hub_file import HubFile
from tensorhub._control.registry_client import NatsAddress, RegistryClient
from tensorhub.local.hub import LocalHub

MODEL: Final = "small"
SHAPES: Final = {f"layer.{n}.weight": (128, 512) for n in range(8)}
"""8 tensors of bfloat16, 1 MiB together."""

WAIT_S: Final = 30.0
JOINED_S: Final = 10.0
POLL_S: Final = 0.01
SILENCE_S: Final = 0.05
"""Between two publications, so that the work that the last one left behind is over."""

WARM_UP: Final = 5


class Latency:
    """The small model on one hub. `once` measures one publication."""

    def __init__(self, fleet: Fleet, hub: HubFile, transport: str) -> None:
        self._fleet, self._hub, self._transport = fleet, hub, transport
        self._registry = RegistryClient(JOB, NatsAddress(hub.nats, Path(hub.credentials)))
        self._published = False

    async def start(self) -> None:
        """Register the model everywhere."""
        await self._fleet.register(self._hub, MODEL, SHAPES)

    async def once(self) -> tuple[float, float, dict[str, float]]:
        """Return the seconds until all are ready, how many of them came after `publish()` returned, and the stages."""
        if self._published:
            await self._fleet.trainer.ask("unpublish")
        await self._fleet.trainer.ask("change")
        updates = [asyncio.create_task(reader.ask("update", wait_s=WAIT_S)) for reader in self._fleet.readers]
        async with asyncio.timeout(JOINED_S):
            while await self._waiting() < READERS:  # noqa: ASYNC110 (only asking again tells)
                await asyncio.sleep(POLL_S)
        await asyncio.sleep(SILENCE_S)
        published = await self._fleet.trainer.ask("publish")
        self._published = True
        reads = await asyncio.gather(*updates)
        check_reads(reads, published["version"], self._transport)
        last = max(read["end"] for read in reads)
        whole = last - published["begin"]
        of_read = stages(reads)
        # They have waited in the round since long before: what is left of the whole is publishing and deciding.
        of_read["round"] = whole - sum(seconds for stage, seconds in of_read.items() if stage != "round")
        return whole, last - published["end"], of_read

    async def _waiting(self) -> int:
        return sum(each.round is not None for each in await self._registry.replicas(MODEL, JOINED_S))

    async def stop(self) -> None:
        """Compare the bytes, and release the model."""
        await self._fleet.check_equal()
        await self._registry.close()
        await self._fleet.close()


async def measure(fleet: Fleet, hub: HubFile, transport: str, count: int) -> Small:
    """Publish so often."""
    latency = Latency(fleet, hub, transport)
    await latency.start()
    for _ in range(WARM_UP):
        await latency.once()
    pids, entries = of_hub(hub) | fleet.pids, await end_of_log(hub)
    before = {name: used_s([pid]) for name, pid in pids.items()}
    took = [await latency.once() for _ in range(count)]
    spent = {name: (used_s([pid]) - before[name]) / count for name, pid in pids.items()}
    entries = await end_of_log(hub) - entries
    await latency.stop()
    return Small(
        ready=[ready for ready, _, _ in took],
        behind=[behind for _, behind, _ in took],
        stages={stage: statistics.median(of_read[stage] for _, _, of_read in took) for stage in took[0][2]},
        processor=by_role(spent),
        entries=entries / count,
    )


def of_hub(hub: HubFile) -> dict[str, int]:
    """Return the hub's processes by name."""
    assert hub.registry is not None
    assert hub.planner is not None
    pids = {"nats": hub.nats_pid, "registry": hub.registry.pid, "planner": hub.planner.pid}
    return pids | {agent.id: agent.pid for agent in hub.agents}


def by_role(spent: Mapping[str, Any]) -> dict[str, float]:
    """Return the sum over the processes of each kind."""
    found: dict[str, float] = {}
    for name, seconds in spent.items():
        role = name.partition("-")[0]
        found[role] = found.get(role, 0.0) + seconds
    return found


async def on_new_hub(fleet: Fleet, hosts: int, transport: str, environment: Mapping[str, str], count: int) -> Small:
    """Measure on a hub whose log holds nothing else."""
    with tempfile.TemporaryDirectory(prefix="tensorhub-bench-") as folder:
        async with LocalHub(Path(folder), agents=1 + READERS, hosts=hosts, environment=environment) as up:
            return await measure(fleet, up.hub, transport, count)
