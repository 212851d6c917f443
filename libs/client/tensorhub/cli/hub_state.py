"""What a hub does just now, as `tensorhub status` shows it: the log's word, and what each process says of itself.

All are asked at once, so that a hub with many silent processes is not slower than one with none. Always true: what the
text of `status` says is in the state, so that `--json` says at least as much; a process that does not answer is
named, with what this machine knows of the reason.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from tensorhub._control.hub_file import HubFile
from tensorhub._control.registry_client import RegistryClient
from tensorhub.cli.local_processes import why_silent
from tensorhub_common.bus.address import shown
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import Busy, NoAnswer, NoBus, NoResponder, NotPermitted
from tensorhub_common.errors import TensorHubError, VersionUnavailable
from tensorhub_common.introspection.activity import gather_activity
from tensorhub_common.introspection.ping import ping
from tensorhub_common.protocol.activity import ActiveRead, Activity, Problem
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.queries import (
    AgentInfo,
    Health,
    JobHealth,
    JobState,
    ModelInfo,
    QueryError,
    ReplicaInfo,
    Status,
)
from tensorhub_common.protocol.subjects import hub_ask, query_subject

ACTIVITY_S: Final = 1.0
"""A process that has not said within this what it does counts as silent."""

HEALTH_S: Final = 1.0

STILL_S: Final = 5.0
"""A read without a byte for longer than this is trouble."""

PLAN_S: Final = 2.0
"""The same of a planner that owes it a plan."""

LEASING: Final = "leasing"
"""The stage of a read that waits for a plan and for leases."""

REGISTRY: Final = "registry"
PLANNER: Final = "planner"
AGENT: Final = "agent"


class Nats(msgspec.Struct, frozen=True, kw_only=True):
    """The server that this command is connected to."""

    url: str
    server: str
    round_trip_s: float


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the hub. What a silent one would say of itself is null; `why` is what this machine sees of it."""

    process: str
    role: str
    answers: bool
    why: str = ""
    up_s: float | None = None
    nats_lost: int | None = None
    faults: int | None = None
    planner_silent_s: float | None = None
    troubles: tuple[Problem, ...] = ()
    """What it can't do just now, while it goes on with everything else."""


