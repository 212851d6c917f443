"""Writes the parts of pages in docs/design/protocol/ and rollouts/ that follow from the code, between their markers.

    python -m tools.docs.protocol_page            write the pages anew
    python -m tools.docs.protocol_page --check    say what differs, and exit with 1 if anything does

Always true: nothing outside of the markers is changed, and what stands between them follows from the code alone: not
from the machine, the time, or what happens to be installed.
"""

import argparse
import ast
import difflib
import importlib
import importlib.util
import json
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from tensorhub_common.catalog.transitions import (
    AGENT_TRANSITIONS,
    ROUND_TRANSITIONS,
    SHARD_TRANSITIONS,
    VERSION_TRANSITIONS,
)
from tensorhub_common.protocol.log import levels
from tensorhub_common.protocol.log.commands import OUTSIDE_VERBS, Command
from tensorhub_common.protocol.log.events import Event, kind_of
from tensorhub_common.protocol.log.levels import Level
from tools.docs.asyncapi import COMMANDS, EVENTS, example

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = ("docs/design/protocol", "docs/design/rollouts")

PACKAGES: Final = (
    "libs/common/tensorhub_common",
    "services/registry/tensorhub_registry",
    "services/planner/tensorhub_planner",
    "services/agent/tensorhub_agent",
    "services/rollout/tensorhub_rollout",
    "services/runner/tensorhub_runner",
    "services/gateway/tensorhub_gateway",
)
"""Packages whose bounds are part of the protocol. docs/reference/api.md has the SDK's own waits."""

TABLES_ELSEWHERE: Final = {
    "lease": ("tensorhub_agent.leases.lease", "LEASE_TRANSITIONS"),
    "leader": ("tensorhub_registry.core.election", "LEADER_TRANSITIONS"),
    "request": ("tensorhub_rollout.log.transitions", "REQUEST_TRANSITIONS"),
    "attempt": ("tensorhub_rollout.core.placement", "ATTEMPT_TRANSITIONS"),
}

_MARKER: Final = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_BOUND: Final = re.compile(r"[A-Z][A-Z0-9_]*_(MAX|MIN|S|BYTES|PIECES)")
_NO_BOUND: Final = frozenset({"NS_PER_S"})
_IN_CLASS: Final = re.compile(r"\w+Limits|CoreConfig")
"""Classes whose fields are limits that are passed as values."""

_OPERATORS: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}

State = TypeVar("State", bound=StrEnum)
Move = TypeVar("Move", bound=StrEnum)


# ------------------------------------------------------------------------------------------------------------ states


