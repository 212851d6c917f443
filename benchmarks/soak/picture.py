"""The picture of a soak: each metric of each process over the updates."""

from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from benchmarks.side_by_side.picture import save
from benchmarks.soak.growth import MIB
from benchmarks.soak.run import OF_HUB, OF_PROCESS, Samples

INCHES: Final = (10.0, 7.0)
COLUMNS: Final = 3


def draw(samples: Samples, transport: str, path: Path) -> None:
    """Draw one soak into an SVG file."""
    metrics = [*OF_PROCESS, *OF_HUB]
    figure = Figure(figsize=INCHES, layout="constrained")
    grid = figure.subplots(-(-len(metrics) // COLUMNS), COLUMNS).flat
    for axes, metric in zip(grid, metrics, strict=True):
        unit = MIB if metric in ("memory", "shm bytes") else 1
        for (process, name), values in samples.series.items():
            if name == metric:
                axes.plot(samples.updates, [value / unit for value in values], lw=1, label=process)
        axes.set_title(f"{metric}{', MiB' if unit == MIB else ''}", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if metric == OF_PROCESS[0]:
            axes.legend(fontsize=7, loc="center right")
    figure.supxlabel(f"updates over {transport}", fontsize=9)
    save(figure, path)
