"""Does it take N readers as long as one? `python -m benchmarks.network.pipeline [--mib 64] [--mbit 320] [--docs]`.

A trainer publishes, and N readers, each on a host of its own, fetch the version at the same time; every host sends at
the same bounded speed. Once the readers may read from each other while they are being filled, and once each has to read
from the trainer alone. Shown is the time until the last one has it, as a ratio to the time of one reader, and how much
of it came from the trainer. Needs root, `ip` and `tc` (benchmarks/hosts.py).
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest import mock

from tests.partition.namespaces import enter

from benchmarks import page
from benchmarks.fleet import Fleet
from benchmarks.llama import shapes
from benchmarks.network.hosts import AGENT, PREFIX, Hosts, address
from benchmarks.side_by_side.ours import check_reads
from tensorhub.local import nats_server
from tensorhub.local.hub import LocalHub, ServiceCommands

MODEL: Final = "pipeline"
COUNTS: Final = (1, 2, 4, 8)
TRAINER: Final = "agent-0"
MIB: Final = 1 << 20

WAYS: Final[Mapping[str, str]] = {"pipelined": "on", "star": "off"}
"""How the readers are served, and the planner's setting for it."""


@dataclass(frozen=True, slots=True)
class Took:
    """One publication and its readers."""

    way: str
    readers: int
    seconds: float
    from_trainer: float
    """What the trainer's agent gave, in copies of the model."""


async def measure(way: str, hosts: Hosts, mib: int, times: int) -> list[Took]:
    """Run all counts of readers so often, in one hub."""
    environment = {**os.environ, "TENSORHUB_PIPELINING": WAYS[way], PREFIX: hosts.prefix}
    found: list[Took] = []
    agents = 1 + max(COUNTS)
    with (
        tempfile.TemporaryDirectory(prefix="tensorhub-pipeline-") as folder,
        mock.patch.object(nats_server, "LISTEN", address(0)),
    ):
        up = LocalHub(
            Path(folder), agents=agents, hosts=agents, commands=ServiceCommands(agent=AGENT), environment=environment
        )
        async with await Fleet.start(environment, readers=max(COUNTS)) as fleet, up:
            await fleet.register(up.hub, MODEL, shapes(mib))
            for _ in range(times):
                for readers in COUNTS:
                    found.append(await _run(way, fleet, readers))
                    print(found[-1], file=sys.stderr, flush=True)
            await fleet.check_equal()
            await fleet.close()
    return found


async def _run(way: str, fleet: Fleet, readers: int) -> Took:
    await fleet.trainer.ask("change")
    published = await fleet.trainer.ask("publish")
    reads = await asyncio.gather(*(reader.ask("update") for reader in fleet.readers[:readers]))
    check_reads(reads, published["version"], "ucxx")
    await fleet.trainer.ask("unpublish")
    whole = reads[0]["report"]["nbytes"]
    sources = [source for read in reads for source in read["report"]["sources"]]
    given = sum(source["nbytes"] for source in sources if source["agent"] == TRAINER)
    seconds = max(read["end"] for read in reads) - min(read["begin"] for read in reads)
    return Took(way, readers, seconds, given / whole)


def middle(found: Sequence[Took], way: str, readers: int) -> Took:
    """Return the medians of one count."""
    some = [each for each in found if (each.way, each.readers) == (way, readers)]
    return Took(
        way,
        readers,
        statistics.median(each.seconds for each in some),
        statistics.median(each.from_trainer for each in some),
    )


def ratio(found: Sequence[Took], way: str, readers: int) -> float:
    """Return how many times as long so many readers take as one does, by the medians."""
    return middle(found, way, readers).seconds / middle(found, way, 1).seconds


def words(found: Sequence[Took], mib: int, mbit: int, times: int) -> str:
    """Return the table."""
    alone = mib * MIB * 8 / (mbit * 1e6)
    rows = [
        (
            str(readers),
            *(
                text
                for way in WAYS
                for text in (
                    f"{middle(found, way, readers).seconds:.2f} s",
                    f"{ratio(found, way, readers):.2f}",
                    f"{middle(found, way, readers).from_trainer:.2f}",
                )
            ),
        )
        for readers in COUNTS
    ]
    heads = [text for way in WAYS for text in (way, "to one reader", "copies from the trainer")]
    head = (
        f"{mib} MiB in pieces of at most 4 MiB, digests on; each host sends {mbit} Mbit/s, at which the bytes alone "
        f"take {alone:.2f} s. Medians of {times}."
    )
    return f"{head}\n\n{page.table(('readers', *heads), rows)}"


def main() -> None:
    """Read the options, measure both ways, and say what came out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network.pipeline", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--mib", type=int, default=64, help="size of the model")
    parser.add_argument("--mbit", type=int, default=320, help="what each host sends, in Mbit/s")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--docs", action="store_true", help="write the table and a picture into docs/")
    options = parser.parse_args()
    found: list[Took] = []
    with Hosts(1 + max(COUNTS), options.mbit) as hosts:
        enter(hosts.switch)
        for way in WAYS:
            found += asyncio.run(measure(way, hosts, options.mib, options.times))
    text = words(found, options.mib, options.mbit, options.times)
    print(text)
    if options.docs:
        from benchmarks.network import pipeline_picture  # noqa: PLC0415 (matplotlib is wanted here alone)

        pipeline_picture.draw(found, page.DOCS / "pipeline.svg")
        picture = "![Time until the last reader has it, to that of one reader](pipeline.svg)"
        page.write("pipeline", f"{text}\n\n{picture}")


if __name__ == "__main__":
    main()
