"""The picture of readers that read from each other, against readers that all read from one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from benchmarks.network.pipeline import COUNTS, Took, ratio
from benchmarks.side_by_side.picture import OTHERS, OURS, save

INCHES: Final = (6.0, 3.6)
COLORS: Final = {"pipelined": OURS, "star": OTHERS}


def draw(found: Sequence[Took], path: Path) -> None:
    """Draw both ways into an SVG file."""
    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.subplots()
    for way, color in COLORS.items():
        axes.plot(COUNTS, [ratio(found, way, readers) for readers in COUNTS], marker="o", color=color, label=way)
    axes.set_xlabel("readers", fontsize=9)
    axes.set_ylabel("time to that of one reader", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.set_xticks(COUNTS)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    save(figure, path)
