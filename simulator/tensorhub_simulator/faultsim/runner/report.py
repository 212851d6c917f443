"""What is printed of a run: one seed's failure, the totals, and the transitions that were not made."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from tensorhub_simulator.faultsim.runner.run import Failure, Totals
from tensorhub_simulator.faultsim.runner.transitions import UNREACHABLE, Tallies

COLUMNS: Final = 140
COVERED_FROM_SEEDS: Final = 500
"""A run of this many seeds has to make every transition that can be made."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Which seed found a bug, and by which invariant."""

    bug: str
    seed: int | None
    invariant: str


def tell_failure(failure: Failure, bug: str | None) -> None:
    """Print a failing seed's story, and how to see it again."""
    print("\n".join(failure.story))
    print()
    print(f"seed {failure.seed} broke '{failure.invariant}': {failure.what}")
    planted_too = f" --bug {bug}" if bug is not None else ""
    print(f"see it again: python -m tensorhub_simulator --seed {failure.seed}{planted_too} --steps")


def tell_totals(totals: Totals, seconds: float) -> None:
    """Print what the seeds amounted to."""
    console = Console(width=COLUMNS)
    closed = Counter[str]()
    for why, count in totals.group("closed").items():
        # Without numbers and names there are a dozen.
        closed[re.sub(r"\d+|'[^']*'", "…", why) or "nothing more to read"] += count
    plain = Counter({name: count for name, count in totals.counts.items() if ": " not in name})
    console.print(f"{totals.seeds:,} seeds, {totals.steps:,} steps, {seconds:.1f} seconds")
    for title, counts in (
        ("what happened", plain),
        ("faults", totals.group("faults")),
        ("calls that raised", totals.group("raised")),
        ("sources that were closed", closed),
    ):
        console.print(f"{title}: " + ", ".join(f"{name} {count:,}" for name, count in counts.most_common()))


def tell_coverage(tallies: Tallies, seeds: int) -> bool:
    """Print which transitions were made; returns whether that is enough for this many seeds."""
    console = Console(width=COLUMNS)
    table = Table("transitions", "made", "never made", "made and not in the table")
    complete = True
    for name, tally in tallies.items():
        missing, wrong = tally.missing(), tally.wrong()
        reachable = len([move for move in tally.moves if (name, move) not in UNREACHABLE])
        table.add_row(name, f"{reachable - len(missing)} of {reachable}", ", ".join(missing), ", ".join(wrong))
        complete = complete and not wrong and (not missing or seeds < COVERED_FROM_SEEDS)
    console.print(table)
    for (name, (state, what)), why in UNREACHABLE.items():
        console.print(f"out of reach: {name} {state} {what}: {why}")
    if not complete:
        console.print(
            f"{COVERED_FROM_SEEDS} seeds must make every transition: teach the simulator what leads to those above, or "
            "say in transitions.py why nothing can"
        )
    return complete