class ReadRow(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that is being filled, and by which agent."""

    agent: str
    read: ActiveRead

    @property
    def share(self) -> float:
        """How much of it is there, 0 to 1."""
        return self.read.done_bytes / self.read.total_bytes if self.read.total_bytes else 0.0


class UnhealthyJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that a registry or a planner can't go on with, and what to do about it."""

    process: str
    role: str
    job: str
    state: str
    why: str
    advice: str
    since: float
    again_at: float


class HubState(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """One object for programs: the first eight keys are the log's word, as the registry tells it."""

    job: str
    seq: int
    registry: str
    term: int
    level: int
    models: tuple[ModelInfo, ...]
    agents: tuple[AgentInfo, ...]
    replicas: tuple[ReplicaInfo, ...]
    nats: Nats
    processes: tuple[Process, ...]
    """Registries, planners and agents, those that do not answer too."""
    reads: tuple[ReadRow, ...]
    """Oldest first."""
    reads_left_out: int
    ailing: tuple[UnhealthyJob, ...]
    """Jobs that are not well: this one, and where the asker may know of them all others of the hub."""
    troubles: tuple[str, ...]
    """What somebody should look into, a sentence each."""


async def collect(registry: RegistryClient, hub: HubFile | None, planner: str, timeout_s: float) -> HubState:
    """Ask everybody. `planner` should answer, and what `hub.json` names.

    Raises `RegistryUnavailable` where NATS or the registry does not answer, and what the registry says of a job that
    it can't go on with.
    """
    bus = await registry.bus(timeout_s)
    found, ailing = await asyncio.gather(_log(registry, timeout_s), ailing_jobs(bus, registry.job))
    if isinstance(found, TensorHubError):
        raise _told_by_health(found, ailing, registry.job)
    status, replicas = found
    expected = _expected(status, hub, planner)
    activities, round_trip_s = await asyncio.gather(activities_of(bus, registry.job, expected), _round_trip(bus))
    processes = _processes(activities, expected, hub)
    answering = {each.process for each in processes if each.answers}
    if hub is not None and activities is None:
        answering = await _pinged(bus, [agent.id for agent in hub.agents])
    status = _with_agents(status, hub, answering)
    reads = sorted(
        (ReadRow(agent=each.process, read=read) for each in activities or () for read in each.reads),
        key=lambda reading: -reading.read.for_s,
    )
    nats = Nats(url=shown(bus.url), server=str(bus.server_info.get("version", "unknown")), round_trip_s=round_trip_s)
    return HubState(
        job=status.job,
        seq=status.seq,
        registry=status.registry,
        term=status.term,
        level=status.level,
        models=status.models,
        agents=status.agents,
        replicas=tuple(replicas),
        nats=nats,
        processes=tuple(processes),
        reads=tuple(reads),
        reads_left_out=sum(each.reads_left_out for each in activities or ()),
        ailing=ailing,
        troubles=tuple(_troubles(processes, reads, ailing)),
    )


# ----------------------------------------------------------------------------------------------------------- asking


async def _log(registry: RegistryClient, timeout_s: float) -> tuple[Status, list[ReplicaInfo]] | TensorHubError:
    """Return what the registry says of the job, or why it says nothing: others may know more of that."""
    try:
        status = await registry.status(timeout_s)
        found = await asyncio.gather(*(registry.replicas(model.model, timeout_s) for model in status.models))
    except VersionUnavailable:
        # The job has no log yet, but the hub runs.
        return Status(job=registry.job, seq=0, registry="", term=0, models=(), agents=()), []
    except TensorHubError as error:
        return error
    return status, [replica for replicas in found for replica in replicas]


async def activities_of(bus: Bus, job: str, expected: Collection[str]) -> tuple[Activity, ...] | None:
    """Return what the processes say; None where NATS does not permit it, as for users of an older release."""
    try:
        return await gather_activity(bus, job, set(expected), ACTIVITY_S) or None
    except (NotPermitted, NoBus):
        return None


async def _round_trip(bus: Bus) -> float:
    began = time.monotonic()
    with suppress(NoBus, NoAnswer, NoResponder, NotPermitted):
        await bus.request("$JS.API.INFO", b"", ACTIVITY_S)
    return round(time.monotonic() - began, 6)


async def _pinged(bus: Bus, agents: Sequence[str]) -> set[str]:
    pongs = await asyncio.gather(*(ping(bus, agent, ACTIVITY_S) for agent in agents))
    return {pong.id for pong in pongs if pong is not None}


async def ailing_jobs(bus: Bus, job: str) -> tuple[UnhealthyJob, ...]:
    """Return the jobs that are not well, each with the process that says so: this one first."""
    subjects = [
        each
        for role in (REGISTRY, PLANNER)
        for each in (query_subject(job, f"health.{role}"), hub_ask(f"health.{role}"))
    ]
    found = await asyncio.gather(*(_health(bus, subject) for subject in subjects))
    ailing = {
        (health.id, each.job): _ails(health, each)
        for health in found
        if health is not None
        for each in health.jobs
        if each.state != JobState.WELL
    }
    return tuple(sorted(ailing.values(), key=lambda each: (each.job != job, each.job, each.process)))


async def _health(bus: Bus, subject: str) -> Health | None:
    """Return what the process says, or None where it does not answer or may not be asked: then it is not known."""
    try:
        answer = msgspec.json.decode(await bus.request(subject, b"", HEALTH_S), type=Health | QueryError)
    except (NoBus, NoAnswer, NoResponder, NotPermitted, Busy, *MALFORMED):
        return None
    return answer if isinstance(answer, Health) else None


def _ails(health: Health, job: JobHealth) -> UnhealthyJob:
    return UnhealthyJob(
        process=health.id,
        role=health.role,
        job=job.job,
        state=job.state,
        why=job.why,
        advice=job.advice,
        since=job.since,
        again_at=job.again_at,
    )


def _told_by_health(error: TensorHubError, ailing: Sequence[UnhealthyJob], job: str) -> TensorHubError:
    """Return what the registry says of the job instead of that it says nothing about it."""
    own = next((each for each in ailing if each.job == job and each.role == REGISTRY), None)
    return error if own is None else type(error)(sentence(own))


# ----------------------------------------------------------------------------------------------- putting it together


def _expected(status: Status, hub: HubFile | None, planner: str) -> dict[str, str]:
    """Return who should answer, and in which role."""
    expected = {status.registry: REGISTRY} if status.registry else {}
    if hub is not None:
        expected |= {entry.id: REGISTRY for entry in hub.registries}
        expected |= {agent.id: AGENT for agent in hub.agents}
    expected |= {agent.agent: AGENT for agent in status.agents if agent.live}
    return expected | {planner: PLANNER}


def _processes(activities: Sequence[Activity] | None, expected: dict[str, str], hub: HubFile | None) -> list[Process]:
    """Return those that answer, and those that should. Where no question is permitted, nothing is known of any."""
    if activities is None:
        return []
    pids = hub.pids if hub is not None else {}
    found = {each.process: _answering(each) for each in activities}
    # Where several planners run, any of them answers a question: none is missed by name.
    missed = {PLANNER} & {each.role for each in activities}
    for name, role in expected.items():
        if name not in found and role not in missed:
            why = why_silent(pids[name]) if name in pids else ""
            found[name] = Process(process=name, role=role, answers=False, why=why)
    order = (REGISTRY, PLANNER, AGENT)
    return sorted(found.values(), key=lambda each: (order.index(each.role) if each.role in order else 3, each.process))


def _answering(activity: Activity) -> Process:
    return Process(
        process=activity.process,
        role=activity.role,
        answers=True,
        up_s=activity.up_s,
        nats_lost=activity.nats_lost,
        faults=activity.faults,
        planner_silent_s=activity.planner_silent_s,
        troubles=activity.troubles,
    )


def _with_agents(status: Status, hub: HubFile | None, answering: Collection[str]) -> Status:
    """Return the status with the agents of `hub.json` too that have not joined the job: a new job has none."""
    if hub is None:
        return status
    known = {agent.agent for agent in status.agents}
    more = [
        AgentInfo(
            agent=agent.id,
            host=agent.host,
            site=agent.site,
            rack=agent.rack,
            live=agent.id in answering,
            incarnation=0,
            shards=0,
        )
        for agent in hub.agents
        if agent.id not in known
    ]
    return msgspec.structs.replace(status, agents=(*status.agents, *more))


def _troubles(processes: Sequence[Process], reads: Sequence[ReadRow], ailing: Sequence[UnhealthyJob]) -> Iterable[str]:
    yield from (sentence(each) for each in ailing)
    for each in processes:
        if not each.answers:
            yield f"{each.process} does not answer: {each.why or 'it is stopped, gone or cut off from NATS'}"
        elif each.faults:
            yield f"in {each.process} {each.faults} errors have escaped from background work: its log has them"
        for trouble in each.troubles:
            yield f"{trouble_of(each.process, trouble)} -> {advice_on(each.process, trouble)}"
    silent_s = {each.process: each.planner_silent_s or 0.0 for each in processes}
    for reading in reads:
        read = reading.read
        who = f"{read.model}/{read.replica} shard {read.shard} on {reading.agent}"
        without_plan_s = lacks_plan_s(read, silent_s[reading.agent])
        if without_plan_s > PLAN_S:
            yield f"{who} has no plan: no planner has answered {reading.agent} for {without_plan_s:.0f} s"
        elif read.still_s > STILL_S:
            yield f"no byte has come to {who} for {read.still_s:.0f} s: 'tensorhub trace' says from whom"


def lacks_plan_s(read: ActiveRead, planner_silent_s: float) -> float:
    """Return for how long no planner has answered the agent of a read that needs a plan; 0 where it needs none."""
    # An agent that asks for nothing has had no answer for as long as one likes.
    return max(planner_silent_s, read.plan_s or 0.0) if read.stage == LEASING or read.plan_s is not None else 0.0


def sentence(ailing: UnhealthyJob) -> str:
    """Say in a line what is wrong with a job, and what to do."""
    advice = f" -> {ailing.advice}" if ailing.advice else ""
    return told(ailing) + advice


ADVICE: Final = {
    "job-set-aside": "start {process} again when its other jobs can do without it; once they have nothing there it "
    "does so by itself",
    "shards-set-aside": "start {process} again when it can take them back",
    "no-memory": "release what is not needed there, or give {process} more",
    "no-copy": "give {process} or another agent more room for copies, or retain fewer versions",
    "no-room-for-manifests": "make room there",
    "no-room-for-state": "make room there",
}
"""What to do about what a process can't do, by the kind of it."""


def trouble_of(process: str, trouble: Problem) -> str:
    """Say what a process can't do just now, and for how long."""
    job = f", job {trouble.job}" if trouble.job else ""
    return f"{process}{job}: {trouble.kind} for {max(time.time() - trouble.since, 0):.0f} s: {trouble.why.rstrip('.')}"


def advice_on(process: str, trouble: Problem) -> str:
    """Say what to do about it; a later release may know of more kinds."""
    return ADVICE.get(trouble.kind, "look into the log of {process}").format(process=process)


def told(ailing: UnhealthyJob) -> str:
    """Say what is wrong with a job."""
    state = "is set aside" if ailing.state == JobState.SET_ASIDE else f"is {ailing.state}"
    again_s = ailing.again_at - time.time()
    again = ""
    if ailing.again_at:
        again = f"; it is tried again in {again_s:.0f} s" if again_s > 0 else "; its next try is due or under way"
    return f"job {ailing.job} {state} by {ailing.process}: {ailing.why.rstrip('.')}{again}"
