"""`tensorhub simulate rollout`: scenarios of rollouts, one system beside the other.

Always true: the exit code is 0 when it is done, 1 when a scenario can't be simulated, 2 for wrong usage, and 128 + N
when signal N broke it off; what went wrong is one line on stderr.
"""

import signal
import sys
from pathlib import Path
from typing import Final, get_args

import msgspec
from rich.console import Console
from rich.table import Table

from tensorhub_common.errors import TensorHubError
from tensorhub_simulator.performance.__main__ import BY_SIGNAL, WIDTH, Parser, raise_interrupts, read_text
from tensorhub_simulator.rollout_performance.config import Scenario, ScenarioError, System, decode, with_trace
from tensorhub_simulator.rollout_performance.job import JobRun, Report

FOLDER: Final = Path(__file__).with_name("scenarios")
TRACES: Final = Path(__file__).with_name("traces")
SYSTEMS: Final[tuple[System, ...]] = get_args(System)


def read(name: str) -> Scenario:
    """Read a scenario of ours by its name, or a file. Raises `TensorHubError`."""
    ours = sorted(each.stem for each in FOLDER.glob("*.yaml"))
    return traced(decode(read_text(name, FOLDER, ours), name), FOLDER if name in ours else Path(name).parent)


def traced(scenario: Scenario, beside: Path) -> Scenario:
    """Return a scenario with its trace, one of ours or a file beside the scenario's. Raises `TensorHubError`."""
    if scenario.spot.trace is None:
        return scenario
    ours = sorted(each.stem for each in TRACES.glob("*.csv"))
    path = TRACES / f"{scenario.spot.trace}.csv" if scenario.spot.trace in ours else beside / scenario.spot.trace
    try:
        return with_trace(scenario, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as why:
        raise ScenarioError(
            f"{scenario.name}: spot.trace {str(path)!r} can't be read ({why}): name a file, or one of {', '.join(ours)}"
        ) from None


def table(scenario: Scenario, reports: list[Report]) -> Table:
    """Return a scenario's systems, one a row; factors are over the first one."""
    first = reports[0]
    found = Table(title=f"{scenario.name}: {first.steps} steps, {first.responses} responses")
    for column in ("system", "tokens/s", "factor", "tokens/cost", "step, s", "trainer waits", "made again", "lost"):
        found.add_column(column, justify="left" if column == "system" else "right")
    for each in reports:
        found.add_row(
            each.system,
            f"{each.tokens_per_s:,.0f}",
            f"{each.tokens_per_s / first.tokens_per_s:.2f}",
            f"{each.tokens_per_cost / first.tokens_per_cost:.2f}" if each.cost else "-",
            f"{each.seconds / each.steps:,.0f}",
            f"{each.waited_s / each.seconds:.1%}",
            f"{each.made / each.tokens - 1:.1%}",
            str(each.lost),
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = Parser(prog="tensorhub simulate rollout", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help="a YAML file, or rlboost-8b")
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="these alone; by default all")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    try:
        for scenario in [read(name) for name in options.names or ["rlboost-8b"]]:
            reports = [JobRun(scenario, system).run() for system in options.system or SYSTEMS]
            if options.json:
                for each in reports:
                    said = {"scenario": scenario.name, **msgspec.to_builtins(each)}
                    sys.stdout.write(msgspec.json.encode(said).decode() + "\n")
            else:
                Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(table(scenario, reports))
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
