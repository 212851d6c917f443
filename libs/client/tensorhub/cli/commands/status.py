"""`tensorhub status`: a job in short, with its agents, models and replicas, what is being read, and what is wrong."""

import math
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from rich.text import Text

from tensorhub._control.discovery import read_hub_file
from tensorhub._control.hub_file import HubFile
from tensorhub._control.registry_client import RegistryClient
from tensorhub.cli import options
from tensorhub.cli.hub_state import AGENT, PLANNER, HubState, ReadRow, collect
from tensorhub.cli.output import json_line, line, paragraph, size, table
from tensorhub.cli.runner import CommandDeadline, registry_in, run, settings_of
from tensorhub_common.protocol.queries import AgentInfo, ReplicaInfo

NAMES_SHOWN: Final = 4
"""Of a replica's agents and a read's sources; `--json` has them all."""

READS_SHOWN: Final = 20
BAR_CHARS: Final = 10
STYLES: Final = {"live": "green", "silent": "bold red", "lost": "red", "draining": "yellow", "may stop": "yellow"}


def status(
    *,
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 5,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Show a job's agents, models and replicas, the reads under way, and what is wrong."""
    settings = settings_of(directory)
    registry = registry_in(settings, job, nats)
    hub = read_hub_file(settings.dir)
    own = hub if hub is not None and hub.is_at(registry.address.url) else None
    picture = run(_ask(registry, own, settings.planner_id, CommandDeadline(timeout)))
    if json:
        json_line(picture)
    else:
        _show(picture)


async def _ask(registry: RegistryClient, hub: HubFile | None, planner: str, bound: CommandDeadline) -> HubState:
    async with registry, bound.held():
        return await collect(registry, hub, planner, bound.left_s("asking the registry"))


# ---------------------------------------------------------------------------------------------------------- showing


def _show(picture: HubState) -> None:
    for text in _heading(picture):
        line(text)
    if picture.agents:
        line("")
        _show_agents(picture)
    if picture.replicas:
        line("")
        last = {model.model: model.last for model in picture.models}
        table(
            ("MODEL", "LAST", "REPLICA", "HOLDS", "SHARDS", "AGENTS"),
            ((r.model, last.get(r.model), _name(r), r.version, r.shards, _agents(r)) for r in picture.replicas),
            right=("LAST", "HOLDS", "SHARDS"),
        )
    _show_reads(picture)
    if picture.troubles:
        line("")
    for trouble in picture.troubles:
        paragraph(f"! {trouble}", style="yellow")


def _heading(picture: HubState) -> Iterator[str]:
    if picture.seq:
        yield f"job {picture.job} at entry {picture.seq} and level {picture.level}, led by {picture.registry}"
    else:
        yield f"job {picture.job} is not there yet: its first connect() or 'tensorhub publish' makes it"
    nats = picture.nats
    told = [f"NATS {nats.server} at {nats.url} answers in {1e3 * nats.round_trip_s:.1f} ms"]
    yield "; ".join([*told, _planners(picture)])


def _planners(picture: HubState) -> str:
    if not picture.processes:
        # The users of an older release, which the hub makes anew when it is started again.
        return "NATS lets nobody ask its processes what they do: make its users anew ('tensorhub credentials')"
    planners = [each for each in picture.processes if each.role == PLANNER]
    answering = [each.process for each in planners if each.answers]
    if answering:
        return f"{', '.join(answering)} {'answer' if len(answering) > 1 else 'answers'}"
    return "no planner answers"


def _show_agents(picture: HubState) -> None:
    silent = {each.process for each in picture.processes if each.role == AGENT and not each.answers}
    reads = [reading.agent for reading in picture.reads]
    rows = (
        (a.agent, a.host, a.rack, a.site, _state(a, silent), a.shards, reads.count(a.agent) or None)
        for a in picture.agents
    )
    head = ("AGENT", "HOST", "RACK", "SITE", "STATE", "SHARDS", "READS")
    table(head, rows, right=("SHARDS", "READS"), optional=("RACK", "READS"))


def _state(agent: AgentInfo, silent: set[str]) -> Text:
    state = "live"
    if not agent.live:
        state = "lost"
    elif agent.agent in silent:
        state = "silent"
    elif agent.draining:
        state = "may stop" if agent.may_stop else "draining"
    return Text(state, style=STYLES[state])


def _name(replica: ReplicaInfo) -> str:
    marks = [mark for mark, is_so in (("spot", replica.spot), ("mapped", replica.mapped)) if is_so]
    return f"{replica.replica} ({', '.join(marks)})" if marks else replica.replica


def _agents(replica: ReplicaInfo) -> str:
    return _few(shard.agent if shard.live else f"{shard.agent} (lost)" for shard in replica.members)


def _few(names: Iterable[str]) -> str:
    each = list(dict.fromkeys(names))
    more = len(each) - NAMES_SHOWN
    return ", ".join(each) if more <= 1 else f"{', '.join(each[:NAMES_SHOWN])} and {more} more"


def _show_reads(picture: HubState) -> None:
    """Show the reads that have a version, and in a line those that wait for one: an engine may do so for hours."""
    going = [reading for reading in picture.reads if reading.read.version is not None]
    waiting = [reading for reading in picture.reads if reading.read.version is None]
    if going:
        line("")
        head = ("READING", "SHARD", "VERSION", "STAGE", "DONE", "BYTES", "GB/S", "FOR", "FROM")
        table(
            head,
            (_read(reading) for reading in going[:READS_SHOWN]),
            right=("SHARD", "VERSION", "BYTES", "GB/S", "FOR"),
        )
    more = len(going) - READS_SHOWN
    if more > 0 or picture.reads_left_out:
        line(f"and {max(more, 0) + picture.reads_left_out} more reads")
    if waiting:
        line("")
        line(f"waiting for a version: {_few(f'{each.read.model}/{each.read.replica}' for each in waiting)}")


def _read(reading: ReadRow) -> tuple[object, ...]:
    read = reading.read
    rate = f"{read.bytes_per_s / 1e9:.2f}" if read.bytes_per_s else None
    sources = _few(f"{source.agent} ({source.transport})" for source in read.sources)
    return (
        f"{read.model}/{read.replica}",
        read.shard,
        read.version,
        read.stage,
        _bar(reading.share),
        size(read.total_bytes),
        rate,
        f"{read.for_s:.1f} s",
        sources,
    )


def _bar(share: float) -> Text:
    # What is not all there is not told as all.
    text = Text(f"{math.floor(100 * share):3d} %")
    if not sys.stdout.isatty():
        return text
    full = math.floor(share * BAR_CHARS)
    return text.append(" ").append("█" * full, style="cyan").append("░" * (BAR_CHARS - full), style="dim")
