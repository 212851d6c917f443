"""Mutation testing: small changes to the code, one at a time, and whether any test notices. `make mutants` runs it.

    python -m tests.mutation.run                      every module that pyproject.toml names
    python -m tests.mutation.run handlers.rounds      only modules whose name has this in it
    python -m tests.mutation.run --again              only mutants that survived, after tests were added, or hung
    python -m tests.mutation.run --report             no mutant: say again what is known

mutmut works in .mutants, where the packages stand side by side.

Always true: the exit status is 0 only if every survivor of a module that was tested is explained in survivors.toml and
no explanation is of a mutant that was noticed.
"""

import argparse
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.mutation.results import ALIVE, doubtful, is_meant, modules, outcomes, untested
from tests.mutation.survivors import explanations, judged

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".mutants"
EXPLAINED = Path(__file__).with_name("survivors.toml")
BESIDE = (
    "docs",
    "libs/common/tensorhub_common",
    "pyproject.toml",
    "services/agent/tensorhub_agent",
    "services/planner/tensorhub_planner",
    "tests",
    "tools",
)
"""What stands side by side in .mutants."""

PROCESSES = 1
"""So many mutants are tested at once: one that hangs is told by its time, and shouldn't be taken for one that waits."""

MEMORY_BYTES_MAX = 4 * 1024**3
"""A mutant's process has at most this much memory of its own. A loop without end that gathers would else take all of
the machine's before its time is over; so its test fails with a MemoryError."""


def lay_out() -> None:
    WORK.mkdir(exist_ok=True)
    for path in BESIDE:
        link = WORK / Path(path).name
        if not link.is_symlink():
            link.symlink_to(Path("..") / path)


def in_work(*command: str) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    subprocess.run(command, cwd=WORK, env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}, check=True)


def mutate(names: list[str]) -> None:
    if names:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
        in_work("mutmut", "run", "--max-children", str(PROCESSES), *names)


def main() -> int:
    """Do what the arguments say; 0 when nothing is left to explain."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run", description="Mutation testing.")
    parser.add_argument("modules", nargs="*", help="parts of modules' names, as in 'handlers.rounds' (default: all)")
    parser.add_argument(
        "--again", action="store_true", help="test only those that survived, after tests were added, or hung"
    )
    parser.add_argument("--report", action="store_true", help="test none: say again what is known")
    asked = parser.parse_args()
    lay_out()
    for part in asked.modules:
        if not any(part in module for module in modules(WORK)):
            parser.error(f"no module that pyproject.toml names has '{part}' in its name")
    if asked.again:
        mutate([name for name in doubtful(WORK) if is_meant(name, asked.modules)])
    elif not asked.report:
        in_work(sys.executable, "-m", "tests.mutation.typed", *asked.modules)
        mutate([name for name in untested(WORK) if is_meant(name, asked.modules)])
    return report()


def report() -> int:
    """Say what became of the mutants; 0 when nothing is left to explain."""
    tested = outcomes(WORK)
    for module, outcome in tested.items():
        print(module, *(f"{status} {count}" for status, count in sorted(outcome.counts.items())), sep=", ")
    total = sum((outcome.counts for outcome in tested.values()), Counter[str]())
    print(f"{total.total()} mutants of {len(tested)} modules: {sum(total[each] for each in ALIVE)} survived")
    verdict = judged(tested, modules(WORK), explanations(EXPLAINED.read_text()))
    for survivor in verdict.unexplained:
        print(f"not explained: {survivor.where}: '{survivor.line}' as '{survivor.mutant}'")
    for explanation in verdict.stale:
        print(f"no such survivor: {explanation.where}: {explanation.line}")
    return 1 if verdict.unexplained or verdict.stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
