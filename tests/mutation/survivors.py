"""Why each surviving mutant is harmless: what survivors.toml says, held against what has survived, as a page."""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.mutation.results import ALIVE, Survivor

COLUMNS = ("killed", "caught by type check", "timeout")
"""What counts as noticed, in the table's order."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why mutants of one line of a function are harmless."""

    where: str
    line: str
    mutants: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Survivors with their reasons, those without, and reasons without a survivor."""

    explained: list[tuple[Survivor, str]]
    unexplained: list[Survivor]
    stale: list[Explanation]


def explanations(text: str) -> list[Explanation]:
    """Read survivors.toml."""
    return [
        Explanation(where=each["where"], line=each["line"], mutants=tuple(each["mutants"]), why=each["why"])
        for each in tomllib.loads(text).get("harmless", ())
    ]


def judged(found: Iterable[Survivor], known: Iterable[Explanation]) -> Verdict:
    """Hold what survived against what is explained."""
    reasons = {(each.where, each.line, mutant): each for each in known for mutant in each.mutants}
    unused = dict(reasons)
    verdict = Verdict([], [], [])
    for survivor in found:
        key = (survivor.where, survivor.line, survivor.mutant)
        unused.pop(key, None)
        if key in reasons:
            verdict.explained.append((survivor, reasons[key].why))
        else:
            verdict.unexplained.append(survivor)
    verdict.stale.extend(dict.fromkeys(unused.values()))
    return verdict


def page(text: str, counts: Mapping[str, Counter[str]], verdict: Verdict) -> str:
    """Return the page with its tables written anew."""
    for name, table in (("counts", _counts(counts)), ("survivors", _survivors(verdict))):
        marker = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, done = marker.subn(lambda found, table=table: f"{found[1]}{table}{found[2]}", text)  # type: ignore[misc]
        assert done == 1, f"docs/mutation.md has {done} places for {name}"
    return text


def _counts(counts: Mapping[str, Counter[str]]) -> str:
    rows = [(module.removeprefix("tensorhub_"), each) for module, each in counts.items()]
    rows.append(("**all**", sum((each for _, each in rows), Counter[str]())))
    lines = ["| module | mutants | killed by a test | refused by mypy | hung | survived | not tested yet |\n"]
    lines.append("|---|---|---|---|---|---|---|\n")
    for module, each in rows:
        noticed = " | ".join(str(each[column]) for column in COLUMNS)
        alive = sum(each[status] for status in ALIVE)
        lines.append(f"| {module} | {each.total()} | {noticed} | {alive} | {each['not checked']} |\n")
    return "".join(lines)


def _survivors(verdict: Verdict) -> str:
    lines = ["| where | the line | survives as | why |\n|---|---|---|---|\n"]
    rows = [*verdict.explained, *((each, "**not explained yet**") for each in verdict.unexplained)]
    for survivor, why in sorted(rows, key=lambda row: (row[0].where, row[0].name)):
        where = survivor.where.removeprefix("tensorhub_")
        lines.append(f"| {where} | {_code(survivor.line)} | {_code(survivor.mutant)} | {why} |\n")
    return "".join(lines)


def _code(line: str) -> str:
    """Return a line of code that may stand in a table's cell; a mutant may lack the line."""
    if not line:
        return "(left out)"
    escaped = line.replace("|", "\\|")
    return f"`` {escaped} ``" if "`" in line else f"`{escaped}`"
