"""What StreamRL's allocation says of a scenario, and what was simulated of it: tables, and one JSON object a line."""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from tensorhub_simulator.rollout_performance.config.scenario import System
from tensorhub_simulator.rollout_performance.measures.report import Report
from tensorhub_simulator.rollout_performance.sizing.allocate import Split


def tables(found: list[tuple[Split, list[Report]]], systems: list[System]) -> Iterator[Table]:
    """Yield a table for each scenario and number of sites: splits, what the profile says, and what was simulated."""
    for name in dict.fromkeys(split.scenario.name for split, _ in found):
        table = Table(title=f"{name}: StreamRL's allocation, and beside it", title_justify="left", box=box.SIMPLE)
        for head in ("generate", "train", "so long, s", "and, s", "step, s"):
            table.add_column(head, justify="right")
        for system in systems:
            for head in (f"{system}, s", "tokens/s", "k/cost"):
                table.add_column(head, justify="right")
        for split, reports in found:
            if split.scenario.name != name:
                continue
            times = [f"{each:,.0f}" for each in (split.generation_s, split.training_s, split.step_s)]
            simulated = [
                said
                for each in reports
                for said in (
                    f"{settled_s(each):,.0f}",
                    f"{each.tokens_per_s:,.0f}",
                    f"{each.tokens_per_cost / 1e3:,.0f}",
                )
            ]
            mark = " *" if split.is_chosen else ""
            table.add_row(f"{split.generation}{mark}", str(split.training), *times, *simulated)
        table.caption_justify = "left"
        table.caption = (
            "* chosen. How long generation, training and a step take by the profile; then a simulated step, without "
            "the first one, and thousands of tokens for one unit of money."
        )
        yield table


def settled_s(report: Report) -> float:
    """Return how long a step takes, but for the first one, in seconds: nothing was made ahead for that."""
    return fmean(report.step_s[1:] or report.step_s)


def objects(found: list[tuple[Split, list[Report]]]) -> Iterator[dict[str, Any]]:
    """Yield each split with each system."""
    for split, reports in found:
        for each in reports:
            yield {
                "scenario": split.scenario.name,
                "generation": split.generation,
                "training": split.training,
                "is_chosen": split.is_chosen,
                "generation_s": split.generation_s,
                "training_s": split.training_s,
                "predicted_step_s": split.step_s,
                "system": each.system,
                "step_s": settled_s(each),
                "tokens_per_s": each.tokens_per_s,
                "tokens_per_cost": each.tokens_per_cost if each.cost else None,
            }
