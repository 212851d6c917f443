"""`tensorhub simulate`: the planner and transfers as they are, on a modelled cluster of thousands of GPUs.

The simulator drives the services' cores, which this package doesn't import: this process becomes the simulator's, so
that its exit code is that one's, and a signal reaches just that one.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from tensorhub.cli import options
from tensorhub.cli.runner import need

MODULE = "tensorhub_simulator.performance"
ROLLOUT_MODULE = "tensorhub_simulator.rollout_performance"
"""With `rollout` as the first word."""

PROCESSES_MAX = 1024


def simulate(
    *,
    scenarios: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[rollout] [SCENARIO]...",
            help="A YAML file, or standalone, elastic, across; by default these three. After the word rollout: a YAML "
            "file of a job of rollouts, or rlboost-8b.",
        ),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Neither other sizes nor other assumptions.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw when GPUs stand still, and how full links are, into this SVG file.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            help="How many runs at once; by default one for each core.",
            parser=options.whole(1, PROCESSES_MAX),
            metavar="N",
        ),
    ] = None,
    json: options.Json = False,
    job: options.Job = None,  # noqa: ARG001 (every command has it)
) -> None:
    """Say how long updates take on a cluster that is described, and what others would take."""
    if picture is not None and picture.exists() and not picture.is_file():
        # What is there would be written into, and the picture seen nowhere.
        raise typer.BadParameter(f"{picture} is no regular file; give the name of one", param_hint="--picture")
    need("simulate", "yaml", "xxhash", extra="simulate")
    names = scenarios or []
    is_rollout = names[:1] == ["rollout"]
    if is_rollout and (alone or picture is not None or processes is not None):
        raise typer.BadParameter("--alone, --picture and --processes are for clusters, and not for rollouts")
    command = [sys.executable, "-m", "tensorhub_launcher.become", ROLLOUT_MODULE if is_rollout else MODULE]
    command += ["--alone"] if alone else []
    command += ["--json"] if json else []
    command += ["--picture", str(picture)] if picture is not None else []
    command += ["--processes", str(processes)] if processes is not None else []
    # Between the two programs Ctrl-C waits for the one that comes: no instruction is without a handler.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.execv(sys.executable, [*command, "--", *names[is_rollout:]])  # noqa: S606 (no shell is wanted)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
