"""The table of a demo, as Markdown."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks import page
from benchmarks.demo_rl.picture import KINDS
from benchmarks.demo_rl.tally import Run
from benchmarks.demo_rl.verdict import LAST_STEPS, final_rewards

Value = Callable[[Sequence[Run]], str]


def table(runs: Sequence[Run]) -> str:
    """Return the table of both kinds of run: sums over seeds, where nothing else is said."""
    kinds = {kind: [run for run in runs if run.is_disturbed == kind] for kind in KINDS}
    present = {kind: found for kind, found in kinds.items() if found}
    head = ["", *(f"{KINDS[kind][0]}, {len(found)} seed(s)" for kind, found in present.items())]
    return page.table(head, [[name, *(value(found) for found in present.values())] for name, value in ROWS.items()])


def _sum(what: str) -> Value:
    return lambda runs: f"{sum(getattr(run, what) for run in runs):,}"


def _kills(who: str) -> Value:
    return lambda runs: str(sum(run.kills.get(who, 0) for run in runs))


def _tokens_per_s(runs: Sequence[Run]) -> str:
    return f"{sum(run.tokens for run in runs) / max(1.0, sum(run.seconds for run in runs)):,.0f}"


def _seconds(runs: Sequence[Run]) -> str:
    return f"{statistics.fmean(run.seconds for run in runs):.0f}"


def _again(runs: Sequence[Run]) -> str:
    again, tokens = sum(run.tokens_again for run in runs), sum(run.tokens for run in runs)
    return f"{again:,} ({again / max(1, tokens):.2%})"


def _behind(runs: Sequence[Run]) -> str:
    counts = Counter[int]()
    for run in runs:
        counts.update(run.versions_behind)
    return ", ".join(f"{behind}: {count / counts.total():.1%}" for behind, count in sorted(counts.items()))


def _final(runs: Sequence[Run]) -> str:
    found = final_rewards(runs, is_disturbed=runs[0].is_disturbed)
    if not found:
        return "-"
    spread = f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.3f}{spread}"


ROWS: Final[dict[str, Value]] = {
    "runners killed": _kills("runner"),
    "managers killed": _kills("manager"),
    "trainers killed": _kills("trainer"),
    "steps": lambda runs: str(sum(len(run.steps) for run in runs)),
    "responses submitted": _sum("submitted"),
    "responses learned from": _sum("delivered"),
    "responses learned from twice": _sum("twice"),
    "responses lost": _sum("lost"),
    "responses failed": _sum("failed"),
    "responses that came once more to a restarted trainer": _sum("came_again"),
    "responses that moved": _sum("moved"),
    "tokens": _sum("tokens"),
    "tokens made again": _again,
    "tokens whose cache was computed again: moves": _sum("computed_again_by_moves"),
    "tokens whose cache was computed again: new weights": _sum("computed_again_by_updates"),
    "tokens by how many versions they were behind": _behind,
    "seconds a run": _seconds,
    "tokens/s": _tokens_per_s,
    f"reward of the last {LAST_STEPS} steps, ± standard deviation over seeds": _final,
}
