"""Puts what a run has measured into a page of docs/, between its markers, and the pictures beside it."""

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
