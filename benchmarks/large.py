"""1 GiB from one agent to one and to four others of the same host, each round beside memcpy of as many bytes."""

import asyncio
from collections.abc import Mapping
from typing import Final

from benchmarks.fleet import READERS, Fleet
from benchmarks.llama import shapes
from benchmarks.memcpy import Memcpy
from benchmarks.timeline import end_of_log, timeline
from tensorhub.up.hub_file import HubFile

MODEL: Final = "large"

Figures = dict[str, list[float]]
Stages = Mapping[str, float]


async def measure(
    fleet: Fleet, hub: HubFile, memcpy: Memcpy, mib: int, rounds: int
) -> tuple[Figures, dict[str, list[Stages]]]:
    """Return the seconds of each round by what was measured, and the stages' medians by how many read.

    A first round does not count: there pages are touched and segments mapped for the first time. Its read stands by
    itself under "first".
    """
    await fleet.register(hub, MODEL, shapes(mib))
    figures: Figures = {}
    stages: dict[str, list[Stages]] = {}
    for number in range(rounds + 1):
        for count in (1, READERS):
            after = await end_of_log(hub.nats)
            took = await _round(fleet, memcpy, count)
            if number:
                _add(figures, took)
                stages.setdefault(f"1→{count}", []).append((await timeline(hub.nats, after)).medians_ms())
            elif count == 1:
                figures["first 1→1"] = [took["1→1"]]
    await fleet.check_equal()
    await fleet.close()
    return figures, stages


async def _round(fleet: Fleet, memcpy: Memcpy, count: int) -> dict[str, float]:
    """Publish another version and let some readers fetch it at the same time; return what took how long."""
    await fleet.trainer.ask("change")
    published = await fleet.trainer.ask("publish")
    one, two = memcpy.run(1), memcpy.run(2)
    reads = await asyncio.gather(*(reader.ask("update") for reader in fleet.readers[:count]))
    again = memcpy.run(1)
    assert all(read["version"] == published["version"] for read in reads), reads
    unpublished = await fleet.trainer.ask("unpublish")
    name = f"1→{count}"
    return {
        "memcpy, 1 thread": (one + again) / 2,
        "memcpy, 2 threads": two,
        "publish": published["end"] - published["begin"],
        "unpublish": unpublished["end"] - unpublished["begin"],
        name: max(read["end"] for read in reads) - min(read["begin"] for read in reads),
        f"{name} wire": max(read["report"]["wire_s"] for read in reads),
        f"{name} in memcpys": (max(read["end"] for read in reads) - min(read["begin"] for read in reads))
        / ((one + again) / 2),
    }


def _add(figures: Figures, took: Mapping[str, float]) -> None:
    for name, seconds in took.items():
        figures.setdefault(name, []).append(seconds)
