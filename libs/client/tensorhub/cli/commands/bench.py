"""`tensorhub bench`: runs the benchmarks of a checkout, and says where they are where there is none."""

import importlib.util
import subprocess
import sys

import typer

from tensorhub.cli import options
from tensorhub.cli.doctor.machine_checks import AGENT_NEEDS, SERVER_NEEDS
from tensorhub.cli.runner import need
from tensorhub_common.errors import NotInThisVersion


def bench(job: options.Job = None) -> None:  # noqa: ARG001
    """Measure this machine against its limits, from a checkout."""
    if importlib.util.find_spec("benchmarks") is None or importlib.util.find_spec("benchmarks.__main__") is None:
        raise NotInThisVersion("bench is not in this version of TensorHub: run 'make bench' in a checkout")
    need("bench", *dict.fromkeys([*AGENT_NEEDS, *SERVER_NEEDS, "torch"]), extra="agent,server,torch")
    if subprocess.run([sys.executable, "-m", "benchmarks"], check=False).returncode:
        raise typer.Exit(1)
