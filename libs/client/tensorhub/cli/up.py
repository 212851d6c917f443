"""`tensorhub up`: a whole hub on this machine, until Ctrl-C."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tensorhub.cli import options
from tensorhub.cli.output import line
from tensorhub.cli.running import job_of, run, settings_of
from tensorhub.up.hub_file import HubFile
from tensorhub.up.up import AGENTS_MAX, NATS_NODES, REGISTRIES_MAX, Up
from tensorhub_common import settings as settings_module
from tensorhub_common import telemetry
from tensorhub_common.bus.address import shown


def up(
    agents: Annotated[int, typer.Option(help="How many agents to run.", min=1, max=AGENTS_MAX)] = 1,
    hosts: Annotated[int, typer.Option(help="How many hosts they pretend to be on.", min=1, max=AGENTS_MAX)] = 1,
    racks: Annotated[int, typer.Option(help="How many racks those stand in; 0: none is known.", min=0)] = 0,
    registries: Annotated[int, typer.Option(help="How many registries: one leads.", min=1, max=REGISTRIES_MAX)] = 1,
    nats_nodes: Annotated[int, typer.Option(help="How many NATS nodes: 1, 3 or 5. Each log stands on 3.")] = 1,
    directory: options.Directory = None,
    job: options.Job = None,
) -> None:
    """Run a whole hub on this machine: NATS, registries, planner and agents. Ctrl-C stops all."""
    if nats_nodes not in NATS_NODES:
        raise typer.BadParameter(f"{nats_nodes} nodes are not possible: take 1, 3 or 5", param_hint="--nats-nodes")
    if hosts > agents:
        raise typer.BadParameter(f"{hosts} hosts need as many agents; there are {agents}", param_hint="--hosts")
    if racks > hosts:
        raise typer.BadParameter(f"{racks} racks need as many hosts; there are {hosts}", param_hint="--racks")
    settings = settings_of(directory)
    name = job_of(job, settings)
    # It stays, so what becomes of its processes is worth a line.
    telemetry.start_logs("tensorhub", "up", settings)
    hub = Up(
        settings.dir.absolute(),
        agents,
        hosts,
        racks=racks,
        registries=registries,
        nats_nodes=nats_nodes,
        site=settings.site,
    )
    run(hub.run(lambda file: say_ready(file, settings.dir, name)))


def say_ready(hub: HubFile, directory: Path, job: str) -> None:
    """Say how to connect, with what this hub and this shell make necessary and no more."""
    arguments = "" if job == "default" else f'"{job}"'
    hosts = len({agent.host for agent in hub.agents})
    registries = f", {len(hub.registries)} registries" if len(hub.registries) > 1 else ""
    agents = f"{len(hub.agents)} agent(s) on {hosts} host(s)"
    line(f"a hub is up in {directory}: {agents}{registries}, NATS at {shown(hub.nats_all)}")
    if directory != Path(settings_module.VARIABLES["TENSORHUB_DIR"].default):
        line(f"  export TENSORHUB_DIR={shlex.quote(str(directory.absolute()))}")
    line("connect to it:")
    line("  import tensorhub, torch")
    line(f"  hub = tensorhub.connect({arguments})")
    line('  hub.register("policy", {"w": torch.ones(4, 4)}, replica="trainer").publish(version=1)')
    line('  engine = hub.register("policy", {"w": torch.zeros(4, 4)}, replica="rollout-0")')
    line('  print(engine.replicate("latest"), engine.tensors["w"])')
    line("Ctrl-C stops it")
