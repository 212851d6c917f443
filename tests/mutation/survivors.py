"""Why each surviving mutant is harmless: what survivors.toml says, held against what has survived, as a page.

What has survived is the record of all runs, of which each tests some modules: `Record` is of the last one of each.
Always true: of a module that nobody has tested as it stands no explanation is asked for, and none called stale.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
from tests.mutation.results import ALIVE, Outcome, Survivor

Record = Mapping[str, Outcome]
"""By module."""

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
    return [
        Explanation(where=each["where"], line=each["line"], mutants=tuple(each["mutants"]), why=each["why"])
        for each in tomllib.loads(text).get("harmless", ())
    ]


def recorded(text: str) -> Record:
    return msgspec.json.decode(text, type=dict[str, Outcome])


def written(record: Record) -> str:
    """Write it: a line for each thing, so that what two people tested is put together by git."""
    return msgspec.json.format(msgspec.json.encode(dict(sorted(record.items()))), indent=1).decode() + "\n"


def added(record: Record, run: Record, now: Iterable[str]) -> Record:
    """Return the record with what one run has tested. Modules that are no more are forgotten."""
    return {module: outcome for module in now if (outcome := run.get(module) or record.get(module)) is not None}


def judged(record: Record, now: Mapping[str, str], known: Iterable[Explanation]) -> Verdict:
    """Hold what survived against what is explained. `now` are the digests of the modules that there are.

    Of a module that has changed since it was tested nothing is asked for: what survived then is told where it is known.
    """
    reasons = {(each.where, each.line, mutant): each for each in known for mutant in each.mutants}
    settled = {module for module, outcome in record.items() if now.get(module) == outcome.source}
    unsettled = tuple(f"{module}." for module in now if module not in settled)
    unused = {key: each for key, each in reasons.items() if not key[0].startswith(unsettled)}
    verdict = Verdict([], [], [])
    for module, survivor in ((module, each) for module, outcome in record.items() for each in outcome.survivors):
        key = (survivor.where, survivor.line, survivor.mutant)
        unused.pop(key, None)
        if key in reasons:
            verdict.explained.append((survivor, reasons[key].why))
        elif module in settled:
            verdict.unexplained.append(survivor)
    verdict.stale.extend(dict.fromkeys(unused.values()))
    return verdict


def page(text: str, record: Record, now: Mapping[str, str], verdict: Verdict) -> str:
    """Return the page with its tables written anew. `now` are the digests of the modules that there are."""
    for name, table in (("counts", _counts(record, now)), ("survivors", _survivors(verdict))):
        marker = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, done = marker.subn(lambda found, table=table: f"{found[1]}{table}{found[2]}", text)  # type: ignore[misc]
        assert done == 1, f"docs/design/mutation.md has {done} places for {name}"
    return text


def _counts(record: Record, now: Mapping[str, str]) -> str:
    lines = ["| module | mutants | killed by a test | refused by mypy | hung | survived | tested |\n"]
    lines.append("|---|---|---|---|---|---|---|\n")
    total = Counter[str]()
    for module, digest in sorted(now.items()):
        outcome = record.get(module)
        if outcome is None:
            lines.append(_row(module, None, "not yet"))
        elif outcome.counts:
            counts = Counter(outcome.counts)
            total += counts
            lines.append(_row(module, counts, "as it stands" if outcome.source == digest else "changed since"))
    lines.append(_row("**all**", total, ""))
    return "".join(lines)


def _row(module: str, counts: Counter[str] | None, when: str) -> str:
    if counts is None:
        cells = ["–"] * (len(COLUMNS) + 2)
    else:
        alive = sum(counts[status] for status in ALIVE)
        cells = [str(count) for count in (counts.total(), *(counts[column] for column in COLUMNS), alive)]
    return f"| {' | '.join([module.removeprefix('tensorhub_'), *cells, when])} |\n"


def _survivors(verdict: Verdict) -> str:
    lines = ["| where | the line | survives as | why |\n|---|---|---|---|\n"]
    rows = [*verdict.explained, *((each, "**not explained yet**") for each in verdict.unexplained)]
    for survivor, why in sorted(rows, key=lambda row: row[0].where):
        where = survivor.where.removeprefix("tensorhub_")
        lines.append(f"| {where} | {_code(survivor.line)} | {_code(survivor.mutant)} | {why} |\n")
    return "".join(lines)


def _code(line: str) -> str:
    """Return a line of code that may stand in a table's cell; a mutant may lack the line."""
    if not line:
        return "(left out)"
    escaped = line.replace("|", "\\|")
    return f"`` {escaped} ``" if "`" in line else f"`{escaped}`"
