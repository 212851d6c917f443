"""`python -m tools.gpu [--wheels FOLDER] [--report FILE]`: tests, compute-sanitizer and benchmarks on a GPU.

It needs neither make nor a network: with `--wheels` it installs what a folder of wheels holds beside the packages that
are there. Every step has a bound, goes on after a failed one, and ends in one report.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = (
    "libs/common",
    "libs/client",
    "services/registry",
    "services/rollout",
    "services/runner",
    "services/planner",
    "services/agent",
    "simulator",
)
TESTS_S: Final = 330
SANITIZER_S: Final = 90
BENCHMARKS_S: Final = 150
SHOWN_CHARS: Final = 4000


class Outcome(NamedTuple):
    """How one step ended."""

    step: str
    command: str
    ended: str
    seconds: float
    output: str

    @property
    def is_good(self) -> bool:
        """Whether it did what it was to do."""
        return self.ended == "ok"


def main() -> None:
    """Run all steps and write the report; exit with 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install first, as in --wheels wheels/")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.md"), help="where the report goes")
    options = parser.parse_args()
    environment = _environment(options.wheels)
    figures = Path(tempfile.mkdtemp(prefix="tensorhub-gpu-")) / "figures.md"
    python = sys.executable
    # Our configuration turns warnings into errors; those of other releases of torch and cupy are not ours.
    tests = (python, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu")
    steps: list[tuple[str, tuple[str, ...], int]] = [
        ("the machine", ("nvidia-smi",), 30),
        ("tests", tests, TESTS_S),
        *(
            (f"compute-sanitizer, {tool}", _sanitized(tool, python), SANITIZER_S)
            for tool in ("memcheck", "racecheck", "initcheck")
        ),
        ("benchmarks", (python, "-m", "benchmarks.gpu", "--report", str(figures)), BENCHMARKS_S),
    ]
    outcomes = [_run(name, command, bound_s, environment) for name, command, bound_s in steps]
    options.report.write_text(_report(outcomes, figures.read_text() if figures.exists() else ""))
    print(f"the report is in {options.report}")
    sys.exit(0 if all(each.is_good for each in outcomes) else 1)


def _environment(wheels: Path | None) -> dict[str, str]:
    """Return the environment of all steps, with the packages of this checkout, and those of a folder of wheels."""
    paths, programs = [str(ROOT), *(str(ROOT / each) for each in PACKAGES)], []
    if wheels is not None:
        site = tempfile.mkdtemp(prefix="tensorhub-site-")
        pip = (
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--target",
            site,
        )
        subprocess.run((*pip, *map(str, sorted(wheels.glob("*.whl")))), check=True)
        paths.insert(0, site)
        programs.append(f"{site}/bin")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": os.pathsep.join([*programs, os.environ["PATH"]]),
        "PYTHONUNBUFFERED": "1",
    }


def _sanitized(tool: str, python: str) -> tuple[str, ...]:
    return ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", python, "-m", "tools.gpu.kernels")


def _run(step: str, command: tuple[str, ...], bound_s: int, environment: dict[str, str]) -> Outcome:
    """Run a step to its end or its bound; show its output as it comes."""
    print(f"== {step}: {' '.join(command)}", flush=True)
    began = time.perf_counter()
    if shutil.which(command[0], path=environment["PATH"]) is None:
        return Outcome(step, " ".join(command), f"left out: there is no {command[0]} here", 0.0, "")
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=bound_s,
                check=False,
            )
            ended = "ok" if done.returncode == 0 else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"not done within {bound_s} s"
        output.seek(0)
        said = output.read()
    if step == "tests" and ended == "ok" and " passed" not in said:
        ended = "no test ran"
    print(said[-SHOWN_CHARS:], f"== {step}: {ended}", flush=True)
    return Outcome(step, " ".join(command), ended, time.perf_counter() - began, said)


def _report(outcomes: list[Outcome], figures: str) -> str:
    lines = [
        f"Run on {datetime.now(UTC):%Y-%m-%d} by `python -m tools.gpu`.",
        "",
        "| step | ended | seconds |",
        "|---|---|---|",
        *(f"| {each.step} | {each.ended} | {each.seconds:.0f} |" for each in outcomes),
        "",
        figures,
    ]
    for each in outcomes:
        if each.step != "benchmarks" or not each.is_good:
            last = each.output.strip()[-SHOWN_CHARS:]
            lines += [f"## {each.step[0].upper()}{each.step[1:]}", "", "```", f"$ {each.command}", last, "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
