"""What `tensorhub simulate` is held against: real runs of a real hub, written down as data.

`python -m benchmarks.network.calibrate [--times 3]`: for some sizes and some rates of the hosts' wires, 1 to 8 readers
fetch a version at the same time, from each other and, once more, each from the trainer alone (`pipeline`). Medians
go into the package's `measured.json`, which the simulator compares itself with. Needs root, `ip` and `tc`.
"""

import argparse
import asyncio
from pathlib import Path
from typing import Final

import msgspec
from tests.partition.namespaces import enter

from benchmarks.llama import ELEMENT_BYTES, shapes
from benchmarks.network.hosts import Hosts
from benchmarks.network.pipeline import COUNTS, WAYS, Took, measure, middle
from tensorhub_common.layout.layout import TensorEntry, layout_of, pieces
from tensorhub_simulator.performance import calibration
from tensorhub_simulator.performance.calibration import Measured, Run

SETTINGS: Final = ((64, 320), (16, 320), (32, 160))
"""MiB of the model, and Mbit/s that each host sends."""


def pieces_of(mib: int) -> tuple[int, ...]:
    """Return the bytes of the pieces of the benchmark's model."""
    entries = [
        TensorEntry(name, "bfloat16", ELEMENT_BYTES, shape, shape, (0,) * len(shape))
        for name, shape in shapes(mib).items()
    ]
    return tuple(pieces(layout_of(entries)).nbytes)


def runs_of(found: list[Took], mib: int, mbit: int) -> list[Run]:
    """Return the medians of one setting."""
    return [
        Run(
            mib=mib,
            mbit=mbit,
            pipelining=way == "pipelined",
            readers=readers,
            seconds=round(middle(found, way, readers).seconds, 4),
            copies_from_trainer=round(middle(found, way, readers).from_trainer, 3),
        )
        for way in WAYS
        for readers in COUNTS
    ]


def main() -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network.calibrate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--times", type=int, default=3, help="runs of each kind, of which the median counts")
    parser.add_argument("--out", type=Path, default=calibration.FILE)
    options = parser.parse_args()
    runs: list[Run] = []
    for mib, mbit in SETTINGS:
        with Hosts(1 + max(COUNTS), mbit) as hosts:
            enter(hosts.switch)
            found = [each for way in WAYS for each in asyncio.run(measure(way, hosts, mib, options.times))]
        runs += runs_of(found, mib, mbit)
    sizes = {str(mib): pieces_of(mib) for mib, _ in SETTINGS}
    data = msgspec.json.encode(Measured(times=options.times, pieces=sizes, runs=tuple(runs)))
    options.out.write_bytes(msgspec.json.format(data, indent=1) + b"\n")


if __name__ == "__main__":
    main()
