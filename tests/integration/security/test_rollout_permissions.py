"""Rollouts on a real NATS: what trainer, manager and runner may do goes through, and all else is refused at once."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final
from uuid import uuid4

import pytest
from tests.bounds import WAIT_S
from tests.integration.security.conftest import MINE, THEIRS, LogIn
from tests.integration.security.test_permissions import AT_ONCE_S, BOUND_S, Act, api, hears, says
from tests.kit.waiting import until

from tensorhub_common.auth.permissions import ASKS_OF_ROLLOUTS, ROLLOUT_BUCKET, Role, User
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import BlobMissing, NoResponder, NotPermitted, StreamFailure
from tensorhub_common.bus.message import Message
from tensorhub_common.jetstream import api as jetstream_api
from tensorhub_common.jetstream.blob_store import blob_digest
from tensorhub_common.jetstream.leader_lease import LeaderLease
from tensorhub_common.jetstream.payload_store import PayloadStore
from tensorhub_common.jetstream.rollout_log import RolloutLog, RolloutLogEntry
from tensorhub_common.jetstream.snapshot_store import ROLLOUT_SNAPSHOTS, PackedSnapshot, SnapshotStore
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.rollout.entries import AnyEntry, Attach, Cancel, Done, End, Lead, Scale, SdkSender
from tensorhub_common.protocol.subjects import LOCAL_RUNNER

MANAGER, RUNNER, AGENT = User(Role.ROLLOUT), User(Role.RUNNER, "r"), User(Role.AGENT, "a")
CLIENT, EVERY_JOBS_CLIENT, PLANNER = User(Role.CLIENT, MINE), User(Role.CLIENT), User(Role.PLANNER)
REGISTRY = User(Role.REGISTRY)
PROMPTS: Final = b"prompts"
ROLLOUTS, PAYLOADS = subjects.rollout_stream(MINE), subjects.payload_stream(MINE)

SDK_ENTRIES: list[AnyEntry] = [Attach("main", "m", 0, "n"), Cancel(SdkSender(1, 1), ()), Done(SdkSender(1, 2), ())]
MANAGER_ENTRIES: list[AnyEntry] = [Lead(1, "m"), End(1, ()), Scale(1, 1, "", "")]


def appends(entry: AnyEntry, job: str = MINE) -> Act:
    return lambda bus: RolloutLog(bus, job).append(entry, "refused")


def follows(job: str = MINE) -> Act:
    async def follow(bus: Bus) -> None:
        async for _ in RolloutLog(bus, job).follow():
            return

    return follow


def makes_consumer(stream: str, subject: str) -> Act:
    config = {"name": "c", "filter_subject": subject, "ack_policy": "none", "mem_storage": True}
    wish = {"stream_name": stream, "config": config}
    return lambda bus: jetstream_api.api(bus, f"CONSUMER.CREATE.{stream}.c.{subject}", wish, BOUND_S)


def looks_up(stream: str) -> Act:
    return lambda bus: jetstream_api.number_at_leader(bus, stream, 1, BOUND_S)


def gets(job: str = MINE) -> Act:
    return lambda bus: PayloadStore(bus).get(job, blob_digest(PROMPTS))


def puts(job: str = MINE) -> Act:
    return lambda bus: PayloadStore(bus).put(job, b"refused")


def drops(job: str = MINE) -> Act:
    return lambda bus: PayloadStore(bus).drop(job, blob_digest(PROMPTS))


def to_runner(what: str) -> Act:
    return says(subjects.to_runner(MINE, what, "s"))


def from_runner(what: str, runner: str = "s") -> Act:
    return says(subjects.from_runner(MINE, what, runner))


REFUSED: dict[str, tuple[User, Act]] = {
    "a runner hears another's assigns": (RUNNER, hears(subjects.to_runner(MINE, "assign", "s"))),
    "a runner hears another's aborts": (RUNNER, hears(subjects.to_runner(MINE, "abort", "s"))),
    "a runner hears all assigns": (RUNNER, hears(subjects.to_runners_of_all_jobs("assign"))),
    "a runner hears tokens": (RUNNER, hears(subjects.from_runners_of(MINE, "tokens"))),
    "a runner hears entries": (RUNNER, hears(subjects.rollout_entries_of(MINE))),
    "a runner sends another's tokens": (RUNNER, from_runner("tokens")),
    "a runner reports for another": (RUNNER, from_runner("report")),
    "a runner beats for another": (RUNNER, from_runner("beat")),
    "a runner assigns": (RUNNER, to_runner("assign")),
    "a runner submits": (RUNNER, appends(SDK_ENTRIES[0])),
    "a runner ends requests": (RUNNER, appends(MANAGER_ENTRIES[1])),
    "a runner follows the rollout log": (RUNNER, follows()),
    "a runner looks up an entry": (RUNNER, looks_up(ROLLOUTS)),
    "a runner looks up an entry directly": (RUNNER, lambda bus: jetstream_api.number(bus, ROLLOUTS, 1, BOUND_S)),
    "a runner learns how long the rollout log is": (RUNNER, lambda bus: RolloutLog(bus, MINE).extent()),
    "a runner reads a payload": (RUNNER, gets()),
    "a runner writes a payload": (RUNNER, puts()),
    "a runner asks the manager": (RUNNER, says(subjects.rollout_ask(MINE, "ready"))),
    "a runner commands": (RUNNER, says(subjects.command_subject(MINE, "publish"))),
    "a runner reads a job's log": (RUNNER, lambda bus: jetstream_api.number(bus, subjects.log_stream(MINE), 1)),
    "an agent follows the rollout log": (AGENT, follows()),
    "an agent follows its entries alone": (AGENT, makes_consumer(ROLLOUTS, subjects.rollout_entries_of(MINE))),
    "an agent looks up an entry": (AGENT, looks_up(ROLLOUTS)),
    "an agent appends an entry": (AGENT, appends(SDK_ENTRIES[0])),
    "an agent ends requests": (AGENT, appends(MANAGER_ENTRIES[1])),
    "an agent lists payloads": (AGENT, lambda bus: PayloadStore(bus).listed(MINE)),
    "an agent reads a payload": (AGENT, gets()),
    "an agent writes a payload": (AGENT, puts()),
    "an agent drops a payload": (AGENT, drops()),
    "an agent assigns": (AGENT, to_runner("assign")),
    "an agent sends tokens": (AGENT, from_runner("tokens", "a")),
    "an agent hears tokens": (AGENT, hears(subjects.from_runners_of(MINE, "tokens"))),
    "a client leads": (CLIENT, appends(MANAGER_ENTRIES[0])),
    "a client ends requests": (CLIENT, appends(MANAGER_ENTRIES[1])),
    "a client scales": (CLIENT, appends(MANAGER_ENTRIES[2])),
    "a client checkpoints": (CLIENT, says(subjects.rollout_entry(MINE, "checkpoint"))),
    "a client of all jobs leads": (EVERY_JOBS_CLIENT, appends(MANAGER_ENTRIES[0])),
    "a client follows the rollout log": (CLIENT, follows()),
    "a client looks up an entry": (CLIENT, looks_up(ROLLOUTS)),
    "a client drops a payload": (CLIENT, drops()),
    "a client writes the index of snapshots": (CLIENT, says(subjects.rollout_snapshot_index(MINE))),
    "a client assigns": (CLIENT, to_runner("assign")),
    "a client hears assigns": (CLIENT, hears(subjects.to_runner(MINE, "assign", "r"))),
    "a client sends tokens": (CLIENT, from_runner("tokens")),
    "a client assigns to its own engine": (CLIENT, says(subjects.to_runner(MINE, "assign", LOCAL_RUNNER))),
    "a client sends its own engine's tokens in another job": (
        CLIENT,
        says(subjects.from_runner(THEIRS, "tokens", LOCAL_RUNNER)),
    ),
    "a client hears what another job's engine is asked": (
        CLIENT,
        hears(subjects.to_runner(THEIRS, "assign", LOCAL_RUNNER)),
    ),
    "a client writes into the manager's inbox": (CLIENT, says(f"{subjects.INBOX}.somebody.else")),
    "a client hears tokens": (CLIENT, hears(subjects.from_runners_of(MINE, "tokens"))),
    "a client answers for the manager": (CLIENT, hears(subjects.rollout_ask(MINE, "ready"))),
    "a client submits to another job": (CLIENT, appends(SDK_ENTRIES[0], THEIRS)),
    "a client reads another job's payload": (CLIENT, gets(THEIRS)),
    "a client writes another job's payload": (CLIENT, puts(THEIRS)),
    "a client asks another job's manager": (CLIENT, says(subjects.rollout_ask(THEIRS, "ready"))),
    "a manager attaches": (MANAGER, appends(SDK_ENTRIES[0])),
    "a manager cancels": (MANAGER, appends(SDK_ENTRIES[1])),
    "a manager says done": (MANAGER, appends(SDK_ENTRIES[2])),
    "a manager submits": (MANAGER, says(subjects.rollout_entry(MINE, "submit"))),
    "a manager sends tokens": (MANAGER, from_runner("tokens")),
    "a manager makes a stream": (MANAGER, api(f"STREAM.CREATE.{ROLLOUTS}")),
    "a manager deletes a stream": (MANAGER, api(f"STREAM.DELETE.{ROLLOUTS}")),
    "a manager takes the registry's lease": (MANAGER, says("$KV.tensorhub.registry")),
    "a manager commands": (MANAGER, says(subjects.command_subject(MINE, "publish"))),
    "a manager writes events": (MANAGER, says(subjects.event(MINE, "m", "version", "published"))),
    "a planner appends an entry": (PLANNER, appends(MANAGER_ENTRIES[0])),
    "a planner reads a payload": (PLANNER, gets()),
    "a registry appends an entry": (REGISTRY, appends(MANAGER_ENTRIES[0])),
}


@pytest.fixture
async def manager(log_in: LogIn) -> Bus:
    """The manager, where each job has an entry and a payload."""
    bus = await log_in(MANAGER)
    for job in (MINE, THEIRS):
        await RolloutLog(bus, job).append(MANAGER_ENTRIES[0], uuid4().hex)
        await PayloadStore(bus).put(job, PROMPTS)
    return bus


async def states(bus: Bus) -> list[tuple[int, int]]:
    """Return what may not change: the ends and the lengths of the streams of rollouts."""
    extents = [await RolloutLog(bus, job).extent() for job in (MINE, THEIRS)]
    extents += [await PayloadStore(bus).extent(job) for job in (MINE, THEIRS)]
    return [(each.last, each.nbytes) for each in extents]


@pytest.mark.parametrize("what", REFUSED)
async def test_is_refused_at_once(what: str, log_in: LogIn, manager: Bus, caplog: pytest.LogCaptureFixture) -> None:
    user, act = REFUSED[what]
    bus, before = await log_in(user), await states(manager)
    with pytest.raises(NotPermitted, match=f"does not permit {user} to .* Give it its own"):
        async with asyncio.timeout(AT_ONCE_S):
            await act(bus)
    assert [record.levelno for record in caplog.records if "does not permit" in record.message] == [logging.ERROR]
    assert await states(manager) == before


async def take(entries: AsyncGenerator[RolloutLogEntry, None], last: int) -> list[AnyEntry]:
    found: list[Any] = []
    async with asyncio.timeout(WAIT_S), aclosing(entries):
        async for each in entries:
            found.append(each.entry)
            if each.seq == last:
                break
    return found


@pytest.mark.parametrize("user", [CLIENT, EVERY_JOBS_CLIENT], ids=str)
async def test_a_trainer_submits_and_gets_its_responses(user: User, log_in: LogIn, manager: Bus) -> None:
    """What the trainer writes the manager reads, and the other way round; then the manager removes it all."""
    trainer = await log_in(user)
    prompts = await PayloadStore(trainer).put(MINE, f"prompts of {user}".encode())
    assert await PayloadStore(manager).get(MINE, prompts) == f"prompts of {user}".encode()
    log, first = RolloutLog(trainer, MINE), await RolloutLog(manager, MINE).last_seq() + 1
    assert [await log.append(entry, f"{user}-{index}") for index, entry in enumerate(SDK_ENTRIES)] == [
        first,
        first + 1,
        first + 2,
    ]
    assert await jetstream_api.is_missing(trainer, ROLLOUTS) is False
    assert await take(RolloutLog(manager, MINE).follow(first), first + 2) == SDK_ENTRIES
    for index, entry in enumerate(MANAGER_ENTRIES):
        assert await RolloutLog(manager, MINE).append(entry, f"manager-{user}-{index}") == first + 3 + index
    responses = await PayloadStore(manager).put(MINE, f"responses of {user}".encode())
    assert await PayloadStore(trainer).get(MINE, responses) == f"responses of {user}".encode()
    for each in await PayloadStore(manager).listed(MINE):
        await PayloadStore(manager).drop(MINE, each.digest, each.seq)
    with pytest.raises(BlobMissing):
        await PayloadStore(await log_in(user)).get(MINE, responses)


async def test_a_manager_keeps_snapshots_trims_and_leads(manager: Bus) -> None:
    snapshots = SnapshotStore(manager, MINE, place=ROLLOUT_SNAPSHOTS)
    log = RolloutLog(manager, MINE)
    extent = await log.extent()
    before = await snapshots.index(extent.created)
    index = await snapshots.write(PackedSnapshot.of(b"the fold"), extent.last, 0.0, before, extent.created)
    await snapshots.drop_older(index)
    assert await snapshots.read(index.newer) == b"the fold"
    await log.trim(extent.last + 1)
    assert (await log.extent()).first == extent.last + 1
    async with LeaderLease(manager, MINE, "rollout-0", 1, bucket=ROLLOUT_BUCKET) as lease:
        assert await lease.wait(held=True, timeout_s=BOUND_S)


@pytest.mark.parametrize(("user", "name"), [(RUNNER, "r"), (CLIENT, LOCAL_RUNNER), (EVERY_JOBS_CLIENT, LOCAL_RUNNER)])
async def test_manager_and_runner_speak_with_each_other_and_the_trainer_asks(
    log_in: LogIn, manager: Bus, user: User, name: str
) -> None:
    """A trainer's own engine speaks with the trainer's key."""
    runner, trainer = await log_in(user), await log_in(CLIENT)
    heard: list[tuple[str, bytes]] = []

    def answers(reply: bytes) -> Callable[[Message], Any]:
        async def answer(message: Message) -> bytes:
            heard.append((message.subject, message.data))
            return reply

        return answer

    services = [
        await runner.serve(subjects.to_runner(MINE, what, name), answers(b"by the runner"))
        for what in subjects.MANAGER_MESSAGES
    ]
    services += [
        await manager.serve(subjects.from_runners_of(MINE, what), answers(b"by the manager"))
        for what in subjects.RUNNER_MESSAGES
    ]
    services += [
        await manager.serve(subjects.rollout_asks_of_all_jobs(what), answers(b"by the manager"))
        for what in ASKS_OF_ROLLOUTS
    ]
    asked = [
        *((manager, subjects.to_runner(MINE, what, name), b"by the runner") for what in subjects.MANAGER_MESSAGES),
        *((runner, subjects.from_runner(MINE, what, name), b"by the manager") for what in subjects.RUNNER_MESSAGES),
        *((trainer, subjects.rollout_ask(MINE, what), b"by the manager") for what in ASKS_OF_ROLLOUTS),
    ]
    for bus, subject, reply in asked:
        assert await bus.request(subject, b"a question") == reply
    assert heard == [(subject, b"a question") for _, subject, _ in asked]
    for service in services:
        await service.close()


@pytest.mark.usefixtures("manager")
@pytest.mark.parametrize("form", ["filter_subject", "filter_subjects", "none"])
async def test_no_consumer_of_events_shows_an_agent_anything_of_rollouts(log_in: LogIn, form: str) -> None:
    """The server holds the subject in the request's own subject, which permissions see, against that in its body."""
    agent = await log_in(AGENT)
    for stream, subject in ((ROLLOUTS, subjects.rollout_entries_of(MINE)), (PAYLOADS, subjects.payloads_of(MINE))):
        filters: dict[str, object] = {"filter_subject": subject, "filter_subjects": [subject]}
        config = {"name": "c", "ack_policy": "none", "mem_storage": True}
        config |= {form: filters[form]} if form in filters else {}
        wish = json.dumps({"stream_name": stream, "config": config}).encode()
        events = subjects.events_of(MINE)
        answer = json.loads(await agent.request(f"$JS.API.CONSUMER.CREATE.{stream}.c.{events}", wish, BOUND_S))
        assert "error" in answer, answer


