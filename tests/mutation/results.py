"""What mutmut has found, read from the files that it keeps beside the mutants.

Mutmut forgets the results of a function that has changed, so what it keeps is of the code as it stands.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files

ASSERTED = 34
"""What mutmut notes of a mutant that it was told to skip (`typed`): it counts for nothing."""

ALIVE = frozenset({"survived", "no tests", "suspicious", "segfault"})
"""What counts as not noticed: also a mutant that no test reaches, and one whose end says nothing."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A mutant that no test noticed."""

    where: str
    """The function, with its module, as in `tensorhub_common.catalog.handlers.rounds.want`."""
    line: str
    mutant: str
    """The line before and after; several lines are joined."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of all mutants of a module."""

    counts: Counter[str]
    """How many ended so, by mutmut's words."""
    survivors: tuple[Survivor, ...]


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Mutmut looks for everything in the folder that it is called in."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def modules(folder: Path) -> list[str]:
    """Name the modules that pyproject.toml says."""
    with _inside(folder):
        return [module_of(path) for path in sorted(walk_mutatable_files()) if path.read_bytes()]


def outcomes(folder: Path) -> dict[str, Outcome]:
    """Return what became of each module of which all mutants were tested."""
    found: dict[str, Outcome] = {}
    with _inside(folder):
        for path in sorted(walk_mutatable_files()):
            codes = _data(path).exit_code_by_key
            if None not in codes.values():
                counts = Counter(status_by_exit_code[code] for code in codes.values() if code != ASSERTED)
                alive = [_survivor(path, name) for name, code in codes.items() if status_by_exit_code[code] in ALIVE]
                found[module_of(path)] = Outcome(counts, tuple(alive))
    return found


def doubtful(folder: Path) -> list[str]:
    """Name the mutants that were not noticed, and those that ran past their bound: on a busy machine others do too."""
    return _named(folder, lambda code: code is not None and status_by_exit_code[code] in ALIVE | {"timeout"})


def untested(folder: Path) -> list[str]:
    """Name the mutants that have no result yet: new ones, and all of a function that was changed."""
    return _named(folder, lambda code: code is None)


def _named(folder: Path, is_asked: Callable[[int | None], bool]) -> list[str]:
    with _inside(folder):
        paths = sorted(walk_mutatable_files())
        return [name for path in paths for name, code in _data(path).exit_code_by_key.items() if is_asked(code)]


def is_meant(name: str, modules: list[str]) -> bool:
    """Tell whether a module or a mutant is of one of these modules; of any where none is named."""
    return not modules or any(module in name for module in modules)


def _data(path: Path) -> SourceFileMutationData:
    data = SourceFileMutationData(path=path)
    data.load()
    return data


def module_of(path: Path) -> str:
    """Return the name of the module that a path says."""
    return ".".join(path.with_suffix("").parts)


def _survivor(path: Path, name: str) -> Survivor:
    function = name.removeprefix(f"{module_of(path)}.").partition("__mutmut_")[0]
    function = function.removeprefix("x_").removeprefix("x\u01c1").replace("\u01c1", ".")
    lines = get_diff_for_mutant(name, path=path).splitlines()[2:]
    before, after = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in ("-", "+"))
    return Survivor(f"{module_of(path)}.{function}", before, after)
