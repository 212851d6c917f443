"""What `tensorhub doctor` finds out about the hub, by asking each of its processes."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tensorhub._control.discovery import find_nats, read_hub_file
from tensorhub._control.hub_file import HubFile
from tensorhub._control.registry_client import NatsAddress, RegistryClient
from tensorhub.cli.doctor.finding import Finding, fail, ok, warn
from tensorhub.cli.hub_state import PLAN_S, activities_of, advice_on, ailing_jobs, lacks_plan_s, told, trouble_of
from tensorhub.cli.local_processes import STOPPED, has_ended, last_line, state_of
from tensorhub_common.bus.address import addresses, shown
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.errors import NoAnswer, NoBus, NoResponder, StreamFailure
from tensorhub_common.bus.server_check import API_LEVEL_MIN
from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import TensorHubError, VersionUnavailable
from tensorhub_common.introspection.ping import ping
from tensorhub_common.jetstream import api

CONNECT_S: Final = 3.0
ASK_S: Final = 3.0
NODE_S: Final = 2.0
SOCKET_S: Final = 2.0
CLOCK_OFF_S: Final = 1.0
"""Clocks that differ by more make times in events and logs misleading; nothing else depends on them."""

START: Final = "start a hub with 'tensorhub up'"


async def hub(settings: Settings, job: str, nats: str | None) -> AsyncIterator[Finding]:
    """Yield what there is to say, one finding for each check."""
    try:
        file = read_hub_file(settings.dir)
    except TensorHubError as error:
        file = None
        yield fail("hub.json", str(error), START)
    else:
        yield _file(settings, file)
    if file is not None:
        for finding in _processes(settings, file):
            yield finding
    try:
        address = find_nats(nats, settings)
        bus = await connect(
            address.url, name="doctor", credentials=address.credentials, tls=address.tls, timeout_s=CONNECT_S
        )
    except TensorHubError as error:
        yield fail("nats", str(error), START)
        return
    async with bus:
        async for finding in _connected(bus, address, settings, job, file):
            yield finding
    here = [(agent.id, Path(agent.socket)) for agent in file.agents] if file is not None else []
    for found in await asyncio.gather(*(asyncio.to_thread(_socket, *each) for each in here)):
        yield found


async def _connected(
    bus: Bus, address: NatsAddress, settings: Settings, job: str, file: HubFile | None
) -> AsyncIterator[Finding]:
    yield await _nats(bus)
    if len(addresses(address.url)) > 1:
        yield await _nodes(address)
    yield await _registry(job, address)
    for entry in file.registries if file is not None and len(file.registries) > 1 else ():
        yield await _answers(bus, "registry", entry.id)
    yield await _answers(bus, "planner", settings.planner_id)
    # All at once: a host that is off has many that are silent.
    agents = await _agents(job, address, file)
    for found in await asyncio.gather(*(_answers(bus, "agent", agent) for agent in agents)):
        yield found
    for each in (*await _jobs(bus, job), *await _work(bus, job, agents)):
        yield each
    yield await _clock(bus)


def _file(settings: Settings, file: HubFile | None) -> Finding:
    place = settings.dir.absolute()
    if file is None:
        return warn("hub.json", f"there is none in {place}", f"{START}, or set TENSORHUB_DIR or TENSORHUB_NATS")
    return ok("hub.json", f"{place}: {len(file.agents)} agent(s), NATS at {shown(file.nats_all)}")


def _processes(settings: Settings, file: HubFile) -> list[Finding]:
    """Look at the hub's processes as the kernel shows them, and at the last words of those that have ended."""
    found = []
    for name, pid in file.pids.items():
        if state_of(pid) in STOPPED:
            wake = f"wake it with 'kill -CONT {pid}', unless somebody looks into it with a debugger"
            found.append(fail("processes", f"{name} (process {pid}) is stopped", wake))
        elif has_ended(pid):
            said = last_line(settings.dir / "logs" / f"{name}.log")
            last_words = f"; its log ends with: {said}" if said else ""
            advice = f"'tensorhub up' starts it again, unless it has ended too; see logs/{name}.log in its directory"
            found.append(fail("processes", f"{name} (process {pid}) has ended{last_words}", advice))
    return found or [ok("processes", f"all {len(file.pids)} live")]


async def _jobs(bus: Bus, job: str) -> list[Finding]:
    """Name the jobs that a registry or a planner can't go on with."""
    found = [
        fail("job", told(each), each.advice or f"look into the log of {each.process}")
        for each in await ailing_jobs(bus, job)
    ]
    return found or [ok("job", "no registry and no planner has trouble with one")]


