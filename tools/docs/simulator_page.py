"""docs/design/simulator.md's table of planted bugs: written from a run that looked for each of them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tensorhub_simulator.faultsim.mutants.planting import BUGS
from tensorhub_simulator.faultsim.runner.report import Finding

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "design" / "simulator.md"
_TABLE: Final = re.compile(r"(<!-- generated: bugs -->\n).*?(<!-- end -->)", re.DOTALL)


def write(findings: Sequence[Finding]) -> None:
    """Write the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(lambda found: found[1] + table(findings) + found[2], text), encoding="utf-8")


def table(findings: Sequence[Finding]) -> str:
    """Return the rows: the bug, what it gets wrong, the first seed that finds it, and the invariant that breaks."""
    rows = [
        f"| `{each.bug}` | {_told(each.bug)} | {each.seed if each.seed is not None else 'never'} | {each.invariant} |"
        for each in findings
    ]
    return "\n".join(["", "| bug | what it gets wrong | seed | invariant |", "|---|---|---|---|", *rows, "", ""])


def listed() -> list[str]:
    """Return the bugs that the page has a row for."""
    found = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    return re.findall(r"^\| `([\w-]+)` \|", found[0], re.MULTILINE) if found is not None else []


def _told(bug: str) -> str:
    return (BUGS[bug].__doc__ or "").split("\n\n", maxsplit=1)[0].strip()
