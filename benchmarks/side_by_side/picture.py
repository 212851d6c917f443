"""The picture of a run: how long everybody took, in memcpys, on one host and over TCP."""

from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.side_by_side.results import COUNTS, Line, Part, Result, measured

OURS: Final = "#0b6e99"
OTHERS: Final = "#9aa5ab"
LIMIT: Final = "#c0392b"
INCHES_WIDE: Final = 10.0
INCHES_ROW: Final = 0.32
INCHES_FRAME: Final = 1.4
NAMES: Final = {"local": "on one host", "ucxx": "over TCP"}


def draw(result: Result, path: Path) -> None:
    """Draw a run into an SVG file: the same run gives the same file."""
    transports = [name for name in NAMES if any(part.transport == name for part in result.parts)]
    rows = {name: _lines(result, name) for name in transports}
    heights = [max(1, len(rows[name])) for name in transports]
    figure = Figure(
        figsize=(INCHES_WIDE, INCHES_ROW * sum(heights) + INCHES_FRAME * len(heights)), layout="constrained"
    )
    grid = figure.subplots(len(transports), len(COUNTS), squeeze=False, sharey="row", height_ratios=heights)
    for axes, name in zip(grid, transports, strict=True):
        for one, readers in zip(axes, COUNTS, strict=True):
            _draw(one, rows[name], readers, f"{result.mib} MiB {NAMES[name]}, 1→{readers}")
    figure.supxlabel(
        "time in memcpys of the same bytes by one thread (median; the line is from the least to the most)", fontsize=9
    )
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write an SVG file with text as text: the same figure gives the same file."""
    with mpl.rc_context({"svg.hashsalt": "tensorhub", "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None, "Creator": None})


def _lines(result: Result, transport: str) -> list[tuple[str, Line]]:
    """Return everybody by name, the fastest first; who stands in both parts is shown beside digests off."""
    found: dict[str, Line] = {}
    for part in result.parts:
        if part.transport == transport:
            for line in measured(part.lines):
                found[_name(part, line)] = line
    return sorted(found.items(), key=lambda each: -each[1].in_memcpys(1))


def _name(part: Part, line: Line) -> str:
    return f"{line.title}, digests {'on' if part.digests else 'off'}" if line.is_ours else line.title


def _draw(axes: Any, rows: list[tuple[str, Line]], readers: int, title: str) -> None:  # noqa: ANN401 (untyped)
    middles = [line.in_memcpys(readers) for _, line in rows]
    each = [[one.seconds / one.memcpy_s for one in line.of(readers)] for _, line in rows]
    reach = [
        [middle - min(ratios) for middle, ratios in zip(middles, each, strict=True)],
        [max(ratios) - middle for middle, ratios in zip(middles, each, strict=True)],
    ]
    colors = [OURS if line.is_ours else OTHERS for _, line in rows]
    axes.barh([name for name, _ in rows], middles, xerr=reach, color=colors, error_kw={"ecolor": "#333", "lw": 0.8})
    axes.axvline(readers, color=LIMIT, lw=0.8, ls="--")
    for row, middle in enumerate(middles):
        axes.annotate(f" {middle:.2f}", (max(middle, 0) + reach[1][row], row), va="center", fontsize=8)
    axes.margins(x=0.18)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
