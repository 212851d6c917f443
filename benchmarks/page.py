"""Puts what a run has measured into a page of docs/, between its markers, and the pictures beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parent.parent / "docs" / "design"
PAGE: Final = DOCS / "benchmarks.md"


def put(page: str, name: str, text: str) -> str:
    """Return the page with `text` between the markers of this name. Raises ValueError if it lacks them."""
    begin, end = f"<!-- {name}: begin (written by a command) -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page lacks the markers of '{name}': put {begin} and {end} into it")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def write(name: str, text: str, page: Path = PAGE) -> None:
    """Put it into the page."""
    page.write_text(put(page.read_text(), name, text))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown with columns as wide as they need; the first is text, the rest are figures."""
    widths = [max(3, *(len(row[column]) for row in [head, *rows])) for column in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(_cells(row, widths)) + " |" for row in (head, rule, *rows))


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *rest = widths
    return [row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], rest, strict=True))]
