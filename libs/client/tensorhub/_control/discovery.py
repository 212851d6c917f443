"""How `connect()` and every command find the hub: by arguments, else `TENSORHUB_*`, else `hub.json`.

`tensorhub up` writes `hub.json` into its directory once all is ready. A hub of services that were started otherwise has
none, and is found by the environment.

Always true: what was found is an absolute path or a whole address; when nothing is found, the error says how to start a
hub and how to name one.
"""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Final

from tensorhub._control import hub_file
from tensorhub._control.hub_file import AgentEntry, HubFile
from tensorhub._control.registry_client import NatsAddress
from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import AgentUnavailable, RegistryUnavailable
from tensorhub_common.protocol.subjects import check_name

_START: Final = "start one with 'tensorhub up'"


def read_hub_file(directory: Path) -> HubFile | None:
    """Return what `tensorhub up` wrote into its directory, or None when no hub runs there."""
    return hub_file.read(directory) if hub_file.path_in(directory).exists() else None


def find_agent(agent: str | PathLike[str] | None, settings: Settings, environ: Mapping[str, str]) -> Path:
    """Return the socket of the agent that `agent` (an id or a socket) or the environment names, else the first here."""
    if isinstance(agent, PathLike):
        return Path(agent).absolute()
    named = agent or environ.get("TENSORHUB_AGENT", "").strip()
    if named:
        return Path(named).absolute() if "/" in named else _socket_of(named, settings)
    if environ.get("TENSORHUB_SOCKET", "").strip():
        return settings.socket.absolute()
    hub = read_hub_file(settings.dir)
    if hub is not None and hub.agents:
        return _first_here(hub, settings, environ)
    if settings.socket.exists():
        return settings.socket.absolute()
    raise AgentUnavailable(
        f"there is no hub in {settings.dir.absolute()}: {_START}, or name an agent with connect(agent=…) or "
        "TENSORHUB_AGENT"
    )


def _first_here(hub: HubFile, settings: Settings, environ: Mapping[str, str]) -> Path:
    here = [agent for agent in hub.agents if agent.host == settings.host]
    if not here and environ.get("TENSORHUB_HOST", "").strip():
        hosts = ", ".join(sorted({agent.host for agent in hub.agents}))
        raise AgentUnavailable(
            f"no agent of the hub in {settings.dir.absolute()} is on host {settings.host!r}: its hosts are {hosts}, so "
            "set TENSORHUB_HOST to one of them"
        )
    return _path(settings, (here or list(hub.agents))[0])


def _socket_of(agent: str, settings: Settings) -> Path:
    check_name("agent", agent)
    hub = read_hub_file(settings.dir)
    for entry in hub.agents if hub is not None else ():
        if entry.id == agent:
            return _path(settings, entry)
    beside = settings.dir / f"{agent}.sock"
    if beside.exists():
        return beside.absolute()
    known = f"its agents are {', '.join(entry.id for entry in hub.agents)}" if hub is not None else f"{_START}"
    raise AgentUnavailable(
        f"there is no agent {agent!r} of a hub in {settings.dir.absolute()}: {known}, or give the path of its socket"
    )


def _path(settings: Settings, agent: AgentEntry) -> Path:
    return (settings.dir.absolute() / agent.socket).absolute()


def find_nats(nats: str | None, settings: Settings) -> NatsAddress:
    """Return the address or addresses of NATS that `nats` or the environment names, else the one in `hub.json`."""
    named = nats or settings.nats
    hub = None if named and settings.credentials else read_hub_file(settings.dir)
    if named and (settings.credentials or hub is None or not hub.is_at(named)):
        return NatsAddress(named, settings.credentials, settings.tls)
    if hub is None:
        raise RegistryUnavailable(
            f"there is no hub in {settings.dir.absolute()}: {_START}, or say where its NATS is with TENSORHUB_NATS"
        )
    return NatsAddress(named or hub.nats_all, settings.credentials or Path(hub.credentials), settings.tls)
