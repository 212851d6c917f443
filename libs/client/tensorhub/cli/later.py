"""The commands that are present and do little or nothing in this version: `trace`, `bench` and `simulate`."""

import importlib.util
import subprocess
import sys
from typing import Annotated, NoReturn

import typer

from tensorhub.cli import options
from tensorhub_common.errors import NotInThisVersion


def trace(
    transfer: Annotated[str | None, typer.Argument(metavar="TRANSFER", help="A transfer's id.")] = None,  # noqa: ARG001
    job: options.Job = None,  # noqa: ARG001
) -> None:
    """Show how a transfer went: not in this version."""
    _not_yet("trace", "a shard's last_read and 'tensorhub watch --all' tell of transfers")


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
