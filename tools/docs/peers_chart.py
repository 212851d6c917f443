"""Draws docs/peers.svg, the README's chart: TensorHub beside its peers, from the tables of docs/design/benchmarks.md.

`python -m tools.docs.peers_chart` writes it; a test compares.

Always true: every number in the chart is in a table of that page, from one run.
"""

import re
from html import escape
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "design" / "benchmarks.md"
CHART: Final = ROOT / "docs" / "peers.svg"

PARTS: Final = {
    "on one host": "over local, digests off",
    "over TCP, each process pretending a host of its own": "over ucxx, digests off",
}
"""The title of each part of the chart, and the end of the heading of its table."""

WIDTH, NAMES, FIGURES, ROW, BAR, TOP = 720, 170, 120, 22, 14, 46
OURS, OTHERS, INK, PAPER = "#0b6e99", "#9aa5ab", "#222", "#fff"
_ROW: Final = re.compile(r"^\|\s*(\*\*)?([^|*]+?)(?:\*\*)?\s*\|\s*([\d.]+)\s*\|[^|]*\|\s*([\d.]+)\s*\|", re.MULTILINE)


def rows(page: str, heading: str) -> list[tuple[str, float, bool]]:
    """Return who is in the table below a heading, with the milliseconds for one reader, and whether it is TensorHub."""
    table = page.split(f"{heading}\n", 1)[1].split("\n\n| stage", 1)[0]
    found = [(name, float(ms), bool(bold)) for bold, name, ms, _ in _ROW.findall(table)]
    return sorted(found, key=lambda each: each[1])


def chart(page: str) -> str:
    """Return the chart as SVG, from the page of the benchmarks."""
    parts = [(title, rows(page, heading)) for title, heading in PARTS.items()]
    longest = max(ms for _, part in parts for _, ms, _ in part)
    lines, y = (
        [_text(12, 24, "1 GiB from one process to another: median milliseconds, less is better", 15, "bold")],
        TOP,
    )
    for title, part in parts:
        y += ROW
        lines.append(_text(12, y, title, 13, "bold"))
        for name, ms, is_ours in part:
            y += ROW
            bar = (WIDTH - NAMES - FIGURES) * ms / longest
            color = OURS if is_ours else OTHERS
            lines.append(_text(NAMES - 8, y, name, 13, "bold" if is_ours else "normal", "end"))
            lines.append(f'<rect x="{NAMES}" y="{y - BAR + 2}" width="{bar:.1f}" height="{BAR}" fill="{color}"/>')
            lines.append(_text(NAMES + bar + 6, y, f"{ms:,.0f} ms", 13, "bold" if is_ours else "normal"))
        y += ROW // 2
    height = y + ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    body = "\n".join(lines)
    paper = f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>'
    return f'{head} font-family="sans-serif" role="img">\n{paper}\n{body}\n</svg>\n'


def _text(x: float, y: float, text: str, size: int, weight: str = "normal", anchor: str = "start") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    CHART.write_text(chart(PAGE.read_text()))
