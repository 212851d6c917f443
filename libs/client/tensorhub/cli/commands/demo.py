"""`tensorhub demo`: a model learns, engines generate with what it has learnt so far; every byte is checked."""

import importlib
import importlib.util
import logging
from pathlib import Path
from typing import Annotated, Final

import typer

from tensorhub.cli import options
from tensorhub.cli.doctor.machine_checks import AGENT_NEEDS, SERVER_NEEDS
from tensorhub.cli.runner import need, print_error, run
from tensorhub_common.errors import NotInThisVersion

SECONDS_MAX: Final = 24 * 3600.0

HOSTS_MAX: Final = 5
"""As many as its agents: the trainer's, and those of the rollouts."""


def demo(
    *,
    seconds: Annotated[
        float, typer.Option(help="Train for at least so long.", parser=options.seconds(SECONDS_MAX), metavar="S")
    ] = 0,
    hosts: Annotated[
        int,
        typer.Option(
            help="How many hosts the agents pretend to stand on.", parser=options.whole(1, HOSTS_MAX), metavar="N"
        ),
    ] = 1,
    json: options.Json = False,
    attach: Annotated[
        list[Path] | None,
        typer.Option(metavar="SOCKET", help="Use a hub that runs, at this agent (again: at several); nobody dies."),
    ] = None,
    job: options.Job = None,
) -> None:
    """Show a training run with its engines, in a hub of its own on this machine."""
    if importlib.util.find_spec("tensorhub.demo.run") is None:
        raise NotInThisVersion("demo is not in this version of TensorHub: see examples/ for programs to copy from")
    if job is not None:
        print_error("the demo has its own job, in a hub of its own as in one that it is attached to")
    if attach and hosts != 1:
        raise typer.BadParameter("the agents that it is attached to have their hosts already", param_hint="--hosts")
    for path in attach or ():
        if not path.is_socket():
            raise typer.BadParameter(
                f"{path} is no agent's socket; hub.json names those of a hub", param_hint="--attach"
            )
    hub_needs = () if attach else dict.fromkeys([*AGENT_NEEDS, *SERVER_NEEDS])
    need("the demo", "torch", "transformers", *hub_needs, extra="demo")
    # The demo itself says that a process was killed.
    logging.getLogger("tensorhub").setLevel(logging.ERROR)
    # Its name is looked up only now: it imports much, and other commands do without.
    run_demo = importlib.import_module("tensorhub.demo.run").run_demo
    code = run(run_demo(seconds=seconds, hosts=hosts, json=json, attach=attach or []))
    if code:
        raise typer.Exit(code)
