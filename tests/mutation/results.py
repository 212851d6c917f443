"""What mutmut has found, read from the files that it keeps beside the mutants."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files

ALIVE = frozenset({"survived", "no tests", "suspicious", "segfault"})
"""What counts as not noticed: also a mutant that no test reaches, and one whose end says nothing."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A mutant that no test noticed."""

    name: str
    where: str
    """The function, with its module, as in `tensorhub_common.catalog.rounds.want`."""
    line: str
    mutant: str
    """The line before and after; several lines are joined."""


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Mutmut looks for everything in the folder that it is called in."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def read(folder: Path) -> dict[str, Counter[str]]:
    """Count the mutants of each module by what became of them."""
    found: dict[str, Counter[str]] = {}
    with _inside(folder):
        for path in sorted(walk_mutatable_files()):
            codes = _data(path).exit_code_by_key.values()
            if codes:
                found[_module(path)] = Counter(status_by_exit_code[code] for code in codes)
    return found


def survivors(folder: Path) -> list[Survivor]:
    """Return every mutant that was not noticed."""
    found: list[Survivor] = []
    with _inside(folder):
        for path in sorted(walk_mutatable_files()):
            for name, code in _data(path).exit_code_by_key.items():
                if code is not None and status_by_exit_code[code] in ALIVE:
                    found.append(_survivor(path, name))
    return found


def untested(folder: Path) -> list[str]:
    """Name the mutants that have no result yet: new ones, and all of a function that was changed."""
    with _inside(folder):
        return [
            name
            for path in sorted(walk_mutatable_files())
            for name, code in _data(path).exit_code_by_key.items()
            if code is None
        ]


def _data(path: Path) -> SourceFileMutationData:
    data = SourceFileMutationData(path=path)
    data.load()
    return data


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts)


def _survivor(path: Path, name: str) -> Survivor:
    function = name.removeprefix(f"{_module(path)}.").partition("__mutmut_")[0]
    function = function.removeprefix("x_").removeprefix("x\u01c1").replace("\u01c1", ".")
    lines = get_diff_for_mutant(name, path=path).splitlines()[2:]
    before, after = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in ("-", "+"))
    return Survivor(name, f"{_module(path)}.{function}", before, after)
