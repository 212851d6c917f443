"""`tensorhub simulate`, and `python -m tensorhub_simulator.performance`: the scenarios, each against its baseline.

Always true: the exit code is 0 when it is done, 1 when a cluster can't be simulated, 2 for wrong usage, and 128 + N
when signal N broke it off; what went wrong is one line on stderr.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import msgspec
from rich.console import Console

from tensorhub_common.errors import TensorHubError
from tensorhub_simulator.performance import calibration, svg, tables
from tensorhub_simulator.performance.comparison import Case, cases
from tensorhub_simulator.performance.config import Cluster, ClusterError, decode
from tensorhub_simulator.performance.parallel import Bar, pairs
from tensorhub_simulator.performance.tables import Finding

SCENARIOS: Final = ("standalone", "elastic", "across")
FOLDER: Final = Path(__file__).with_name("scenarios")
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
BY_SIGNAL: Final = 128
WIDTH: Final = 120
"""Of tables that go into a file or a pipe."""


class Parser(argparse.ArgumentParser):
    """One that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Say it, and end."""
        self.exit(2, f"tensorhub: {message}\n")


def read(name: str) -> Cluster:
    """Read a scenario of ours by its name, or a file. Raises `ClusterError`."""
    return decode(read_text(name, FOLDER, SCENARIOS), name)


def read_text(name: str, folder: Path, ours: Sequence[str]) -> bytes:
    """Return the text of a scenario of ours in a folder, by its name, or of a file. Raises `ClusterError`."""
    path = folder / f"{name}.yaml" if name in ours else Path(name)
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as why:
        raise ClusterError(
            f"{name!r} can't be read ({why.strerror}): name a YAML file, or one of {', '.join(ours)}"
        ) from None
    if len(text) > FILE_BYTES_MAX:
        raise ClusterError(f"{name} has more than {FILE_BYTES_MAX >> 20} MiB: that is no scenario")
    return text


def simulate(names: list[str], *, alone: bool, processes: int) -> list[Finding]:
    """Run scenarios, all their cases side by side."""
    clusters = [read(name) for name in names]
    todo: list[list[Case]] = [list(cases(cluster, alone=alone)) for cluster in clusters]
    flat = [case for each in todo for case in each]
    with Bar("simulating", len(flat)) as bar:
        found = iter(pairs(flat, min(processes, len(flat)), bar.done))
    return [
        Finding(cluster=cluster, cases=tuple(each), pairs=tuple(next(found) for _ in each))
        for cluster, each in zip(clusters, todo, strict=True)
    ]


def say(findings: list[Finding], compared: list[calibration.Compared], *, as_json: bool) -> None:
    """Print everything."""
    if as_json:
        for finding in findings:
            for each in tables.objects(finding):
                sys.stdout.write(msgspec.json.encode(each).decode() + "\n")
        sys.stdout.write(msgspec.json.encode(tables.calibration_object(compared)).decode() + "\n")
        return
    # Names of a file are words, whatever brackets are in them.
    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    for finding in findings:
        for part in tables.tables(finding):
            console.print(part)
        console.print()
    console.print(tables.calibrated(compared))


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = Parser(prog="tensorhub simulate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help="a YAML file, standalone, elastic or across")
    parser.add_argument("--alone", action="store_true", help="neither other sizes nor other assumptions")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--picture", type=Path, help="draw the first scenario into this SVG file")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many runs at once")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes is {options.processes}, and must be at least 1")
    try:
        if options.picture is not None:
            svg.check(options.picture)
        findings = simulate(options.names or list(SCENARIOS), alone=options.alone, processes=options.processes)
        if options.picture is not None:
            svg.draw(findings[0], options.picture)
        print_safely(partial(say, findings, calibration.compare(calibration.load()), as_json=options.json))
    except TensorHubError as why:
        sys.stderr.write(f"tensorhub: {why}\n")
        return 1
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("tensorhub: interrupted\n")
        return BY_SIGNAL + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    return 0


def print_safely(say: Callable[[], None]) -> None:
    """Print everything, to the last byte. Raises `ClusterError` where that can't be written."""
    try:
        say()
        sys.stdout.flush()
    except BrokenPipeError:
        # The program that reads the output has closed it.
        _write_no_more()
    except OSError as why:
        _write_no_more()
        raise ClusterError(f"what came of it can't be written: {why.strerror}") from None


def _write_no_more() -> None:
    """Let what is still to be written at the exit go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def raise_interrupts() -> None:
    """Have SIGINT and SIGTERM end what was started first, as `KeyboardInterrupt` with the signal's number."""
    for each in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, _interrupt)


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    raise_interrupts()
    sys.exit(main())
