"""Leaves out what starts threads, sockets or processes, for `make mutants`: it is slow a thousand times over.

A file of tests is left out where it imports something of `OUTSIDE`, itself or through other modules of tests, that is
neither pure by the contract in pyproject.toml nor mutated. So the rule names no file of tests.
"""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
OUTSIDE: Final = (
    "subprocess",
    "tensorhub",
    "tensorhub_agent.app",
    "tensorhub_agent.storage",
    "tensorhub_agent.transports",
    "tensorhub_common.auth",
    "tensorhub_common.bus.connection",
    "tensorhub_common.config",
    "tensorhub_common.jetstream",
    "tensorhub_common.observability",
    "tensorhub_common.runtime.framed_socket",
    "tensorhub_common.service",
    "tensorhub_common.telemetry",
    "tensorhub_simulator.faultsim.mutants",
    "tensorhub_simulator.performance",
    "threading",
)
"""What works with threads, sockets, processes or much memory, and whole simulated runs, of seconds each."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out a file of tests that is not for mutants."""
    return True if collection_path.suffix == ".py" and goes_outside(collection_path) else None


def goes_outside(test: Path) -> set[str]:
    """Return what a file of tests imports that is of `OUTSIDE`."""
    return {module for module in imports(test.resolve()) if within(module, OUTSIDE) and not within(module, allowed())}


def imports(test: Path) -> set[str]:
    """Return the names that a file imports, and those that the modules of tests import which it does."""
    found: set[str] = set()
    left = [test]
    while left:
        direct = set(_imported(left.pop())) - found
        found |= direct
        for name in direct:
            parts = name.split(".")
            paths = (ROOT.joinpath(*each).with_suffix(".py") for each in (parts, parts[:-1]))
            left += [path for path in paths if parts[0] == "tests" and path.is_file()]
    return found


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def allowed() -> tuple[str, ...]:
    """Return the packages and modules that a test for mutants may import."""
    config: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    pure = next(each for each in config["importlinter"]["contracts"] if each.get("id") == "pure")
    mutated = (
        path.removesuffix(".py").removesuffix("/*").replace("/", ".") for path in config["mutmut"]["only_mutate"]
    )
    return (*pure["source_modules"], *mutated)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
