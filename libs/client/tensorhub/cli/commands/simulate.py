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
SEEDS_MAX = 1000


def simulate(
    *,
    scenarios: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[rollout] [SCENARIO]...",
            help="A YAML file, or standalone, elastic, across; by default these three. After the word rollout: a YAML "
            "file of a job of rollouts, rlboost-8b, streamrl-7b or another of ours; by default all of ours.",
        ),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Neither other sizes nor other assumptions.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw when GPUs stand still, and how full links are, or what a job did, into this SVG file."),
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option(help="After rollout: this system alone; may be given several times.", metavar="NAME"),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="After rollout: how many seeds, from the file's on.", parser=options.whole(1, SEEDS_MAX), metavar="N"
        ),
    ] = None,
    allocate: Annotated[
        bool,
        typer.Option("--allocate", help="After rollout: how many instances are to generate and how many to train."),
    ] = False,
    tails: Annotated[
        bool, typer.Option("--tails", help="After rollout: also when the responses of a step are whole.")
    ] = False,
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
    if not is_rollout and (system or seeds is not None or allocate or tails):
        raise typer.BadParameter("--system, --seeds, --allocate and --tails are for rollouts: say simulate rollout")
    command = [sys.executable, "-m", "tensorhub_launcher.become", ROLLOUT_MODULE if is_rollout else MODULE]
    command += ["--alone"] if alone else []
    command += ["--json"] if json else []
    command += ["--picture", str(picture)] if picture is not None else []
    command += ["--processes", str(processes)] if processes is not None else []
    command += [f"--system={each}" for each in system or ()]
    command += ["--seeds", str(seeds)] if seeds is not None else []
    command += ["--allocate"] if allocate else []
    command += ["--tails"] if tails else []
    # Between the two programs Ctrl-C waits for the one that comes: no instruction is without a handler.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.execv(sys.executable, [*command, "--", *names[is_rollout:]])  # noqa: S606 (no shell is wanted)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
