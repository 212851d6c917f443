"""`tensorhub simulate rollout`: scenarios of rollouts, one system beside the other.

Always true: the exit code is 0 when it is done, 1 when a scenario can't be simulated, 2 for wrong usage, and 128 + N
when signal N broke it off; what went wrong is one line on stderr.
"""

import argparse
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Final, get_args

import msgspec
from rich.console import Console

from tensorhub_common.errors import TensorHubError
from tensorhub_simulator.performance.__main__ import BY_SIGNAL, WIDTH, Parser, print_safely, raise_interrupts, read_text
from tensorhub_simulator.performance.parallel import Bar, side_by_side
from tensorhub_simulator.performance.svg import check
from tensorhub_simulator.rollout_performance.comparison import allocation_tables
from tensorhub_simulator.rollout_performance.comparison.cases import SEEDS_MAX, Case, Finding, cases, run, size_of
from tensorhub_simulator.rollout_performance.comparison.picture import draw
from tensorhub_simulator.rollout_performance.comparison.tables import objects, tables
from tensorhub_simulator.rollout_performance.config.decoding import decode, with_trace
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, ScenarioError, System
from tensorhub_simulator.rollout_performance.measures.report import Report
from tensorhub_simulator.rollout_performance.sizing.allocate import Split, splits

FOLDER: Final = Path(__file__).with_name("scenarios")
TRACES: Final = Path(__file__).with_name("traces")
OURS: Final = sorted(each.stem for each in FOLDER.glob("*.yaml"))
SYSTEMS: Final[tuple[System, ...]] = get_args(System)
ALLOCATED: Final[tuple[System, ...]] = ("streamrl", "arrival")
"""With these a split is simulated, unless others are asked for."""


def read(name: str) -> tuple[Scenario, Path]:
    """Read a scenario of ours by its name, or a file, and say where it lies. Raises `TensorHubError`."""
    return decode(read_text(name, FOLDER, OURS), name), FOLDER if name in OURS else Path(name).parent


def traced(scenario: Scenario, beside: Path) -> Scenario:
    """Return a scenario with its trace, one of ours or a file beside the scenario's. Raises `TensorHubError`."""
    if scenario.spot.trace is None:
        return scenario
    ours = sorted(each.stem for each in TRACES.glob("*.csv"))
    path = TRACES / f"{scenario.spot.trace}.csv" if scenario.spot.trace in ours else beside / scenario.spot.trace
    try:
        return with_trace(scenario, path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ScenarioError(
            f"{scenario.name}: spot.trace {str(path)!r} can't be read ({why}): name a file, or one of {', '.join(ours)}"
        ) from None


def simulate(options: argparse.Namespace) -> list[Finding]:
    """Run scenarios, all their cases side by side. Raises `TensorHubError`."""
    todo: list[tuple[Scenario, list[Case]]] = []
    for name in options.names or OURS:
        scenario, beside = read(name)
        systems = [*dict.fromkeys(options.system or scenario.systems)]
        read_trace = partial(traced, beside=beside)
        is_drawn = options.picture is not None and not todo
        found = cases(scenario, systems, options.seeds, read_trace, alone=options.alone, drawn=is_drawn)
        todo.append((scenario, list(found)))
    flat = [case for _, each in todo for case in each]
    with Bar("simulating", len(flat)) as bar:
        reports = iter(side_by_side(run, flat, size_of, min(options.processes, len(flat)), bar.done))
    return [Finding(scenario, tuple(each), tuple(next(reports) for _ in each)) for scenario, each in todo]


def allocate(options: argparse.Namespace) -> None:
    """Say how StreamRL's allocation divides the instances of each scenario. Raises `TensorHubError`."""
    systems: list[System] = options.system or [*ALLOCATED]
    todo: list[Split] = []
    for name in options.names:
        todo += splits(read(name)[0])
    flat = [Case(each.scenario, system) for each in todo for system in systems]
    with Bar("simulating", len(flat)) as bar:
        reports = iter(side_by_side(run, flat, size_of, min(options.processes, len(flat)), bar.done))
    found: list[tuple[Split, list[Report]]] = [(each, [next(reports) for _ in systems]) for each in todo]
    if options.json:
        for each in allocation_tables.objects(found):
            sys.stdout.write(msgspec.json.encode(each).decode() + "\n")
        return
    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    for part in allocation_tables.tables(found, systems):
        console.print(part)


def say(findings: list[Finding], *, as_json: bool, tails: bool) -> None:
    """Print everything."""
    if as_json:
        for finding in findings:
            for each in objects(finding):
                sys.stdout.write(msgspec.json.encode(each).decode() + "\n")
        return
    # Names of a file are words, whatever brackets are in them.
    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    for finding in findings:
        for part in tables(finding, tails=tails):
            console.print(part)
        console.print()


def _parser() -> Parser:
    parser = Parser(
        prog="tensorhub simulate rollout",
        description=(__doc__ or "").splitlines()[0],
        epilog="example: tensorhub simulate rollout rlboost-8b --seeds 5 --alone --picture rlboost.svg",
    )
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help=f"a YAML file, {' or '.join(OURS)}")
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="these alone; by default those of the file")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from the file's on")
    parser.add_argument("--alone", action="store_true", help="no other assumptions than the file's")
    parser.add_argument(
        "--allocate", action="store_true", help="how many instances are to generate and how many to train (StreamRL)"
    )
    parser.add_argument("--tails", action="store_true", help="also when the responses of a step are whole")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--picture", type=Path, help="draw the first scenario into this SVG file")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many runs at once")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for what, number, most in (("--processes", options.processes, 4096), ("--seeds", options.seeds, SEEDS_MAX)):
        if not 1 <= number <= most:
            parser.error(f"{what} is {number}, and must be from 1 to {most}")
    if options.allocate and not options.names:
        parser.error("--allocate divides the instances of a scenario: name one")
    of_runs = {
        "--alone": options.alone,
        "--picture": options.picture,
        "--seeds": options.seeds > 1,
        "--tails": options.tails,
    }
    unused = next((what for what, is_given in of_runs.items() if is_given), None)
    if options.allocate and unused is not None:
        parser.error(f"--allocate simulates each split once, and has no use for {unused}: leave one of them out")
    try:
        if options.allocate:
            print_safely(partial(allocate, options))
            return 0
        if options.picture is not None:
            check(options.picture)
        findings = simulate(options)
        if options.picture is not None:
            draw(findings[0], options.picture)
        print_safely(partial(say, findings, as_json=options.json, tails=options.tails))
    except TensorHubError as why:
        sys.stderr.write(f"tensorhub: {why}\n")
        return 1
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("tensorhub: interrupted\n")
        return BY_SIGNAL + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    return 0


if __name__ == "__main__":
    raise_interrupts()
    sys.exit(main())
