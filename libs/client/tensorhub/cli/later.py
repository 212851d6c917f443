"""The commands that are present and do little or nothing in this version: `bench` and `simulate`."""

import importlib.util
import subprocess
import sys
from typing import NoReturn

import typer

from tensorhub.cli import options
from tensorhub_common.errors import NotInThisVersion


def bench(job: options.Job = None) -> None:  # noqa: ARG001
    """Measure this machine against its limits, from a checkout."""
    if importlib.util.find_spec("benchmarks") is None or importlib.util.find_spec("benchmarks.__main__") is None:
        _not_yet("bench", "run 'make bench' in a checkout")
    if subprocess.run([sys.executable, "-m", "benchmarks"], check=False).returncode:
        raise typer.Exit(1)


def simulate(job: options.Job = None) -> None:  # noqa: ARG001
    """Simulate a hub of many machines: not in this version."""
    _not_yet("simulate", "run 'make sim' in a checkout")


def _not_yet(command: str, instead: str) -> NoReturn:
    raise NotInThisVersion(f"{command} is not in this version of TensorHub: {instead}")
