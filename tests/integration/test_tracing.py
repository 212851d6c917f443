"""Spans and metrics of a real hub: one trace over all processes, `tensorhub trace`, and the pages of metrics."""

import asyncio
import json
import re
import textwrap
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Final

import pytest
import pytest_asyncio
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, new_job, running_hub
from tests.kit.otlp_receiver import Received, Receiver, receiving, tree
from tests.kit.processes import Peer
from tests.kit.scraping import scraped
from tests.kit.tensors import full
from tests.kit.waiting import until, until_answer
from tools.docs.metrics_page import prometheus_name

from tensorhub import TensorSpec, VersionUnavailable
from tensorhub_common.bus.connection import Bus
from tensorhub_common.introspection.span_query import collect_spans
from tensorhub_common.observability.metrics import METRICS
from tensorhub_common.protocol.spans import Spans, SpansAsk, TransfersAsk

pytestmark = pytest.mark.asyncio(loop_scope="module")
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROCESSES: Final = {"registry-0", "planner-0", "agent-0", "agent-1"}
NBYTES: Final = 8 * 1024 * 1024
SPEC: Final = {"w": TensorSpec((NBYTES // 4,), "float32")}
DISABLED: Final = {"OTEL_SDK_DISABLED": "true"}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> AsyncIterator[RunningHub]:
    directory = tmp_path_factory.mktemp("hub")
    async with running_hub(directory, settings=receiver.environ, TENSORHUB_METRICS="0") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def bus(hub: RunningHub) -> AsyncIterator[Bus]:
    async with await hub.bus() as connected:
        yield connected


async def one_version(hub: RunningHub, job: str, shards: int, trainer: dict[str, str], reader: dict[str, str]) -> None:
    async with AsyncExitStack() as stack:

        async def begin(replica: str, shard: int, agent: int, more: dict[str, str]) -> Peer:
            worker = await stack.enter_async_context(hub.worker(job, agent % 2, **more))
            options = {"shard": shard, "shards": shards, "name": f"w{shard}"}
            await worker.ask("register_full", "policy", replica, 1000, 1.0, options)
            return worker

        trainers = [await begin("trainer", each, each, trainer) for each in range(shards)]
        readers = [await begin("reader", each, each + 1, reader) for each in range(shards)]
        waiting = [asyncio.create_task(each.ask("update", "reader", 30)) for each in readers]
        assert set(await asyncio.gather(*(each.ask("publish", "trainer", 7) for each in trainers))) == {7}
        assert set(await asyncio.gather(*waiting)) == {7}
        for each in trainers + readers:
            each.end_orders()
        assert [await each.code() for each in trainers + readers] == [0] * 2 * shards


async def spans_of(receiver: Receiver, job: str, names: dict[str, int]) -> list[Received]:
    """Return a job's spans, of one trace, once there are so many of each name, and no others.

    Left out are waits: each transfer that had to wait has one, in a trace of its own; they come with the transfers.
    """
    wanted = Counter(names)
    found = await asyncio.to_thread(receiver.wait, job, lambda spans: Counter(each.name for each in spans) >= wanted)
    found = [each for each in found if each.name != "wait"]
    assert Counter(each.name for each in found) == wanted
    assert len({each.trace for each in found}) == 1
    return found


def one(spans: list[Received], name: str) -> Received:
    (found,) = (each for each in spans if each.name == name)
    return found


def edges(spans: list[Received]) -> set[tuple[str, str]]:
    above = tree(spans)
    return {(above[each.span], f"{each.service} {each.name}") for each in spans}


TRANSFER = {
    ("tensorhub-sdk publish", "tensorhub-agent transfer"),
    ("tensorhub-agent transfer", "tensorhub-sdk update"),
    ("tensorhub-agent transfer", "tensorhub-registry round.decided"),
    *(("tensorhub-agent transfer", f"tensorhub-agent {name}") for name in ("plan", "lease", "read", "verify", "ready")),
    ("tensorhub-agent plan", "tensorhub-planner planner.plan"),
    ("tensorhub-agent lease", "tensorhub-agent lease.grant"),
}
PUBLICATION = {
    ("", "tensorhub-sdk publish"),
    ("tensorhub-sdk publish", "tensorhub-agent publish.agent"),
    *(("tensorhub-agent publish.agent", f"tensorhub-agent {name}") for name in ("digest", "log")),
    ("tensorhub-sdk publish", "tensorhub-registry version.published"),
}
NAMES = {child.partition(" ")[2]: 1 for _, child in PUBLICATION | TRANSFER}
WITHOUT_SDK = {name: 1 for name in NAMES if name != "update"}


@pytest.mark.long
async def test_one_version_is_one_trace_over_all_processes(hub: RunningHub, receiver: Receiver) -> None:
    """Registry, planner, two agents and two workers, with the parents right."""
    job = new_job()
    await one_version(hub, job, 1, receiver.environ, receiver.environ)
    spans = await spans_of(receiver, job, NAMES)
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


@pytest.mark.long
async def test_the_shards_of_a_version_are_in_one_trace(hub: RunningHub, receiver: Receiver) -> None:
    """Two shards publish and two read: one of the publish spans is the root."""
    job = new_job()
    await one_version(hub, job, 2, receiver.environ, receiver.environ)
    spans = await spans_of(receiver, job, dict.fromkeys(NAMES, 2) | {"version.published": 1, "round.decided": 1})
    assert edges(spans) == PUBLICATION | TRANSFER | {("tensorhub-sdk publish", "tensorhub-sdk publish")}
    by_id = {each.span: each for each in spans}
    for each in spans:
        if each.name == "publish.agent":
            assert by_id[each.parent].attributes["tensorhub.shard"] == each.attributes["tensorhub.shard"]


async def test_workers_without_telemetry_are_left_out(hub: RunningHub, receiver: Receiver) -> None:
    """Then the trainer's agent makes the publish span, and all else is as it was."""
    job = new_job()
    await one_version(hub, job, 1, DISABLED, DISABLED)
    spans = await spans_of(receiver, job, WITHOUT_SDK)
    assert one(spans, "publish").service == "tensorhub-agent"
    assert [each.name for each in spans if not each.parent] == ["publish"]


@pytest.mark.long
async def test_of_a_version_that_is_not_sampled_no_process_makes_a_span(hub: RunningHub, receiver: Receiver) -> None:
    """Its trainer's sampler decides for all processes. A later version's spans come after what it would leave."""
    unsampled, sampled = new_job(), new_job()
    await one_version(hub, unsampled, 1, {**receiver.environ, "OTEL_TRACES_SAMPLER": "always_off"}, receiver.environ)
    await one_version(hub, sampled, 1, receiver.environ, receiver.environ)
    await spans_of(receiver, sampled, NAMES)
    assert receiver.spans(unsampled) == []


@pytest.mark.parametrize(
    ("traceparent", "parent"), [(f"00-{TRACE}-{SPAN}-01", SPAN), ("garbage-of-no-form", ""), (None, "")]
)
async def test_a_request_from_outside(
    hub: RunningHub, receiver: Receiver, traceparent: str | None, parent: str
) -> None:
    """The header of a foreign client names the publication's parent; garbage in it is none."""
    async with hub.pair(full(9, 9)) as it:
        headers = {"Nats-Msg-Id": it.job, **({"Traceparent": traceparent} if traceparent else {})}
        body = b'{"verb":"publish","model":"m","replica":"trainer","version":3}'
        async with hub.raw_client() as client:
            await client.jetstream().publish(f"tensorhub.v1.{it.job}.cmd.publish", body, headers=headers)
        assert await it.engine.replicate() == 3
        # This process exports nothing, so `replicate` is not there.
        spans = await spans_of(receiver, it.job, WITHOUT_SDK)
    publish = one(spans, "publish")
    assert (publish.service, publish.parent) == ("tensorhub-agent", parent)
    assert (publish.trace == TRACE) == bool(parent)
    assert one(spans, "transfer").parent == publish.span


SYNC = """
import sys, tensorhub, torch
trainer = tensorhub.connect(sys.argv[1]).register("policy", {"w": torch.zeros(1000)}, replica="trainer")
engine = tensorhub.connect(sys.argv[1]).register("policy", {"w": torch.zeros(1000)}, replica="engine")
trainer.publish(1)
engine.replicate(1)
"""
ASYNC = """
import asyncio, sys, tensorhub, torch
async def main():
    trainer_hub, engine_hub = [await tensorhub.connect_async(sys.argv[1]) for _ in range(2)]
    trainer = await trainer_hub.register("policy", {"w": torch.zeros(1000)}, replica="trainer")
    engine = await engine_hub.register("policy", {"w": torch.zeros(1000)}, replica="engine")
    await trainer.publish(1)
    await engine.replicate(1)
%s
"""
CHILD = """
import multiprocessing, sys
import tensorhub
def child():
%s
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
sys.exit(process.exitcode)
"""
PROGRAMS = {
    "sync": SYNC,
    "a function": f"def main():\n{textwrap.indent(SYNC, '    ')}\nmain()",
    "a forked child": CHILD % textwrap.indent(SYNC, "    "),
    "asyncio.run in a forked child": CHILD % textwrap.indent(ASYNC % "asyncio.run(main())", "    "),
    "asyncio.run": ASYNC % "asyncio.run(main())",
    "a loop that was left": ASYNC % "asyncio.new_event_loop().run_until_complete(main())",
}


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_a_program_that_ends_without_close_leaves_its_spans(
    hub: RunningHub, bus: Bus, receiver: Receiver, program: str
) -> None:
    """They are exported, and its agent keeps them."""
    job = new_job()
    # So that nothing but the end of the program exports.
    late = {**receiver.environ, "OTEL_BSP_SCHEDULE_DELAY": "60000"}
    code, _, err = await hub.run_interpreter(program, job, **late)
    assert code == 0, err
    assert {"publish", "replicate"} <= {span.name for span in receiver.spans(job) if span.service == "tensorhub-sdk"}

    async def are_kept() -> bool:
        transfers = (await collect_spans(bus, job, TransfersAsk())).spans
        kept = [await collect_spans(bus, job, SpansAsk(trace=each.trace)) for each in transfers]
        return {"publish", "replicate"} <= {span.name for each in kept for span in each.spans}

    await until(are_kept)


async def one_update(hub: RunningHub, job: str, versions: int = 1) -> None:
    async with hub.pair(SPEC, SPEC, job=job) as it:
        it.trainer.mark_loaded()
        for version in range(1, versions + 1):
            await it.trainer.publish(version)
            assert await it.engine.update(wait_s=10) == version
            await it.trainer.unpublish()


async def kept(bus: Bus, job: str, wanted: set[str]) -> Spans:
    """Wait until the spans with these names are kept somewhere, and return those of their trace."""

    async def of_last() -> Spans:
        transfers = (await collect_spans(bus, job, TransfersAsk(), PROCESSES)).spans
        found = await collect_spans(bus, job, SpansAsk(trace=transfers[-1].trace if transfers else ""), PROCESSES)
        return Spans(process="all", spans=found.spans)

    return await until_answer(of_last, lambda found: wanted <= {span.name for span in found.spans})


@pytest.mark.long
async def test_an_update_is_one_trace_that_all_processes_know_a_part_of(hub: RunningHub, bus: Bus) -> None:
    job = new_job()
    await one_update(hub, job)
    spans = (await kept(bus, job, {name for name in NAMES if name not in ("digest", "log", "verify", "ready")})).spans
    assert {span.instance for span in spans} >= PROCESSES
    (read,) = [span for span in spans if span.name == "read"]
    assert read.attributes["tensorhub.bytes"] == NBYTES
    code, out, err = await hub.command("trace", "--job", job)
    assert (code, err, out.count("\n")) == (0, "", 2)
    transfer = out.splitlines()[1].split()[0]
    code, drawn, err = await hub.command("trace", transfer, "--job", job)
    assert (code, err) == (0, ""), err
    assert re.search(r"^ *read +agent-1 +█+ +[\d.]+ .s$", drawn, re.MULTILINE), drawn
    assert "8.0 MiB" in drawn
    assert "from agent-0: the same host" in drawn
    code, out, err = await hub.command("trace", "--version", "1", "--job", job, "--json")
    assert (code, err) == (0, "")
    assert {json.loads(line)["span"] for line in out.splitlines()} == {span.span for span in spans}
    assert (await collect_spans(bus, new_job(), TransfersAsk(), PROCESSES)).spans == ()
    code, out, err = await hub.command("trace", "--job", new_job())
    assert (code, err) == (0, "")
    assert "no transfer" in out
    await hub.until_back("agent-1", hub.kill("agent-1"))
    again = await kept(bus, job, {"transfer", "read"})
    assert {span.span for span in again.spans} == {span.span for span in spans}


async def test_asking_ends_in_time_though_one_process_never_answers(bus: Bus) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await collect_spans(bus, "default", TransfersAsk(), {*PROCESSES, "agent-9"}, timeout_s=0.6)
    assert found.processes == PROCESSES
    assert loop.time() - began < WAIT_S


# ---------------------------------------------------------------------------------------------------------- metrics

READ = ("tensorhub_agent_read_bytes_total", frozenset({("transport", "local")}))
DONE = ("tensorhub_agent_reads_total", frozenset({("outcome", "done")}))


async def test_a_page_that_is_read_while_weights_move_counts_their_bytes(hub: RunningHub) -> None:
    before = await scraped(hub, "agent-1")
    updating = asyncio.create_task(one_update(hub, new_job(), versions=20))
    seen = [before.get(READ, 0.0)]
    while not updating.done():
        seen.append((await scraped(hub, "agent-1")).get(READ, 0.0))
    await updating
    after = await scraped(hub, "agent-1")
    assert seen == sorted(seen)
    assert after[READ] - before.get(READ, 0.0) == 20 * NBYTES
    assert after[DONE] - before.get(DONE, 0.0) == 20
    assert after["tensorhub_agent_read_duration_seconds_count", frozenset()] == after[DONE]
    assert after["tensorhub_agent_segments_used_bytes", frozenset()] >= 0


async def test_each_service_shows_what_the_documentation_says_that_it_has(hub: RunningHub) -> None:
    """Labelled figures show up when there is one: an update, and a read that is refused, bring all of them about."""
    async with hub.pair(SPEC, SPEC) as it:
        it.trainer.mark_loaded()
        with pytest.raises(VersionUnavailable):
            await it.engine.replicate(77, timeout_s=0.1)
        await it.trainer.publish(1)
        await it.engine.replicate(1)
        registry = await scraped(hub, "registry-0")
    shown = {name for process in sorted(PROCESSES) for name, _ in await scraped(hub, process)}
    # The last ones count deltas, late reads, escaped errors and memory of GPUs, of which there are none here.
    late = {"tensorhub_planner_refusals_total", "tensorhub_agent_sources", "tensorhub_agent_encoded_bytes_total"}
    late |= {"tensorhub_faults_total", "tensorhub_agent_reads_late_total"}
    late |= {"tensorhub_agent_device_segments_used_bytes", "tensorhub_agent_device_segments_limit_bytes"}
    # tests/integration/rollouts/test_rollout_telemetry.py has those of rollouts.
    for metric in (each for each in METRICS.values() if each.role not in {"rollout", "runner"}):
        name = prometheus_name(metric)
        assert (f"{name}_count" if metric.kind == "histogram" else name) in shown | late, name
    assert registry["tensorhub_registry_leads", frozenset()] == 1
    assert registry["tensorhub_registry_versions", frozenset({("job", it.job), ("model", "m")})] == 1
