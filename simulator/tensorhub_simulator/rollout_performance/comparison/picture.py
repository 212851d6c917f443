"""The picture of a scenario as an SVG file: each system's instances, its trainer and its tokens over one time axis."""

from itertools import groupby, pairwise
from pathlib import Path
from typing import Final

from tensorhub_simulator.performance.svg import INK, LEFT, RIGHT, WIDE, Canvas
from tensorhub_simulator.rollout_performance.comparison.cases import Finding
from tensorhub_simulator.rollout_performance.measures.report import Report
from tensorhub_simulator.rollout_performance.measures.timeline import Doing, Timeline

LOCAL: Final = "#0b6e99"
SPOT: Final = "#5aa469"
BOOTING: Final = "#d9a441"
TOKENS: Final = "#7a3e9d"
LOST: Final = "#b03a2e"
DOING: Final[dict[Doing, str]] = {"seeds": LOCAL, "trains": "#444", "publishes": BOOTING}
FLEET_HIGH: Final = 60
TRAINER_HIGH: Final = 14
TOKENS_HIGH: Final = 46
BINS: Final = 240
"""The points of a curve of tokens."""
INSIDE: Final = WIDE - LEFT - RIGHT


def draw(finding: Finding, path: Path) -> None:
    """Draw the runs of a scenario's first seed into an SVG file. Raises `ClusterError`."""
    drawn = [
        (case.system, report, report.timeline)
        for case, report in zip(finding.cases, finding.reports, strict=True)
        if report.timeline is not None
    ]
    canvas = Canvas()
    first = drawn[0][1]
    title = f"{finding.scenario.name}: the same {first.responses} responses with each; what ends further left is sooner"
    canvas.text(LEFT, 24, title, size=16)
    canvas.y = 36
    _legend(canvas)
    end_s = max(report.seconds for _, report, _ in drawn)
    most = max((each.spot + each.booting + each.local for _, _, seen in drawn for each in seen.samples), default=1)
    rates = [_rates(seen, end_s) for _, _, seen in drawn]
    fastest = max(max(each) for each in rates) or 1.0
    for (system, report, seen), rate in zip(drawn, rates, strict=True):
        factor = report.tokens_per_s / first.tokens_per_s
        said = (
            f"{system}: {report.tokens_per_s:,.0f} tokens/s, {factor:.2f} times {drawn[0][0]}, {report.seconds:,.0f} s"
        )
        canvas.text(LEFT, canvas.y + 14, said, size=13)
        _fleet(canvas, canvas.y + 20, seen, end_s, report, max(most, 1))
        _trainer(canvas, canvas.y + 20 + FLEET_HIGH + 3, seen, end_s)
        _tokens(canvas, canvas.y + 20 + FLEET_HIGH + TRAINER_HIGH + 8, rate, fastest, report.seconds / end_s)
        canvas.y += 20 + FLEET_HIGH + TRAINER_HIGH + TOKENS_HIGH + 22
    for part in range(5):
        canvas.text(LEFT + INSIDE * part / 4, canvas.y + 6, f"{end_s * part / 4:,.0f} s", size=10, anchor="middle")
    canvas.y += 20
    canvas.save(path)


def _legend(canvas: Canvas) -> None:
    x = float(LEFT)
    for color, words in (
        (LOCAL, "trainer's GPUs generate"),
        (SPOT, "other instances"),
        (BOOTING, "they boot; it publishes"),
        (DOING["trains"], "trainer trains (white: waits)"),
        (LOST, "lost with work"),
        (TOKENS, "tokens/s made"),
    ):
        canvas.box(x, canvas.y, 10, 10, color)
        canvas.text(x + 14, canvas.y + 9, words, size=11)
        x += 24 + 6.2 * len(words)
    canvas.y += 22


def _fleet(canvas: Canvas, top: float, seen: Timeline, end_s: float, report: Report, most: int) -> None:
    """Draw how many instances there were: boxes on each other."""
    bottom = top + FLEET_HIGH
    canvas.text(LEFT - 6, top + 9, str(most), size=10, anchor="end")
    canvas.text(LEFT - 6, bottom, "instances 0", size=10, anchor="end")
    runs = [next(each) for _, each in groupby(seen.samples, lambda each: (each.local, each.spot, each.booting))]
    for sample, until in zip(runs, [*(each.at_s for each in runs[1:]), report.seconds], strict=True):
        x, wide = LEFT + INSIDE * sample.at_s / end_s, INSIDE * (until - sample.at_s) / end_s
        y = bottom
        for count, color in ((sample.local, LOCAL), (sample.spot, SPOT), (sample.booting, BOOTING)):
            if count:
                high = FLEET_HIGH * count / most
                y -= high
                canvas.box(x, y, wide, high, color)
    for at_s in seen.lost_s:
        canvas.box(LEFT + INSIDE * at_s / end_s - 0.6, top, 1.2, FLEET_HIGH, LOST)


def _trainer(canvas: Canvas, top: float, seen: Timeline, end_s: float) -> None:
    canvas.text(LEFT - 6, top + 11, "trainer", size=10, anchor="end")
    for span in seen.spans:
        x = LEFT + INSIDE * span.begin_s / end_s
        canvas.box(x, top, INSIDE * (span.end_s - span.begin_s) / end_s, TRAINER_HIGH, DOING[span.doing])


def _tokens(canvas: Canvas, top: float, rates: list[float], fastest: float, part: float) -> None:
    bottom = top + TOKENS_HIGH
    canvas.text(LEFT - 6, top + 9, f"{fastest:,.0f}/s", size=10, anchor="end")
    canvas.text(LEFT - 6, bottom, "0", size=10, anchor="end")
    points = [
        (LEFT + INSIDE * (number + 0.5) / BINS, bottom - TOKENS_HIGH * each / fastest)
        for number, each in enumerate(rates)
        if number <= part * BINS
    ]
    canvas.line(points, TOKENS)
    canvas.line([(LEFT, bottom), (WIDE - RIGHT, bottom)], INK, 0.4)


def _rates(seen: Timeline, end_s: float) -> list[float]:
    """Return the tokens a second of each part of the time."""
    made = [0.0] * (BINS + 1)
    at = 0
    for number in range(BINS + 1):
        until = end_s * number / BINS
        while at + 1 < len(seen.samples) and seen.samples[at + 1].at_s <= until:
            at += 1
        made[number] = float(seen.samples[at].made)
    return [(later - sooner) * BINS / end_s for sooner, later in pairwise(made)]
