"""`python -m tensorhub_simulator.rollouts`: seeds of rollouts under faults, or each planted bug in turn."""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Final

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tensorhub_simulator.rollouts.bugs import BUGS, planted
from tensorhub_simulator.rollouts.run import Failure, first_failure

BATCH: Final = 25
"""Seeds of one process at a time."""


def main() -> int:
    """Run what the arguments say; 1 when something did not hold, or a bug was not found."""
    parser = argparse.ArgumentParser(prog="tensorhub_simulator.rollouts", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds to run, from 1 on")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--bugs", action="store_true", help="plant each bug in turn, and say which seed finds it")
    asked = parser.parse_args()
    if asked.seeds < 1:
        parser.error("--seeds must be at least 1")
    if asked.bugs:
        return _all_bugs(asked.seeds)
    began = time.monotonic()
    failure = _run([asked.seed] if asked.seed is not None else range(1, asked.seeds + 1))
    if failure is not None:
        Console().print(
            f"seed {failure.seed}: {failure.why}\nagain: python -m tensorhub_simulator.rollouts --seed {failure.seed}"
        )
        return 1
    count = 1 if asked.seed is not None else asked.seeds
    Console().print(f"rollouts: {count} seeds hold, in {time.monotonic() - began:.1f} s")
    return 0


def _run(seeds: list[int] | range) -> Failure | None:
    batches = [seeds[first : first + BATCH] for first in range(0, len(seeds), BATCH)]
    with ProcessPoolExecutor() as pool:
        found = track(pool.map(first_failure, batches), "seeds", len(batches), console=Console(stderr=True))
        return next((each for each in found if each is not None), None)


def _all_bugs(seeds: int) -> int:
    table = Table("bug", "found by seed", "what it broke")
    missed = 0
    for name in BUGS:
        with planted(name):
            failure = first_failure(range(1, seeds + 1))
        table.add_row(name, *(("never", "") if failure is None else (str(failure.seed), failure.why)))
        missed += failure is None
    Console().print(table)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
