"""The picture of a scenario as an SVG file: when each replica stood still, ours and the baseline's, and link use.

Written by hand, since the command has no library for pictures; the same run gives the same file.
"""

import errno
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from tensorhub_simulator.performance.comparison import BaselineComparison
from tensorhub_simulator.performance.config import ClusterError
from tensorhub_simulator.performance.model.cluster import ClusterRun, run
from tensorhub_simulator.performance.model.topology import GBIT, GBYTE
from tensorhub_simulator.performance.results import Result, Update
from tensorhub_simulator.performance.tables import Finding, seconds

OURS: Final = "#0b6e99"
OTHERS: Final = "#9aa5ab"
WAITS: Final = "#d9a441"
INK: Final = "#333"
WIDE, LEFT, RIGHT = 960, 90, 30
LANES_HIGH: Final = 170
CURVE_HIGH: Final = 90
BINS: Final = 200
LANES_MAX: Final = 64
"""This many replicas are drawn, evenly chosen among all."""


class Canvas:
    """Lines of an SVG file, from the top down."""

    def __init__(self) -> None:
        """Begin empty."""
        self.y = 0.0
        self._lines: list[str] = []

    def text(self, x: float, y: float, words: str, *, size: int = 12, anchor: str = "start") -> None:
        """Write words."""
        how = f'font-size="{size}" text-anchor="{anchor}" fill="{INK}"'
        # XML has no way to say a control character.
        shown = "".join(each if each.isprintable() else " " for each in words)
        self._lines.append(f'<text x="{x:.1f}" y="{y:.1f}" {how}>{escape(shown)}</text>')

    def box(self, x: float, y: float, wide: float, high: float, color: str) -> None:
        """Fill a box."""
        self._lines.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(wide, 0.4):.2f}" height="{high:.2f}" fill="{color}"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], color: str, wide: float = 1.2) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{wide}"/>')

    def save(self, path: Path) -> None:
        """Write the file. Raises `ClusterError`."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {self.y:.0f}" font-family="sans-serif">'
            f'<rect width="{WIDE}" height="{self.y:.0f}" fill="white"/>'
        )
        try:
            path.write_text("\n".join([head, *self._lines, "</svg>", ""]), encoding="utf-8")
        except OSError as why:
            raise _unwritable(path, why.strerror) from None


def check(path: Path) -> None:
    """Raise `ClusterError` where no picture can be written, before minutes have gone into it."""
    if path.is_dir():
        raise _unwritable(path, os.strerror(errno.EISDIR))
    if not path.parent.is_dir():
        raise _unwritable(path, f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _unwritable(path, os.strerror(errno.EACCES))


def _unwritable(path: Path, why: str | None) -> ClusterError:
    return ClusterError(f"the picture can't be written to {path}: {why}")


def draw(finding: Finding, path: Path) -> None:
    """Draw a scenario into an SVG file."""
    pair, canvas = finding.itself, Canvas()
    factor = f"factor {pair.factor:.1f}" if pair.factor else "no factor"
    canvas.text(LEFT, 24, f"{finding.cluster.name}, {pair.gpus} GPUs: {factor}", size=16)
    canvas.y = 44
    end_s = max((each.ready_s or 0.0 for updates in pair.updates for each in updates), default=1.0)
    for name, updates in zip(("ours", "baseline"), pair.updates, strict=True):
        _lanes(canvas, name, updates, end_s)
    world = ClusterRun(finding.cluster)
    world.network.seen = {}
    _curves(canvas, world, run(world))
    sizes = finding.of("size")
    if sizes:
        _growth(canvas, sizes)
    canvas.save(path)


def _lanes(canvas: Canvas, name: str, updates: Sequence[Update], end_s: float) -> None:
    """Draw when replicas stood still."""
    ended = [each for each in updates if each.ready_s is not None]
    chosen = sorted({(each.kind, each.replica) for each in ended})
    step = -(-len(chosen) // LANES_MAX) or 1
    lanes = {who: number for number, who in enumerate(chosen[::step])}
    high = LANES_HIGH / max(len(lanes), 1)
    top = canvas.y + 20
    canvas.text(LEFT, top - 6, f"{name}: a line for each of {len(lanes)} replicas; yellow waits, then bytes come")
    scale = (WIDE - LEFT - RIGHT) / end_s
    for each in ended:
        lane = lanes.get((each.kind, each.replica))
        if lane is None or each.ready_s is None:
            continue
        started_s = each.started_s if each.started_s is not None else each.asked_s
        y = top + lane * high
        canvas.box(LEFT + each.asked_s * scale, y, (started_s - each.asked_s) * scale, high * 0.8, WAITS)
        color = OURS if name == "ours" else OTHERS
        canvas.box(LEFT + started_s * scale, y, (each.ready_s - started_s) * scale, high * 0.8, color)
    _axis(canvas, top + LANES_HIGH, end_s)
    canvas.y = top + LANES_HIGH + 24


def _axis(canvas: Canvas, y: float, end_s: float) -> None:
    canvas.line([(LEFT, y + 2), (WIDE - RIGHT, y + 2)], INK, 0.6)
    for part in range(5):
        x = LEFT + (WIDE - LEFT - RIGHT) * part / 4
        canvas.text(x, y + 15, f"{seconds(end_s * part / 4)} s", size=10, anchor="middle")


def _curves(canvas: Canvas, world: ClusterRun, result: Result) -> None:
    """Draw how full the links of each tier were, in our run."""
    assert world.network.seen is not None
    capacities: dict[str, int] = {}
    for link in world.fabric.links:
        capacities[link.tier] = capacities.get(link.tier, 0) + link.bytes_s
    for tier, spans in sorted(world.network.seen.items()):
        used = [0.0] * BINS
        bin_s = result.seconds / BINS
        for begin, end, nbytes in spans:
            first, last = int(begin / bin_s), min(int(end / bin_s), BINS - 1)
            for number in range(first, last + 1):
                inside = min(end, (number + 1) * bin_s) - max(begin, number * bin_s)
                used[number] += nbytes * max(inside, 0.0) / (end - begin) if end > begin else 0.0
        top = canvas.y + 18
        peak = capacities[tier] * bin_s
        whole = capacities[tier] / world.fabric.part
        canvas.text(LEFT, top - 4, f"ours: {tier}, of {whole / GBYTE:.4g} GB/s ({whole / GBIT:.4g} Gbit/s of payload)")
        points = [
            (LEFT + (WIDE - LEFT - RIGHT) * (n + 0.5) / BINS, top + CURVE_HIGH * (1 - min(each / peak, 1.0)))
            for n, each in enumerate(used)
        ]
        canvas.line([(LEFT, top), (LEFT, top + CURVE_HIGH)], INK, 0.6)
        canvas.text(LEFT - 6, top + 8, "100 %", size=10, anchor="end")
        canvas.text(LEFT - 6, top + CURVE_HIGH, "0", size=10, anchor="end")
        canvas.line(points, OURS)
        _axis(canvas, top + CURVE_HIGH, result.seconds)
        canvas.y = top + CURVE_HIGH + 24


def _growth(canvas: Canvas, pairs: Sequence[BaselineComparison]) -> None:
    """Draw the factor over the number of GPUs, both in powers."""
    top, high = canvas.y + 22, 130
    canvas.text(LEFT, top - 6, "factor by the number of GPUs")
    factors = {pair.gpus: pair.factor or 0.0 for pair in pairs}
    most = max(1.0, *factors.values())
    ordered = sorted(pairs, key=lambda pair: pair.gpus)
    points = []
    for number, pair in enumerate(ordered):
        x = LEFT + (WIDE - LEFT - RIGHT) * (number + 0.5) / len(ordered)
        y = top + 14 + (high - 14) * (1 - factors[pair.gpus] / most)
        points.append((x, y))
        canvas.text(x, y - 5, f"{factors[pair.gpus]:.1f}", size=11, anchor="middle")
        canvas.text(x, top + high + 16, f"{pair.gpus}", size=10, anchor="middle")
    canvas.line(points, OURS, 2.0)
    canvas.line([(LEFT, top + high + 2), (WIDE - RIGHT, top + high + 2)], INK, 0.6)
    canvas.y = top + high + 30
