"""`python -m tensorhub_simulator`: seeds of simulated trouble, or one of them again with all its steps."""

import argparse
import sys
import time
from typing import Final

from rich.console import Console
from rich.table import Table

from tensorhub_simulator.faultsim.mutants.planting import BUGS, planted
from tensorhub_simulator.faultsim.runner.parallel import processes_here, spread
from tensorhub_simulator.faultsim.runner.report import Finding, tell_coverage, tell_failure, tell_totals
from tensorhub_simulator.faultsim.runner.run import Totals, run

FINDING_SEEDS: Final = 500
"""A planted bug must be found by one of this many seeds."""


def main() -> int:
    """Run what the arguments say; 1 when an invariant broke, a bug was not found, or a transition never made."""
    arguments = _arguments()
    if arguments.bugs:
        return _all_bugs(arguments)
    if arguments.seed is not None:
        return _one(arguments)
    began = time.monotonic()
    seeds = range(1, arguments.seeds + 1)
    result = spread(seeds, bug=arguments.bug, calm=arguments.calm, processes=arguments.processes, title="seeds")
    if result.failure is not None:
        tell_failure(result.failure, arguments.bug)
        return 1
    tell_totals(result.totals, time.monotonic() - began)
    return 0 if tell_coverage(result.tallies, 0 if arguments.calm else arguments.seeds) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tensorhub_simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=FINDING_SEEDS, help="how many seeds to run, from 1 on")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--processes", type=int, default=processes_here(), help="run them in this many processes")
    parser.add_argument("--steps", action="store_true", help="print the whole story of the one seed")
    parser.add_argument("--calm", action="store_true", help="without any fault")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant this bug")
    parser.add_argument("--bugs", action="store_true", help="plant each bug in turn, and say which seed finds it")
    parser.add_argument(
        "--docs", action="store_true", help="with --bugs: write what was found into docs/design/simulator.md"
    )
    arguments = parser.parse_args()
    if arguments.steps and arguments.seed is None:
        parser.error("--steps tells one seed's story: name it with --seed")
    if arguments.docs and not arguments.bugs:
        parser.error("--docs writes what --bugs finds: use both")
    if arguments.processes < 1 or arguments.seeds < 1:
        parser.error("--seeds and --processes must be at least 1")
    return arguments


def _one(arguments: argparse.Namespace) -> int:
    """Run one seed in this process."""
    totals = Totals()
    with planted(arguments.bug):
        failure = run([arguments.seed], totals, calm=arguments.calm, steps=arguments.steps)
    if failure is not None:
        tell_failure(failure, arguments.bug)
        return 1
    tell_totals(totals, totals.seconds)
    return 0


def _all_bugs(arguments: argparse.Namespace) -> int:
    """Plant each bug, and look for the first seed that finds it."""
    table = Table("bug", "found by seed", "invariant", "seconds")
    rows: list[Finding] = []
    for name in BUGS:
        began = time.monotonic()
        seeds = range(1, arguments.seeds + 1)
        failure = spread(seeds, bug=name, calm=False, processes=arguments.processes, title=name).failure
        rows.append(Finding(name, failure.seed if failure else None, failure.invariant if failure else ""))
        found = "never" if failure is None else str(failure.seed)
        table.add_row(name, found, rows[-1].invariant, f"{time.monotonic() - began:.1f}")
    Console().print(table)
    if arguments.docs:
        from tools.docs import simulator_page  # noqa: PLC0415 (a checkout has it, and an installed simulator has not)

        simulator_page.write(rows)
    return 1 if any(row.seed is None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
