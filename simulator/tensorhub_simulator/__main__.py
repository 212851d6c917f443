"""`python -m tensorhub_simulator`: seeds of simulated trouble, or one of them again with all its steps."""

import argparse
import re
import sys
from collections import Counter
from typing import Final

from rich.console import Console
from rich.table import Table

from tensorhub_simulator.bugs import BUGS, planted
from tensorhub_simulator.coverage import Counting, counted
from tensorhub_simulator.running import Failure, Totals, run

COLUMNS: Final = 120


def main() -> int:
    """Run what the arguments say; 1 when an invariant broke, or a planted bug was not found."""
    arguments = _arguments()
    if arguments.bugs:
        return _all_bugs(arguments.seeds)
    totals = Totals()
    seeds = range(1, arguments.seeds + 1) if arguments.seed is None else [arguments.seed]
    with planted(arguments.bug), counted() as tables:
        failure = run(seeds, totals, calm=arguments.calm, steps=arguments.steps)
    if failure is not None:
        _tell(failure, arguments.bug)
        return 1
    _table(totals, tables)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tensorhub_simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds to run, from 1 on")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--steps", action="store_true", help="print the whole story")
    parser.add_argument("--calm", action="store_true", help="without any fault")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant this bug")
    parser.add_argument("--bugs", action="store_true", help="plant each bug in turn, and say which seed finds it")
    return parser.parse_args()


def _tell(failure: Failure, bug: str | None) -> None:
    print("\n".join(failure.story))
    print()
    print(f"seed {failure.seed} broke '{failure.invariant}': {failure.what}")
    planted_too = f" --bug {bug}" if bug is not None else ""
    print(f"see it again: python -m tensorhub_simulator --seed {failure.seed}{planted_too} --steps")


def _all_bugs(seeds: int) -> int:
    """Plant each bug, and look for the first seed that finds it."""
    table = Table("bug", "found by seed", "invariant", "seconds")
    missed = 0
    for name in BUGS:
        totals = Totals()
        with planted(name):
            failure = run(range(1, seeds + 1), totals)
        missed += failure is None
        found, invariant = ("never", "") if failure is None else (str(failure.seed), failure.invariant)
        table.add_row(name, found, invariant, f"{totals.seconds:.1f}")
    Console().print(table)
    return 1 if missed else 0


def _table(totals: Totals, tables: dict[str, Counting]) -> None:
    console = Console(width=COLUMNS)
    names = ("seeds", "steps", "commands", "events", "versions", "reads", "kills", "stops", "outages", "cuts")
    table = Table(*names, "seconds")
    table.add_row(*(f"{getattr(totals, name):,}" for name in names), f"{totals.seconds:.1f}")
    console.print(table)
    moves = Table("transitions", "gone through", "never")
    for name, counting in tables.items():
        missing = counting.missing()
        moves.add_row(name, f"{len(counting) - len(missing)} of {len(counting)}", ", ".join(missing))
    console.print(moves)
    console.print("calls that raised: " + ", ".join(f"{name} {count:,}" for name, count in totals.raised.most_common()))
    left = Counter[str]()
    for why, count in totals.left.items():
        # Without numbers and names there are a dozen.
        left[re.sub(r"\d+|'[^']*'", "…", why) or "nothing more to read"] += count
    console.print("sources that were closed: " + ", ".join(f"{why} {count:,}" for why, count in left.most_common()))


if __name__ == "__main__":
    sys.exit(main())
