"""`tensorhub up`: a whole hub on this machine, until Ctrl-C."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tensorhub._control.hub_file import HubFile
from tensorhub.cli import options
from tensorhub.cli.doctor.machine_checks import AGENT_NEEDS, SERVER_NEEDS
from tensorhub.cli.output import line, read_no_further
from tensorhub.cli.runner import Interrupted, job_of, need, run, settings_of
from tensorhub.local.hub import AGENTS_MAX, NATS_NODES, REGISTRIES_MAX, RUNNERS_MAX, LocalHub, LocalRollouts
from tensorhub_common.bus.address import shown
from tensorhub_common.config import settings as settings_module
from tensorhub_common.telemetry import log_output


def up(  # noqa: PLR0917 (typer makes an option of each)
    agents: Annotated[
        int, typer.Option(help="How many agents to run.", parser=options.whole(1, AGENTS_MAX), metavar="N")
    ] = 1,
    hosts: Annotated[
        int,
        typer.Option(help="How many hosts they pretend to be on.", parser=options.whole(1, AGENTS_MAX), metavar="N"),
    ] = 1,
    racks: Annotated[
        int,
        typer.Option(
            help="How many racks those are in; 0: none is known.", parser=options.whole(0, AGENTS_MAX), metavar="N"
        ),
    ] = 0,
    registries: Annotated[
        int, typer.Option(help="How many registries: one leads.", parser=options.whole(1, REGISTRIES_MAX), metavar="N")
    ] = 1,
    nats_nodes: Annotated[
        int,
        typer.Option(
            help="How many NATS nodes: 1, 3 or 5. Each log is on 3.",
            parser=options.whole(1, NATS_NODES[-1]),
            metavar="N",
        ),
    ] = 1,
    runners: Annotated[
        int | None,
        typer.Option(
            help="How many runners, with a rollout manager; 0: the manager alone.",
            parser=options.whole(0, RUNNERS_MAX),
            metavar="K",
            show_default="no manager, unless --runners-max is given",
        ),
    ] = None,
    runners_max: Annotated[
        int | None,
        typer.Option(
            help="Run as many as the manager wishes for: at least --runners, at most M.",
            parser=options.whole(1, RUNNERS_MAX),
            metavar="M",
            show_default="no more than --runners",
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="The runners' engine: torch, or your own as module:function.", metavar="E")
    ] = "torch",
    model: Annotated[
        Path | None, typer.Option(help="The folder of the config.json of the runners' model.", metavar="DIR")
    ] = None,
    directory: options.Directory = None,
    job: options.Job = None,
) -> None:
    """Run a whole hub on this machine: NATS, registries, planner and agents, with --runners also rollouts.

    Ctrl-C stops all.
    """
    if nats_nodes not in NATS_NODES:
        raise typer.BadParameter(f"{nats_nodes} nodes are not possible: take 1, 3 or 5", param_hint="--nats-nodes")
    if hosts > agents:
        raise typer.BadParameter(f"{hosts} hosts need as many agents; there are {agents}", param_hint="--hosts")
    if racks > hosts:
        raise typer.BadParameter(f"{racks} racks need as many hosts; there are {hosts}", param_hint="--racks")
    settings = settings_of(directory)
    name = job_of(job, settings)
    # It stays, so what becomes of its processes is worth a line.
    log_output.start_logs("tensorhub", "up", settings)
    hub = LocalHub(
        settings.dir.absolute(),
        agents,
        hosts,
        racks=racks,
        registries=registries,
        nats_nodes=nats_nodes,
        site=settings.site,
        rollouts=_rollouts(runners, runners_max, engine, model, name),
    )
    need("a hub", *SERVER_NEEDS, extra="server")
    need("an agent", *AGENT_NEEDS, *(("ucxx",) if hosts > 1 and settings.ucxx else ()), extra="agent")
    number = run(hub.run(lambda file: say_ready(file, settings.dir, name)))
    raise Interrupted(number)


def _rollouts(
    runners: int | None, runners_max: int | None, engine: str, model: Path | None, job: str
) -> LocalRollouts | None:
    if runners is None and runners_max is None:
        return None
    least = runners or 0
    most = least if runners_max is None else runners_max
    if most < least:
        raise typer.BadParameter(f"{most} are fewer than the {least} of --runners", param_hint="--runners-max")
    if most and engine == "torch" and model is None:
        raise typer.BadParameter(
            "runners of torch need a model: name the folder of its config.json, as in --model ./my-model",
            param_hint="--model",
        )
    if model is not None and not (model / "config.json").is_file():
        raise typer.BadParameter(f"there is no config.json in {model}", param_hint="--model")
    return LocalRollouts(least, engine, model, job, runners_max=most)


def say_ready(hub: HubFile, directory: Path, job: str) -> None:
    """Say how to connect, with what this hub and this shell make necessary and no more."""
    try:
        for each in _ready(hub, directory, job):
            line(each)
    except BrokenPipeError:
        # It has been read as far as somebody cared, and the hub is for others.
        read_no_further()


def _ready(hub: HubFile, directory: Path, job: str) -> Iterator[str]:
    arguments = "" if job == "default" else f'"{job}"'
    hosts = len({agent.host for agent in hub.agents})
    registries = f", {len(hub.registries)} registries" if len(hub.registries) > 1 else ""
    agents = f"{len(hub.agents)} agent(s) on {hosts} host(s)"
    yield (f"a hub is up in {directory}: {agents}{registries}, NATS at {shown(hub.nats_all)}")
    if directory != Path(settings_module.VARIABLES["TENSORHUB_DIR"].default):
        yield (f"  export TENSORHUB_DIR={shlex.quote(str(directory.absolute()))}")
    yield ("connect to it:")
    yield ("  import tensorhub, torch")
    yield (f"  hub = tensorhub.connect({arguments})")
    yield ('  hub.register("policy", {"w": torch.ones(4, 4)}, replica="trainer").publish(version=1)')
    yield ('  engine = hub.register("policy", {"w": torch.zeros(4, 4)}, replica="rollout-0")')
    yield ('  print(engine.replicate("latest"), engine.tensors["w"])')
    yield ("Ctrl-C stops it")
