"""What came of a scenario's runs, as tables for people and as one JSON object a line for programs."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import msgspec
from rich import box
from rich.table import Table

from tensorhub_simulator.rollout_performance.cases import Finding
from tensorhub_simulator.rollout_performance.config import System
from tensorhub_simulator.rollout_performance.job import Report


def tables(finding: Finding) -> Iterator[Table | str]:
    """Yield what to print of a scenario."""
    first = finding.reports[0]
    seeds = len(finding.of("", finding.systems[0]))
    about = f"{finding.scenario.name}: {first.steps} steps, {first.responses} responses"
    yield f"{about}; median of {seeds} seeds (least-most)" if seeds > 1 else about
    yield _systems(finding)
    if finding.variations:
        yield _variations(finding)


def _systems(finding: Finding) -> Table:
    table = Table(box=box.SIMPLE)
    heads = ("tokens/s", "factor", "tokens/cost", "step, s", "trainer waits", "made again", "lost")
    for head in ("system", *heads):
        table.add_column(head, justify="left" if head == "system" else "right")
    base = finding.of("", finding.systems[0])
    for system in finding.systems:
        found = finding.of("", system)
        table.add_row(
            system,
            _spread([each.tokens_per_s for each in found], "{:,.0f}"),
            _spread(_over(found, base, lambda each: each.tokens_per_s), "{:.2f}"),
            _spread(_over(found, base, lambda each: each.tokens_per_cost), "{:.2f}") if found[0].cost else "-",
            f"{median(each.seconds / each.steps for each in found):,.0f}",
            f"{median(each.waited_s / each.seconds for each in found):.1%}",
            f"{median(each.made / each.tokens - 1 for each in found):.1%}",
            f"{median(each.lost for each in found):g}",
        )
    return table


def _variations(finding: Finding) -> Table:
    """Return the factors over the first system, one assumption a row."""
    table = Table(title="factor, if instead", title_justify="left", box=box.SIMPLE)
    table.add_column("")
    systems: list[System] = finding.systems[1:] or finding.systems
    for system in systems:
        table.add_column(system, justify="right")
    for what in finding.variations:
        base = finding.of(what, finding.systems[0])
        cells = (
            _spread(_over(finding.of(what, system), base, lambda each: each.tokens_per_s), "{:.2f}")
            for system in systems
        )
        table.add_row(what, *cells)
    return table


def _over(found: list[Report], base: list[Report], value: Callable[[Report], float]) -> list[float]:
    """Return how many times that of the first system a value is, seed by seed."""
    return [value(one) / value(other) for one, other in zip(found, base, strict=True)]


def _spread(values: list[float], form: str) -> str:
    said = [form.format(each) for each in (median(values), min(values), max(values))]
    return said[0] if len(values) == 1 else f"{said[0]} ({said[1]}-{said[2]})"


def objects(finding: Finding) -> Iterator[dict[str, Any]]:
    """Yield each run."""
    for case, report in zip(finding.cases, finding.reports, strict=True):
        tree = msgspec.to_builtins(report)
        del tree["timeline"]
        yield {
            "scenario": finding.scenario.name,
            "what": case.what,
            "seed": case.scenario.seed,
            **tree,
            "tokens_per_s": report.tokens_per_s,
        }
