"""One trace over all processes, as a real OTLP receiver gets it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from tests.integration.hubs import RunningHub, new_job, raw_client, running_hub
from tests.integration.otlp_receiver import Received, Receiver, receiving, tree
from tests.integration.programs import Program, started

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

TRAINER = """
import sys, torch, tensorhub
job, agent, shard, shards = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with tensorhub.connect(job, agent=agent) as hub:
    mine = hub.register("policy", {f"w{shard}": torch.arange(1000.0)}, replica="trainer", shard=shard, shards=shards)
    print("registered", flush=True)
    sys.stdin.readline()
    print(mine.publish(7), flush=True)
    sys.stdin.readline()
"""
READER = """
import sys, torch, tensorhub
job, agent, shard, shards = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with tensorhub.connect(job, agent=agent) as hub:
    mine = hub.register("policy", {f"w{shard}": torch.zeros(1000)}, replica="reader", shard=shard, shards=shards)
    print("registered", flush=True)
    print(mine.update(wait_s=30), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> AsyncIterator[RunningHub]:
    async with running_hub(tmp_path_factory.mktemp("hub"), 2, 1, **receiver.environ) as running:
        yield running


@asynccontextmanager
async def program(hub: RunningHub, text: str, *arguments: str, **more: str) -> AsyncIterator[Program]:
    """Start a worker that comes to a good end."""
    async with started(hub, text, *arguments, **more) as worker:
        yield worker
        assert await worker.code() == 0


async def one_version(hub: RunningHub, job: str, shards: int, trainer: dict[str, str], reader: dict[str, str]) -> None:
    """Let a replica of so many shards wait for a version that another one of as many publishes."""
    agents = [agent.id for agent in hub.file.agents]
    async with AsyncExitStack() as stack:

        async def begin(text: str, shard: int, agent: int, more: dict[str, str]) -> Program:
            given = (job, agents[agent % len(agents)], str(shard), str(shards))
            return await stack.enter_async_context(program(hub, text, *given, **more))

        trainers = [await begin(TRAINER, each, each, trainer) for each in range(shards)]
        readers = [await begin(READER, each, each + 1, reader) for each in range(shards)]
        for each in trainers + readers:
            assert await each.line() == "registered"
        for each in trainers:
            each.go_on()
        for each in trainers + readers:
            assert await each.line() == "7"
        for each in trainers + readers:
            each.go_on()


async def spans_of(receiver: Receiver, job: str, names: dict[str, int]) -> list[Received]:
    """Return a job's spans once there are so many of each name, and no others but waits, which are left out.

    Each transfer that had to wait has a wait, in a trace of its own; they come with the transfers.
    """
    wanted = Counter(names)
    found = await asyncio.to_thread(receiver.wait, job, lambda spans: Counter(each.name for each in spans) >= wanted)
    found = [each for each in found if each.name != "wait"]
    assert Counter(each.name for each in found) == wanted
    return found


def one(spans: list[Received], name: str) -> Received:
    (found,) = (each for each in spans if each.name == name)
    return found


def edges(spans: list[Received]) -> set[tuple[str, str]]:
    """Return (parent, child) as "service name" of both."""
    above = tree(spans)
    return {(above[each.span], f"{each.service} {each.name}") for each in spans}


TRANSFER = {
    ("tensorhub-sdk publish", "tensorhub-agent transfer"),
    ("tensorhub-agent transfer", "tensorhub-sdk update"),
    ("tensorhub-agent transfer", "tensorhub-registry round.decided"),
    ("tensorhub-agent transfer", "tensorhub-agent plan"),
    ("tensorhub-agent plan", "tensorhub-planner planner.plan"),
    ("tensorhub-agent transfer", "tensorhub-agent lease"),
    ("tensorhub-agent lease", "tensorhub-agent lease.grant"),
    ("tensorhub-agent transfer", "tensorhub-agent read"),
    ("tensorhub-agent transfer", "tensorhub-agent verify"),
    ("tensorhub-agent transfer", "tensorhub-agent ready"),
}
PUBLICATION = {
    ("", "tensorhub-sdk publish"),
    ("tensorhub-sdk publish", "tensorhub-agent publish.agent"),
    ("tensorhub-agent publish.agent", "tensorhub-agent digest"),
    ("tensorhub-agent publish.agent", "tensorhub-agent log"),
    ("tensorhub-sdk publish", "tensorhub-registry version.published"),
}
NAMES = {child.partition(" ")[2]: 1 for _, child in PUBLICATION | TRANSFER}


async def test_one_version_is_one_trace_over_all_processes(hub: RunningHub, receiver: Receiver) -> None:
    """Registry, planner, two agents and two workers, with the parents right."""
    job = new_job()
    await one_version(hub, job, 1, receiver.environ, receiver.environ)
    spans = await spans_of(receiver, job, NAMES)
    assert len({each.trace for each in spans}) == 1
    assert edges(spans) == PUBLICATION | TRANSFER
    assert len({(each.service, each.instance) for each in spans}) == 6
    read, grant = one(spans, "read"), one(spans, "lease.grant")
    assert read.instance == one(spans, "transfer").instance != grant.instance == one(spans, "publish.agent").instance
    assert read.attributes["tensorhub.source.agent"] == grant.instance
    assert (read.attributes["tensorhub.bytes"], read.attributes["tensorhub.transport"]) == (4000, "local")
    assert read.attributes["tensorhub.end"] == "done"
    assert all(each.start_ns <= each.end_ns for each in spans)
    assert {each.error for each in spans} == {None}
    found = await asyncio.to_thread(receiver.wait, job, lambda spans: any(each.name == "wait" for each in spans))
    wait, transfer = one(found, "wait"), one(spans, "transfer")
    assert (wait.parent, wait.instance, wait.end_ns) == ("", transfer.instance, transfer.start_ns)
    assert transfer.span in wait.links
    assert wait.span in transfer.links, "it is no part of the version's trace"


async def test_the_shards_of_a_version_stand_in_one_trace(hub: RunningHub, receiver: Receiver) -> None:
    """Two shards publish and two read: one of the publish spans is the root."""
    job = new_job()
    await one_version(hub, job, 2, receiver.environ, receiver.environ)
    once = {"version.published": 1, "round.decided": 1}
    spans = await spans_of(receiver, job, {name: once.get(name, 2) for name in NAMES})
    assert len({each.trace for each in spans}) == 1
    assert edges(spans) == PUBLICATION | TRANSFER | {("tensorhub-sdk publish", "tensorhub-sdk publish")}
    by_id = {each.span: each for each in spans}
    for each in spans:
        above = by_id.get(each.parent)
        if each.name == "publish.agent":
            assert above is not None
            assert above.attributes["tensorhub.shard"] == each.attributes["tensorhub.shard"]


async def test_workers_without_telemetry_are_left_out(hub: RunningHub, receiver: Receiver) -> None:
    """Then the trainer's agent makes the publish span, and all else is as it was."""
    job = new_job()
    await one_version(hub, job, 1, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_SDK_DISABLED": "true"})
    spans = await spans_of(receiver, job, {name: 1 for name in NAMES if name != "update"})
    assert len({each.trace for each in spans}) == 1
    assert one(spans, "publish").service == "tensorhub-agent"
    assert [each.name for each in spans if not each.parent] == ["publish"]


async def test_of_a_version_that_is_not_sampled_nobody_makes_a_span(hub: RunningHub, receiver: Receiver) -> None:
    """Its trainer's sampler has the word for all processes. A later version's spans come after what it would leave."""
    unsampled, sampled = new_job(), new_job()
    await one_version(hub, unsampled, 1, {**receiver.environ, "OTEL_TRACES_SAMPLER": "always_off"}, receiver.environ)
    await one_version(hub, sampled, 1, receiver.environ, receiver.environ)
    await spans_of(receiver, sampled, NAMES)
    assert receiver.spans(unsampled) == []


@pytest.mark.parametrize(
    ("traceparent", "parent"), [(f"00-{TRACE}-{SPAN}-01", SPAN), ("garbage-of-no-form", ""), (None, "")]
)
async def test_a_wish_from_outside(hub: RunningHub, receiver: Receiver, traceparent: str | None, parent: str) -> None:
    """The header of a foreign client names the publication's parent; garbage in it is none."""
    job = new_job()
    async with hub.connected(job) as (here, there):
        await here.register("policy", {"w": torch.arange(9.0)}, replica="trainer")
        reader = await there.register("policy", {"w": torch.zeros(9)}, replica="reader")
        client = await raw_client(hub.file)
        try:
            headers = {"Nats-Msg-Id": job, **({"Traceparent": traceparent} if traceparent else {})}
            body = b'{"verb":"publish","model":"policy","replica":"trainer","version":3}'
            await client.jetstream().publish(f"tensorhub.v1.{job}.cmd.publish", body, headers=headers)
        finally:
            await client.close()
        assert await reader.replicate() == 3
    # This process exports nothing, so `replicate` is not there.
    spans = await spans_of(receiver, job, {name: 1 for name in NAMES if name != "update"})
    assert len({each.trace for each in spans}) == 1
    publish = one(spans, "publish")
    assert (publish.service, publish.parent) == ("tensorhub-agent", parent)
    assert (publish.trace == TRACE) == bool(parent)
    assert one(spans, "transfer").parent == publish.span


@pytest.mark.long
async def test_with_telemetry_off_nothing_is_made(tmp_path: Path, receiver: Receiver) -> None:
    """Not a span, and not a header in the log."""
    off = {**receiver.environ, "OTEL_SDK_DISABLED": "true"}
    async with running_hub(tmp_path, 2, 1, **off) as quiet:
        job = new_job()
        await one_version(quiet, job, 1, off, off)
        client = await raw_client(quiet.file)
        try:
            stream = client.jetstream()
            name = await stream.find_stream_name_by_subject(f"tensorhub.v1.{job}.event.>")
            state = (await stream.stream_info(name)).state
            entries = [await stream.get_msg(name, seq) for seq in range(1, state.messages + 1)]
        finally:
            await client.close()
        assert len(entries) > 10
        assert not [each.subject for each in entries if "traceparent" in (each.headers or {})]
    assert receiver.spans(job) == []