@pytest.mark.usefixtures("manager")
async def test_a_consumer_of_events_on_the_rollout_log_is_empty(log_in: LogIn) -> None:
    agent, replies = await log_in(AGENT), asyncio.Queue[Message]()
    try:
        await makes_consumer(ROLLOUTS, subjects.events_of(MINE))(agent)
    except StreamFailure:
        return
    inbox = agent.new_inbox()
    await agent.subscribe(inbox, replies.put_nowait)
    await agent.publish(f"$JS.API.CONSUMER.MSG.NEXT.{ROLLOUTS}.c", b'{"batch":1,"no_wait":true}', reply=inbox)
    assert (await asyncio.wait_for(replies.get(), BOUND_S)).status == "404"


async def test_a_direct_look_up_of_an_agent_finds_no_one(log_in: LogIn, manager: Bus) -> None:
    """It may ask any stream so, and these streams don't answer."""
    agent = await log_in(AGENT)
    for stream in (ROLLOUTS, PAYLOADS):
        assert (await jetstream_api.stream_info(manager, stream))["state"]["messages"]
        with pytest.raises(NoResponder):
            await jetstream_api.number(agent, stream, 1, BOUND_S)
        subject = f"$JS.API.DIRECT.GET.{stream}.{subjects.payloads_of(MINE)}"
        with pytest.raises(NotPermitted):
            await agent.request(subject, b"", BOUND_S)


async def test_what_jetstream_is_made_to_say_is_no_entry(log_in: LogIn, manager: Bus) -> None:
    """An agent names a subject of the rollout log as the reply of its request, and the fold changes nothing by it."""
    agent, log = await log_in(AGENT), RolloutLog(manager, MINE)
    last = await log.last_seq()
    end = subjects.rollout_entry(MINE, "end")
    await agent.publish(f"$JS.API.STREAM.INFO.{ROLLOUTS}", b"", reply=end)

    async def is_there() -> bool:
        return await log.last_seq() > last

    await until(is_there)
    [entry] = await take(log.follow(last + 1), last + 1)
    assert type(entry).__name__ == "UnreadableEntry"
