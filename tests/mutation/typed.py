"""Makes the mutants, in the folder where mutmut works, and marks those that no test has to notice.

Those that mypy refuses, as `make check` does, and those that only take `strict=True` from a zip, which is an assertion.
"""

import bisect
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from mutmut.__main__ import create_mutants
from mutmut.configuration import config
from mutmut.mutation.data import MutantLineSpans, SourceFileMutationData
from mutmut.state import state
from mutmut.stats import load_stats
from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir, walk_mutatable_files
from tests.mutation.results import ASSERTED, is_meant, module_of

REFUSED = 37
"""What mutmut notes of a mutant that a type checker refuses."""

_STRICT = re.compile(r",\s*(strict=(True|False))?\s*\)")

MYPY = (
    # Not as pyproject.toml has it: the copies of a function side by side, and what can't be reached in one, are no
    # errors here. Whether a condition is always true is left to the tests.
    *("--config-file=", "--strict", "--ignore-missing-imports", "--no-warn-unused-ignores", "--no-warn-return-any"),
    *("--disable-error-code", "no-redef", "--output", "json", "--cache-dir", "../.mypy_cache"),
)


def refused_lines(paths: list[Path]) -> dict[Path, list[int]]:
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


def mark(path: Path, lines: list[int]) -> tuple[int, int]:
    """Mark the mutants of a file that have an error, or lack an assertion alone, and say how many do."""
    index = MutantLineSpans.load(path)
    data = SourceFileMutationData(path=path)
    data.load()
    if index is None or not data.exit_code_by_key:
        return 0, 0
    spans = sorted((span.start, span.end, name) for name, span in index.span_by_function_name.items())
    refused = set()
    for line in lines:
        start, end, name = spans[bisect.bisect_right(spans, (line, sys.maxsize, "")) - 1]
        if not start <= line <= end or name.endswith("_orig"):
            raise SystemExit(f"{path}:{line} of the mutated copy has an error of types outside of any mutant")
        refused.add(name)
    text = (Path("mutants") / path).read_text().splitlines()
    asserted = lacks_assertion({name: "\n".join(text[start - 1 : end]) for start, end, name in spans})
    for name in data.exit_code_by_key:
        function = name.rpartition(".")[2]
        if function in refused:
            data.exit_code_by_key[name] = REFUSED
        elif function in asserted:
            data.exit_code_by_key[name] = ASSERTED
    data.save()
    return len(refused), len(asserted - refused)


def lacks_assertion(texts: Mapping[str, str]) -> set[str]:
    """Name the mutants that are their original but for `strict=True`, among the functions of a mutated file."""
    plain = {name: _STRICT.sub(")", text.replace(name, "")) for name, text in texts.items()}
    return {
        name
        for name in texts
        if not name.endswith("_orig") and plain[name] == plain.get(f"{name.rpartition('__mutmut_')[0]}__mutmut_orig")
    }


def forget_if_told_otherwise() -> None:
    """Begin anew when other tests are to be run: mutmut would forget every result by itself, our marks as well."""
    load_stats()
    before = state().old_config_fingerprint
    if before and before != config().config_fingerprint():
        shutil.rmtree("mutants")


def main() -> None:
    forget_if_told_otherwise()
    Path("mutants").mkdir(exist_ok=True)
    copy_src_dir()
    copy_also_copy_files()
    create_mutants(1)
    # Each of the others is checked by the run that is about it.
    paths = [path for path in walk_mutatable_files() if is_meant(module_of(path), sys.argv[1:])]
    lines = refused_lines(paths)
    marked = [mark(path, lines[path]) for path in paths]
    refused, asserted = (sum(counts) for counts in zip(*marked, strict=True))
    print(f"mypy refuses {refused} mutants; {asserted} lack an assertion alone")


if __name__ == "__main__":
    main()
