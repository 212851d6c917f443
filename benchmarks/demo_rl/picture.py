"""The picture of a demo: reward by step, undisturbed and with kills, the mean of seeds and their range."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from benchmarks.demo_rl.tally import Run
from benchmarks.side_by_side.picture import save

INCHES: Final = (8.0, 4.2)
KINDS: Final = {False: ("undisturbed", "#0b6e99", "-"), True: ("with kills", "#c0392b", "--")}


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the runs into an SVG file: the same figures give the same file."""
    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.subplots()
    for is_disturbed, (name, color, line) in KINDS.items():
        rewards = [[each.reward for each in run.steps] for run in runs if run.is_disturbed == is_disturbed]
        by_step = list(zip(*rewards, strict=False))
        if not by_step:
            continue
        steps = range(1, len(by_step) + 1)
        label = f"{name} ({len(rewards)} seed{'s' if len(rewards) > 1 else ''})"
        axes.plot(steps, [statistics.fmean(each) for each in by_step], line, color=color, lw=1.8, label=label)
        axes.fill_between(
            steps, [min(each) for each in by_step], [max(each) for each in by_step], color=color, alpha=0.15
        )
    axes.set_xlabel("step", fontsize=10)
    axes.set_ylabel("reward: mean, and range of seeds", fontsize=10)
    axes.set_ylim(0, 1)
    axes.set_xlim(left=1)
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, loc="lower right", frameon=False)
    save(figure, path)
