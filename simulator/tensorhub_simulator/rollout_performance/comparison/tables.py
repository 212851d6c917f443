"""What came of a scenario's runs, as tables for people and as one JSON object a line for programs."""

from collections.abc import Callable, Iterator
from statistics import fmean, median
from typing import Any

import msgspec
from rich import box
from rich.table import Table

from tensorhub_simulator.rollout_performance.comparison.cases import Finding
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, System
from tensorhub_simulator.rollout_performance.measures.limits import limit_of
from tensorhub_simulator.rollout_performance.measures.report import Report


def tables(finding: Finding, *, tails: bool = False) -> Iterator[Table | str]:
    """Yield what to print of a scenario; `tails`: also when the responses of a step are whole."""
    first = finding.reports[0]
    seeds = len(finding.of("", finding.systems[0]))
    about = f"{finding.scenario.name}: {first.steps} steps, {first.responses} responses"
    yield f"{about}; median of {seeds} seeds (least-most)" if seeds > 1 else about
    yield _systems(finding)
    yield _limit(finding.scenario, finding.of("", finding.systems[-1])[0])
    if tails:
        has_steps = all(each.tails for each in finding.reports)
        yield _tails(finding) if has_steps else "tails are of steps, and not all of these trainers have some"
    if finding.variations:
        yield _variations(finding)


def _systems(finding: Finding) -> Table:
    table = Table(box=box.SIMPLE, collapse_padding=True)
    heads = (
        "tokens/s",
        "from step 2",
        "factor",
        "tokens/cost",
        "step, s",
        "trainer\nwaits",
        "made\nagain",
        "age",
        "lost",
    )
    for head in ("system", *heads):
        table.add_column(head, justify="left" if head == "system" else "right")
    base = finding.of("", finding.systems[0])
    for system in finding.systems:
        found = finding.of("", system)
        table.add_row(
            system,
            _stacked([each.tokens_per_s for each in found], "{:,.0f}"),
            _stacked([each.later_tokens_per_s for each in found], "{:,.0f}"),
            _stacked(_over(found, base, lambda each: each.later_tokens_per_s), "{:.2f}"),
            _stacked(_over(found, base, lambda each: each.tokens_per_cost), "{:.2f}") if found[0].cost else "-",
            f"{median(each.seconds / each.steps for each in found):,.0f}",
            f"{median(each.waited_s / each.seconds for each in found):.1%}",
            f"{median(each.made / each.tokens - 1 for each in found):.1%}",
            f"{median(each.ages.tokens for each in found):.2f}",
            f"{median(each.lost for each in found):g}",
        )
    return table


def _limit(scenario: Scenario, report: Report) -> str:
    limit = limit_of(scenario, report)
    alone = f", and the longest response alone {limit.alone_s:,.0f} s" if limit.alone_s else ""
    return (
        f"{report.system} is below {limit.tokens_per_s:,.0f} tokens/s, however it places: training and publishing take "
        f"{limit.training_s:,.0f} s of a step{alone}"
    )


def _tails(finding: Finding) -> Table:
    """Return when a step's responses are whole, by system: means of all steps, medians of seeds."""
    table = Table(title="responses that are trained, s from the step's begin", title_justify="left", box=box.SIMPLE)
    for head in ("system", "steps", "80 %", "90 %", "all", "80 % to all", "90 % to all", "less", "bound", "all/bound"):
        table.add_column(head, justify="left" if head == "system" else "right")
    base = finding.of("", finding.systems[0])
    for system in finding.systems:
        found = finding.of("", system)
        less = [1 - _mean(one, "tail_s") / _mean(other, "tail_s") for one, other in zip(found, base, strict=True)]
        table.add_row(
            system,
            _spread([other.seconds / one.seconds for one, other in zip(found, base, strict=True)], "{:.2f}"),
            *(
                f"{median(_mean(each, name) for each in found):,.1f}"
                for name in ("most_s", "nearly_s", "all_s", "tail80_s", "tail_s")
            ),
            _spread(less, "{:.0%}"),
            f"{median(_mean(each, 'bound_s') for each in found):,.1f}",
            _spread([_mean(each, "all_s") / _mean(each, "bound_s") for each in found], "{:.2f}"),
        )
    return table


def _mean(report: Report, name: str) -> float:
    return fmean(getattr(each, name) for each in report.tails)


def _variations(finding: Finding) -> Table:
    """Return the factors over the first system, from the second step on, one assumption a row."""
    table = Table(title="factor from step 2 on, if instead", title_justify="left", box=box.SIMPLE)
    table.add_column("")
    table.add_column(f"{finding.systems[0]}, tokens/s", justify="right")
    systems: list[System] = finding.systems[1:] or finding.systems
    for system in systems:
        table.add_column(system, justify="right")
    for what in finding.variations:
        base = finding.of(what, finding.systems[0])
        cells = (
            _spread(_over(finding.of(what, system), base, lambda each: each.later_tokens_per_s), "{:.2f}")
            for system in systems
        )
        table.add_row(what, _spread([each.tokens_per_s for each in base], "{:,.0f}"), *cells)
    return table


def _over(found: list[Report], base: list[Report], value: Callable[[Report], float]) -> list[float]:
    """Return how many times that of the first system a value is, seed by seed."""
    return [value(one) / value(other) for one, other in zip(found, base, strict=True)]


def _spread(values: list[float], form: str) -> str:
    said = [form.format(each) for each in (median(values), min(values), max(values))]
    return said[0] if len(values) == 1 else f"{said[0]} ({said[1]}-{said[2]})"


def _stacked(values: list[float], form: str) -> str:
    """Return the same in two lines, for a table of many columns."""
    return _spread(values, form).replace(" ", "\n")


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
            "later_tokens_per_s": report.later_tokens_per_s,
            "tail_s": _mean(report, "tail_s") if report.tails else None,
            "tail80_s": _mean(report, "tail80_s") if report.tails else None,
        }
