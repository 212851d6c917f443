"""Writes what `tensorhub simulate` says into docs/design/simulate.md, with a picture of each scenario.

`python -m benchmarks.network.simulated [--processes 2] [--calibration-only]`.
"""

import argparse
import io
from typing import Final

from rich.console import Console

from benchmarks import page
from tensorhub_simulator.performance import calibration, svg, tables
from tensorhub_simulator.performance.__main__ import SCENARIOS, WIDTH, simulate

PAGE: Final = page.DOCS / "simulate.md"


def calibration_words() -> str:
    """Return each real run beside the modelled one, as a table."""
    found = calibration.compare(calibration.load())
    rows = []
    for each in found:
        real, star = each.real, each.baseline_seconds
        cells = (f"{real.seconds:.2f} s", f"{each.seconds:.2f} s", f"{each.error:+.1%}")
        copies = (f"{real.copies_from_trainer:.2f}", f"{each.copies_from_trainer:.2f}")
        beside = ("", "") if star is None else (f"{star:.2f} s", f"{each.baseline_error:+.1%}")
        how = "from each other" if real.pipelining else "star"
        rows.append((f"{real.mib} MiB, {real.mbit} Mbit/s", how, str(real.readers), *cells, *copies, *beside))
    heads = (
        "",
        "readers read",
        "readers",
        "real",
        "modelled",
        "error",
        "copies",
        "modelled",
        "baseline's star",
        "error",
    )
    return f"{tables.calibrated(found)}\n\n{page.table(heads, rows)}"


def scenario_words(processes: int) -> str:
    """Run the scenarios, draw them, and return the tables."""
    parts = []
    for finding in simulate(list(SCENARIOS), alone=False, processes=processes):
        name = finding.cluster.name
        svg.draw(finding, page.DOCS / f"simulate-{name}.svg")
        text = io.StringIO()
        console = Console(file=text, highlight=False, width=WIDTH)
        for each in tables.tables(finding):
            console.print(each)
        lines = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
        parts.append(
            f"### {name}\n\n```\n{lines}\n```\n\n![When replicas stood still, and link use](simulate-{name}.svg)"
        )
    return "\n\n".join(parts)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network.simulated", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--calibration-only", action="store_true", help="leave the scenarios as they stand")
    options = parser.parse_args()
    page.write("calibration", calibration_words(), PAGE)
    if not options.calibration_only:
        page.write("scenarios", scenario_words(options.processes), PAGE)


if __name__ == "__main__":
    main()
