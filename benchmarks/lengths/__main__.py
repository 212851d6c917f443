"""`python -m benchmarks.lengths FILE...`: recall of the longest fifth, calibration and error, by source of knowledge.

    python -m benchmarks.lengths benchmarks/lengths/*.gz
    python -m benchmarks.lengths --regressors linear,tree,forest AzureLLMInferenceTrace_code.csv

What prompts of the same length tell is compared with regressors of river (`pip install river`), where it is installed.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.lengths.replay import SOURCES, AboutAsLong, Quality, Regressor, measured
from benchmarks.lengths.trace import Group, read
from benchmarks.page import table, write

DOCS: Final = Path(__file__).parents[2] / "docs" / "design" / "rollouts" / "lengths.md"
WINDOW: Final = 512
PAPER: Final = 0.87
"""The recall of the longest fifth that StreamRL's ranker has (arXiv 2504.15930, section 4.3)."""


def _linear() -> object:
    return _river("preprocessing").StandardScaler() | _river("linear_model").LinearRegression()


def _tree() -> object:
    return _river("tree").HoeffdingAdaptiveTreeRegressor(grace_period=50, seed=1)


def _forest() -> object:
    return _river("forest").ARFRegressor(seed=1)


REGRESSORS: Final[dict[str, Callable[[], object]]] = {"linear": _linear, "tree": _tree, "forest": _forest}


class Report(msgspec.Struct, frozen=True):
    """One trace. `regressor`: which of river's; empty: none."""

    trace: str
    prompts: int
    responses: int
    window: int
    regressor: str
    found: list[Quality]


def main() -> None:
    """Replay each trace, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lengths",
        description=(__doc__ or "").splitlines()[0],
        epilog="python -m benchmarks.lengths benchmarks/lengths/demo.jsonl.gz",
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--window", type=int, default=WINDOW, help="responses of a step, where the trace names none")
    parser.add_argument("--regressors", default="linear,tree,forest", help="some of linear,tree,forest; empty: none")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/")
    parser.add_argument("--json", type=Path, help="write all figures into this file")
    options = parser.parse_args()
    if options.window < 1:
        parser.error(f"--window is {options.window}, and must be at least 1")
    names = [each for each in options.regressors.split(",") if each]
    if unknown := [each for each in names if each not in REGRESSORS]:
        parser.error(f"{', '.join(unknown)} is unknown: take some of {','.join(REGRESSORS)}")
    if names and importlib.util.find_spec("river") is None:
        print("river is not installed (pip install river): regressors are left out", file=sys.stderr)
        names = []
    reports: list[Report] = []
    for path in options.traces:
        try:
            trace = read(path)
        except (OSError, ValueError) as why:
            sys.exit(f"{path}: {why}")
        reports += _reports(path.name, trace, options.window, names)
    texts = [_text(each) for each in reports]
    print("\n\n".join(texts))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(reports), indent=1) + b"\n")
    if options.docs:
        write("lengths", "\n\n".join(texts), DOCS)


def _reports(name: str, trace: list[Group], window: int, regressors: list[str]) -> Iterator[Report]:
    """Yield what each source is worth, and what some are worth with regressors."""
    prompts, responses = len({each.group for each in trace}), sum(len(each.out_lens) for each in trace)
    telling = [each for each in SOURCES if each.tells(trace)]
    found = [measured(trace, window, each, AboutAsLong()) for each in telling]
    yield Report(name, prompts, responses, window, "", found)
    for regressor in regressors:
        found = [measured(trace, window, each, Regressor(REGRESSORS[regressor])) for each in telling if each.alike]
        yield Report(name, prompts, responses, window, regressor, [_renamed(each) for each in found])


def _renamed(found: Quality) -> Quality:
    """Return it under the name of what stood in for prompts about as long."""
    name = found.source.replace("prompts about as long", "the regressor").replace("those prompts", "the regressor")
    return msgspec.structs.replace(found, source=name)


def _text(report: Report) -> str:
    """Return the table of a trace."""
    what = f"`{report.trace}`: {report.prompts:,} prompts, {report.responses:,} responses"
    what += f", with river's {report.regressor} regressor instead of prompts about as long" if report.regressor else ""
    head = ["known", "recall", "below the 10 %", "50 %", "90 % quantile", "error", "responses"]
    rows = [
        [
            each.source,
            f"{each.recall:.2f}",
            *(f"{100 * share:.0f} %" for share in each.below),
            f"{each.error:.2f}",
            f"{each.responses:,}",
        ]
        for each in report.found
    ]
    return f"{what}:\n\n{table(head, rows)}"


def _river(module: str) -> Any:  # noqa: ANN401 (river has no types)
    return importlib.import_module(f"river.{module}")


if __name__ == "__main__":
    main()
