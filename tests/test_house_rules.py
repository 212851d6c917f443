"""The rules of CONTRIBUTING.md that no tool checks: how long files and functions are. And which tests begin first."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests import longest_first

ROOT: Final = Path(__file__).parents[1]
INSTALLED: Final = ("libs", "services", "simulator")
WRITTEN: Final = (*INSTALLED, "tests", "benchmarks", "examples")

FILE_LINES_MAX: Final = 400
FUNCTION_LINES_MAX: Final = 40

LONGER_FILES: Final = {
    "services/agent/tensorhub_agent/effects.py": "grew beyond it, and not divided yet",
    "services/agent/tensorhub_agent/serving.py": "one table of leases, whose promises could have a room of their own",
    "tests/property/transfer_chance.py": "grew beyond it, and not divided yet",
}
"""Files that may be longer, and why."""

LONGER_FUNCTIONS: Final = {
    "libs/common/tensorhub_common/catalog/filling.py:filled": "each no of the fold is a sentence of its own",
    "libs/common/tensorhub_common/catalog/membership.py:register": "each no of the fold is a sentence of its own",
    "libs/common/tensorhub_common/wire/asyncapi.py:_fill": "it writes one document, from its top to its end",
    "services/agent/tensorhub_agent/job_agent.py:JobAgent.__init__": "the names of what it drives",
    "services/agent/tensorhub_agent/job_agent.py:JobAgent._do": "a case for each effect",
    "services/agent/tensorhub_agent/metrics.py:watch": "a line for each figure",
    "services/agent/tensorhub_agent/shelf.py:Shelf.make": "its parameters, and the names of what a manifest keeps",
    "services/agent/tensorhub_agent/transfer.py:Transfer.__init__": "the names of a transfer's state",
    "services/planner/tensorhub_planner/plan.py:plan": "the steps of a plan in their order",
    "services/planner/tensorhub_planner/plan.py:_sort_out": "each reason to leave a holder out has a sentence",
    "simulator/tensorhub_simulator/agent.py:AgentNode._do": "a case for each effect",
    "simulator/tensorhub_simulator/setting.py:draw": "the order of the draws is what a seed means",
}
"""Functions that may be longer, and why."""

LONGER_FILE_LINES_MAX: Final = 450
LONGER_FUNCTION_LINES_MAX: Final = 60
"""Beyond this no reason is good enough."""


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each function of a file, by the names of what it stands in, with its lines."""

    def within(node: ast.AST, name: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                assert child.end_lineno is not None
                yield f"{name}{child.name}", child.end_lineno - child.lineno + 1
            here = f"{name}{child.name}." if isinstance(child, ast.ClassDef | ast.FunctionDef) else name
            yield from within(child, here)

    yield from within(ast.parse(path.read_text()), "")


def beyond(lines: dict[str, int], lines_max: int, longer: dict[str, str], longer_lines_max: int) -> list[str]:
    """Return what is too long, or is named as an exception and not there."""
    found = {
        name: count for name, count in lines.items() if count > (longer_lines_max if name in longer else lines_max)
    }
    return [f"{name} has {count} lines" for name, count in found.items()] + sorted(longer.keys() - lines.keys())


def test_files_are_short() -> None:
    lines = {name_of(path): path.read_text().count("\n") for path in python_files(*WRITTEN)}
    assert len(lines) > 500, "nothing was looked at"
    assert beyond(lines, FILE_LINES_MAX, LONGER_FILES, LONGER_FILE_LINES_MAX) == []


def test_functions_of_what_is_installed_are_short() -> None:
    lines = {
        f"{name_of(path)}:{name}": count for path in python_files(*INSTALLED) for name, count in functions_of(path)
    }
    assert len(lines) > 2000, "nothing was looked at"
    assert beyond(lines, FUNCTION_LINES_MAX, LONGER_FUNCTIONS, LONGER_FUNCTION_LINES_MAX) == []


def test_what_reading_foreign_bytes_raises_has_one_name() -> None:
    """Who names msgspec's own error alone forgets that texts may be no UTF-8, and lists too deep."""
    where = [name_of(path) for path in python_files(*INSTALLED) if "MsgspecError" in path.read_text()]
    assert where == ["libs/common/tensorhub_common/malformed.py"]


def test_what_is_too_long_is_told() -> None:
    longer = {"old": "because", "gone": "because"}
    assert beyond({"new": 3, "old": 3, "short": 2}, 2, longer, 3) == ["new has 3 lines", "gone"]
    assert beyond({"old": 4, "gone": 1}, 2, longer, 3) == ["old has 4 lines"]


def test_the_files_that_begin_first_are_there() -> None:
    assert [file for file in longest_first.FILES if not (ROOT / file).is_file()] == []
    assert len(set(longest_first.FILES)) == len(longest_first.FILES)
