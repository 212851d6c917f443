"""The time from publishing 1 MiB until each of four waiting replicas holds it, and what it costs in processor time."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet import JOB, READERS, Fleet
from benchmarks.timeline import Timeline, end_of_log, timeline
from tensorhub.registry import NatsAddress, Registry
from tensorhub.up.hub_file import HubFile

MODEL: Final = "small"
SHAPES: Final = {f"layer.{n}.weight": (128, 512) for n in range(8)}
"""8 tensors of bfloat16, 1 MiB together."""

WAIT_S: Final = 30.0
JOINED_S: Final = 10.0
POLL_S: Final = 0.01
SILENCE_S: Final = 0.05
"""Between two publications, so that the work that the last one left behind is over."""

WARM_UP: Final = 5
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


async def measure(fleet: Fleet, hub: HubFile, count: int) -> dict[str, Any]:
    """Publish so often; return the seconds of each and the processor time of each process."""
    await fleet.register(hub, MODEL, SHAPES)
    registry = Registry(JOB, NatsAddress(hub.nats, None))
    whole: list[float] = []
    behind: list[float] = []
    before: dict[str, float] = {}
    after = 0
    try:
        for number in range(count + WARM_UP):
            if number == WARM_UP:
                before, after = processor_s(hub, fleet), await end_of_log(hub.nats)
            begin, returned, ready = await _once(fleet, registry, first=number == 0)
            if number >= WARM_UP:
                whole.append(ready - begin)
                behind.append(ready - returned)
    finally:
        await registry.close()
    spent = {name: (total - before[name]) / count for name, total in processor_s(hub, fleet).items()}
    log: Timeline = await timeline(hub.nats, after)
    await fleet.check_equal()
    await fleet.close()
    return {
        "publish to all ready": whole,
        "publish returned to all ready": behind,
        "publish in the log": log.published,
        "stages_ms": log.medians_ms(),
        "entries": log.entries / count,
        "processor_ms": {name: seconds * 1000 for name, seconds in spent.items()},
    }


async def _once(fleet: Fleet, registry: Registry, *, first: bool) -> tuple[float, float, float]:
    if not first:
        await fleet.trainer.ask("unpublish")
    await fleet.trainer.ask("change")
    updates = [asyncio.create_task(reader.ask("update", wait_s=WAIT_S)) for reader in fleet.readers]
    async with asyncio.timeout(JOINED_S):
        while await _waiting(registry) < READERS:  # noqa: ASYNC110 (only asking again tells)
            await asyncio.sleep(POLL_S)
    await asyncio.sleep(SILENCE_S)
    published = await fleet.trainer.ask("publish")
    reads = await asyncio.gather(*updates)
    assert all(read["version"] == published["version"] for read in reads), reads
    return published["begin"], published["end"], max(read["end"] for read in reads)


async def _waiting(registry: Registry) -> int:
    return sum(each.round is not None for each in await registry.replicas(MODEL, JOINED_S))


def processor_s(hub: HubFile, fleet: Fleet) -> dict[str, float]:
    """Return the processor time that each process has used, in s."""
    assert hub.registry is not None
    assert hub.planner is not None
    pids = {"nats": hub.nats_pid, "registry": hub.registry.pid, "planner": hub.planner.pid}
    pids |= {agent.id: agent.pid for agent in hub.agents} | fleet.pids
    return {name: _used_s(pid) for name, pid in pids.items()}


def _used_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def by_role(processor_ms: Mapping[str, float]) -> dict[str, float]:
    """Return the sum over the processes of each kind."""
    found: dict[str, float] = {}
    for name, spent in processor_ms.items():
        role = name.partition("-")[0]
        found[role] = found.get(role, 0.0) + spent
    return found