def states(moves: Mapping[tuple[State, Move], State]) -> str:
    """Draw a state machine and list its transitions: what is not in the list can't happen."""
    first = next(iter(moves))[0]
    edges: dict[tuple[str, str], list[str]] = {}
    for (before, what), after in moves.items():
        edges.setdefault((str(before), str(after)), []).append(str(what))
    drawn = [f"    {before} --> {after}: {', '.join(whats)}" for (before, after), whats in edges.items()]
    diagram = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}", *drawn, "```"]
    rows = [f"| {before} | {what} | {after} |" for (before, what), after in moves.items()]
    return "\n".join([*diagram, "", "| state | what happens | state after |", "|---|---|---|", *rows])


def states_elsewhere(name: str) -> str:
    """The same for a table of a service, or a word that it is still to be written."""
    module, table = TABLES_ELSEWHERE[name]
    try:
        found: Mapping[tuple[StrEnum, StrEnum], StrEnum] = getattr(importlib.import_module(module), table)
    except (ImportError, AttributeError):
        return f"`{module}.{table}` is not written yet."
    return states(found)


# ---------------------------------------------------------------------------------------------------------- messages


def _json(message: msgspec.Struct) -> str:
    return json.dumps(msgspec.to_builtins(message), ensure_ascii=False)


def _text(kind: type) -> str:
    lines = [line.strip() for line in (kind.__doc__ or "").strip().splitlines()]
    return " ".join(line for line in lines if line)


def commands() -> str:
    """List every command with an example."""
    parts = []
    for kind in COMMANDS:
        command: Command = example(kind)
        verb = str(kind.__struct_config__.tag)
        who = "anyone with the job's credentials" if verb in OUTSIDE_VERBS else "the process in `by`"
        subject = f"tensorhub.v1.run-7.cmd.{verb}"
        if command.by is not None:
            subject += f".{command.by.process}"
        parts.append(f"## `{verb}`\n\n{_text(kind)}\n\nBy {who}, on `{subject}`:\n\n```json\n{_json(command)}\n```")
    return "\n\n".join(parts)


def events() -> str:
    """List every event with an example."""
    parts = []
    for kind in EVENTS:
        event: Event = example(kind)
        parts.append(f"## `{kind_of(event)}`\n\n{_text(kind)}\n\n```json\n{_json(event)}\n```")
    return "\n\n".join(parts)


# ------------------------------------------------------------------------------------------------------------ bounds


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit that has a name."""

    name: str
    value: float
    where: str
    why: str

    def row(self) -> str:
        """Return it as a row of the table."""
        value = f"{self.value:,}" if isinstance(self.value, int) else f"{self.value:g}"
        return f"| `{self.name}` | {value} | `{self.where}` | {self.why} |"


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:  # noqa: ANN401 (whatever the constant is)
    """Work a constant expression out. Raises KeyError for what is none."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return known[name]
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, known)
        case ast.BinOp(left, how, right):
            return _OPERATORS[type(how)](_value(left, known), _value(right, known))
    raise KeyError(ast.dump(node))


def _said(body: list[ast.stmt], at: int) -> str:
    """Return the string below a constant, which says why it is so."""
    after = body[at + 1] if at + 1 < len(body) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
        return " ".join(after.value.value.split()).replace("|", "\\|")
    return ""


def bounds_of(path: Path) -> Iterator[Bound]:
    """Yield the named limits of one module. They are read and not imported: some modules need a GPU's libraries."""
    where = path.relative_to(ROOT).as_posix()
    body = ast.parse(path.read_text()).body
    known: dict[str, Any] = {}
    for name, value, why in _numbers(body, known):
        if _BOUND.fullmatch(name) and name not in _NO_BOUND:
            yield Bound(name, value, where, why)
    for each in body:
        if isinstance(each, ast.ClassDef) and _IN_CLASS.fullmatch(each.name):
            for name, value, why in _numbers(each.body, dict(known)):
                if each.name.endswith("Limits") or _BOUND.fullmatch(name.upper()):
                    yield Bound(f"{each.name}.{name}", value, where, why)


def _numbers(body: list[ast.stmt], known: dict[str, Any]) -> Iterator[tuple[str, float, str]]:
    """Yield the names to which a module or a class gives a number, and why; `known` gets every value."""
    for at, statement in enumerate(body):
        if not isinstance(statement, ast.AnnAssign | ast.Assign) or statement.value is None:
            continue
        target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
        if not isinstance(target, ast.Name):
            continue
        try:
            value = _value(statement.value, known)
        except KeyError:
            continue
        known[target.id] = value
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield target.id, value, _said(body, at)


def bounds() -> str:
    """List every named limit."""
    rows = ["| name | value | where | why |", "|---|---|---|---|"]
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            rows += [bound.row() for bound in bounds_of(path)]
    return "\n".join(rows)


# ---------------------------------------------------------------------------------------------------------- document


def folded_levels() -> str:
    """Return the levels, and what each of them brought."""
    body = ast.parse(Path(levels.__file__).read_text()).body
    (kinds,) = (each.body for each in body if isinstance(each, ast.ClassDef) and each.name == Level.__name__)
    said = [ast.literal_eval(each.value) for each in kinds if isinstance(each, ast.Expr)][1:]
    rows = ["| level | from it on |", "|---|---|"]
    for level, text in zip(Level, said, strict=True):
        new = [f"`{verb}`" for verb, since in levels.VERBS_SINCE.items() if since == level]
        for table in (levels.COMMAND_FIELDS_SINCE, levels.STATE_FIELDS_SINCE):
            new += [f"`{owner}.{field}`" for (owner, field), since in table.items() if since == level]
        brought = f" New: {', '.join(new)}." if new else ""
        rows.append(f"| {int(level)} | {' '.join(text.split())}{brought} |")
    return "\n".join(rows)


SECTIONS: Final[Mapping[str, Callable[[], str]]] = {
    "states-shard": lambda: states(SHARD_TRANSITIONS),
    "states-version": lambda: states(VERSION_TRANSITIONS),
    "states-round": lambda: states(ROUND_TRANSITIONS),
    "states-agent": lambda: states(AGENT_TRANSITIONS),
    "states-lease": lambda: states_elsewhere("lease"),
    "states-leader": lambda: states_elsewhere("leader"),
    "states-request": lambda: states_elsewhere("request"),
    "states-attempt": lambda: states_elsewhere("attempt"),
    "levels": folded_levels,
    "commands": commands,
    "events": events,
    "bounds": bounds,
}


def generated(page: str) -> str:
    """Return the page with every generated section as it is now. Raises KeyError for an unknown section."""
    return _MARKER.sub(lambda found: f"{found[1]}\n{SECTIONS[found[2]]()}\n\n{found[3]}", page)


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something differs")
    check = parser.parse_args().check
    stale = 0
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md")):
        page = path.read_text()
        after = generated(page)
        if not check:
            path.write_text(after)
            continue
        was, now = page.splitlines(keepends=True), after.splitlines(keepends=True)
        sys.stdout.writelines(
            difflib.unified_diff(was, now, fromfile=path.relative_to(ROOT).as_posix(), tofile="generated")
        )
        stale += page != after
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
