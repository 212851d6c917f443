"""Makes the mutants, and marks those that mypy refuses: `make check` refuses them too, so no test has to.

Mutmut can do so itself, and parses each of its huge files for that: here its own index says where each mutant stands.
Runs in the folder where mutmut works, in a process of its own.
"""

import bisect
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from mutmut.__main__ import create_mutants
from mutmut.configuration import config
from mutmut.mutation.data import MutantLineSpans, SourceFileMutationData
from mutmut.state import state
from mutmut.stats import load_stats
from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir, walk_mutatable_files

REFUSED = 37
"""What mutmut notes of a mutant that a type checker refuses."""

MYPY = (
    # Not as pyproject.toml has it: the copies of a function side by side, and what can't be reached in one, are no
    # errors here. Whether a condition is always true is left to the tests.
    *("--config-file=", "--strict", "--ignore-missing-imports", "--no-warn-unused-ignores", "--no-warn-return-any"),
    *("--disable-error-code", "no-redef", "--output", "json", "--cache-dir", "../.mypy_cache"),
)


def refused_lines(paths: list[Path]) -> dict[Path, list[int]]:
    """Return the lines with errors of each file."""
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *MYPY, *map(str, paths)],
        cwd="mutants",
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[Path, list[int]] = defaultdict(list)
    for error in map(json.loads, checked.stdout.splitlines()):
        if error["severity"] == "error":
            found[Path(error["file"])].append(error["line"])
    if checked.returncode not in (0, 1):
        raise SystemExit(f"mypy could not check the mutants: {checked.stderr or checked.stdout}")
    return found


def mark(path: Path, lines: list[int]) -> int:
    """Mark the mutants of a file that have an error, and say how many have."""
    index = MutantLineSpans.load(path)
    data = SourceFileMutationData(path=path)
    data.load()
    if index is None or not data.exit_code_by_key:
        return 0
    spans = sorted((span.start, span.end, name) for name, span in index.span_by_function_name.items())
    refused = set()
    for line in lines:
        start, end, name = spans[bisect.bisect_right(spans, (line, sys.maxsize, "")) - 1]
        if not start <= line <= end or name.endswith("_orig"):
            raise SystemExit(f"{path}:{line} of the mutated copy has an error of types outside of any mutant")
        refused.add(name)
    for name in data.exit_code_by_key:
        if name.rpartition(".")[2] in refused:
            data.exit_code_by_key[name] = REFUSED
    data.save()
    return len(refused)


def forget_if_told_otherwise() -> None:
    """Begin anew when other tests are to be run: mutmut would forget every result by itself, our marks as well."""
    load_stats()
    before = state().old_config_fingerprint
    if before and before != config().config_fingerprint():
        shutil.rmtree("mutants")


def main() -> None:
    """Make the mutants and mark them."""
    forget_if_told_otherwise()
    Path("mutants").mkdir(exist_ok=True)
    copy_src_dir()
    copy_also_copy_files()
    create_mutants(1)
    paths = list(walk_mutatable_files())
    refused = refused_lines(paths)
    print(f"mypy refuses {sum(mark(path, refused[path]) for path in paths)} mutants")


if __name__ == "__main__":
    main()