async def _work(bus: Bus, job: str, agents: Sequence[str]) -> list[Finding]:
    """Tell what processes say of themselves, and does not show in whether they answer."""
    activities = await activities_of(bus, job, agents)
    if activities is None:
        return [
            warn(
                "activity",
                "NATS lets nobody ask processes what they do",
                "make the users of NATS anew with 'tensorhub credentials', as 'tensorhub up' does at its start",
            )
        ]
    found = [
        warn(
            "activity",
            f"{each.process} says that {each.faults} errors have escaped from its background work",
            f"look into the log of {each.process}, and report what it says",
        )
        for each in activities
        if each.faults
    ]
    found += [
        fail(
            "activity",
            f"reads of {each.process} have no plan: no planner has answered it for {silent_s:.0f} s",
            "look whether a planner runs, and whether both reach NATS",
        )
        for each in activities
        if (silent_s := max((lacks_plan_s(read, each.planner_silent_s or 0.0) for read in each.reads), default=0.0))
        > PLAN_S
    ]
    found += [
        fail("activity", trouble_of(each.process, trouble), advice_on(each.process, trouble))
        for each in activities
        for trouble in each.troubles
    ]
    reads = sum(len(each.reads) + each.reads_left_out for each in activities)
    return found or [ok("activity", f"{len(activities)} processes tell what they do; reads under way: {reads}")]


async def _nats(bus: Bus) -> Finding:
    # That the level is high enough was checked when the connection was made.
    info = json.loads(await bus.request("$JS.API.INFO", b"", ASK_S))
    level = info.get("api", {}).get("level", 0)
    return ok("nats", f"{shown(bus.url)} answers, JetStream API level {level} (at least {API_LEVEL_MIN} is needed)")


async def _nodes(address: NatsAddress) -> Finding:
    """Ask each node of a cluster by itself; a hub goes on without some of them, and nothing else would show it."""
    urls = addresses(address.url)
    there = await asyncio.gather(*(_is_there(url, address) for url in urls))
    silent = [shown(url) for url, is_there in zip(urls, there, strict=True) if not is_there]
    if silent:
        what_to_do = "start them again: more than half of the nodes must run, and with fewer nothing is published"
        return warn("nats nodes", f"of {len(urls)} nodes these don't answer: {', '.join(silent)}", what_to_do)
    return ok("nats nodes", f"all {len(urls)} answer")


async def _is_there(url: str, address: NatsAddress) -> bool:
    try:
        bus = await connect(url, name="doctor", credentials=address.credentials, tls=address.tls, timeout_s=NODE_S)
    except TensorHubError:
        return False
    await bus.close()
    return True


async def _registry(job: str, address: NatsAddress) -> Finding:
    try:
        async with RegistryClient(job, address) as registry:
            status = await registry.status(ASK_S)
    except VersionUnavailable as error:
        # It is the registry that says so.
        return ok("registry", f"answers: {error}")
    except TensorHubError as error:
        return fail("registry", str(error), "start a registry, or look into its log why it does not lead")
    return ok("registry", f"{status.registry} leads in term {status.term}; job {job} is at entry {status.seq}")


async def _agents(job: str, address: NatsAddress, file: HubFile | None) -> list[str]:
    """Return the agents that should answer: those of `hub.json` and those of the job that are not lost."""
    names = dict.fromkeys(agent.id for agent in file.agents) if file is not None else {}
    with suppress(TensorHubError):
        async with RegistryClient(job, address) as registry:
            names |= dict.fromkeys(agent.agent for agent in (await registry.status(ASK_S)).agents if agent.live)
    return list(names)


async def _answers(bus: Bus, role: str, process: str) -> Finding:
    began = time.monotonic()
    pong = await ping(bus, process)
    if pong is None:
        return fail(
            role, f"{process} does not answer", f"look into the log of {process}, and start it if it is not there"
        )
    return ok(role, f"{process} (process {pong.pid}) answers in {1e3 * (time.monotonic() - began):.1f} ms")


def _socket(agent: str, path: Path) -> Finding:
    """Connect as a worker would; the agent forgives one that says nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(SOCKET_S)
        try:
            sock.connect(str(path))
        except OSError as error:
            return fail("socket", f"{agent}: {path}: {error}", f"look into the log of {agent}")
    return ok("socket", f"{agent}: {path}")


async def _clock(bus: Bus) -> Finding:
    """Compare this machine's clock with JetStream's, whose time is in events."""
    try:
        names = (await api.api(bus, "STREAM.NAMES", {}, ASK_S)).get("streams") or []
        if not names:
            return ok("clock", "there is no stream yet to compare it with")
        before = time.time()
        info = await api.api(bus, f"STREAM.INFO.{names[0]}", None, ASK_S)
        middle = (before + time.time()) / 2
        offset = middle - api.time_ns_of(info["ts"]) / api.NS_PER_S
    except (NoBus, NoAnswer, NoResponder, KeyError, StreamFailure) as error:
        return warn("clock", f"JetStream did not tell its time: {error}", "use nats-server 2.12 or newer")
    if abs(offset) > CLOCK_OFF_S:
        return warn(
            "clock", f"{offset:+.3f} s from JetStream's", "let NTP set the clocks: times in events come from NATS"
        )
    return ok("clock", f"{offset * 1e3:+.1f} ms from JetStream's")
