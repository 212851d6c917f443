"""`tensorhub status`: a job in short, with its agents, models and replicas."""

from pathlib import Path

from tensorhub.cli import options
from tensorhub.cli.output import columns, json_line, line
from tensorhub.cli.running import registry_of, run, settings_of
from tensorhub.find import read_hub_file
from tensorhub.registry import Registry
from tensorhub_common.bus.pings import ping
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.wire.asks import AgentInfo, ReplicaInfo, Status


def status(
    *,
    job: options.Job = None,
    json: options.Json = False,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Show a job's agents, models and replicas."""
    registry = registry_of(job, directory, nats)
    found, replicas = run(_ask(registry, directory))
    if json:
        json_line(found)
        return
    if found.seq:
        line(f"job {found.job} at entry {found.seq} and level {found.level}, led by {found.registry}")
    else:
        line(f"job {found.job} is not there yet: its first connect() or 'tensorhub publish' makes it")
    if found.agents:
        line("")
        rows = ((a.agent, a.host, a.rack, a.site, _state(a), a.shards) for a in found.agents)
        columns(("AGENT", "HOST", "RACK", "SITE", "STATE", "SHARDS"), rows)
    if found.models:
        last = {model.model: model.last for model in found.models}
        line("")
        columns(
            ("MODEL", "LAST", "REPLICA", "HOLDS", "SHARDS", "AGENTS"),
            ((r.model, last.get(r.model), _name(r), r.version, r.shards, _agents(r)) for r in replicas),
        )


async def _ask(registry: Registry, directory: Path | None) -> tuple[Status, list[ReplicaInfo]]:
    async with registry:
        try:
            found = await registry.status()
        except VersionUnavailable:
            return await _without_job(registry, directory), []
        return found, [replica for model in found.models for replica in await registry.replicas(model.model)]


async def _without_job(registry: Registry, directory: Path | None) -> Status:
    """Nobody has used the job yet, but the hub lives: show its agents, as far as `hub.json` knows them."""
    hub = read_hub_file(settings_of(directory).dir)
    bus = await registry.bus()
    agents = [
        AgentInfo(
            agent=agent.id,
            host=agent.host,
            site=agent.site,
            rack=agent.rack,
            live=await ping(bus, agent.id) is not None,
            incarnation=0,
            shards=0,
        )
        for agent in (hub.agents if hub is not None and hub.is_at(registry.address.url) else ())
    ]
    return Status(job=registry.job, seq=0, registry="", term=0, models=(), agents=tuple(agents))


def _state(agent: AgentInfo) -> str:
    if not agent.live:
        return "lost"
    if agent.draining:
        return "may stop" if agent.may_stop else "draining"
    return "live"


def _name(replica: ReplicaInfo) -> str:
    return f"{replica.replica} (spot)" if replica.spot else replica.replica


def _agents(replica: ReplicaInfo) -> str:
    return ", ".join(dict.fromkeys(shard.agent if shard.live else f"{shard.agent} (lost)" for shard in replica.members))
