"""`tensorhub trace` and the pages of metrics, against a real hub: an update is listed, drawn and counted."""

import asyncio
import json
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.hubs import RunningHub, new_job
from tests.integration.programs import command
from tools.docs.metrics_page import prometheus_name

from tensorhub import TensorSpec
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.introspection.ping import ping
from tensorhub_common.introspection.span_query import collect_spans
from tensorhub_common.observability.metrics import METRICS
from tensorhub_common.protocol.spans import Spans, SpansAsk, TransfersAsk
from tensorhub_common.protocol.subjects import query_subject

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROCESSES = {"registry-0", "planner-0", "agent-0", "agent-1"}
NBYTES = 8 * 1024 * 1024
SPEC = {"w": TensorSpec((NBYTES // 4,), "float32")}
WAIT_S = 60.0


@pytest_asyncio.fixture(loop_scope="session")
async def bus(hub: RunningHub) -> AsyncIterator[Bus]:
    async with await connect(hub.file.nats, name="test", credentials=hub.file.credentials) as connected:
        yield connected


async def one_update(hub: RunningHub, job: str, versions: int = 1) -> None:
    """Bring versions of a model from one agent to the other."""
    async with hub.connected(job) as (here, there):
        trainer = await here.register("policy", SPEC, replica="trainer")
        trainer.mark_loaded()
        engine = await there.register("policy", SPEC, replica="rollout-0")
        for version in range(1, versions + 1):
            await trainer.publish(version)
            assert await engine.update(wait_s=10) == version
            await trainer.unpublish()


async def names_in(bus: Bus, job: str, wanted: set[str]) -> Spans:
    """Wait until the spans with these names are kept somewhere, and return those of their trace."""
    async with asyncio.timeout(WAIT_S):
        while True:
            transfers = (await collect_spans(bus, job, TransfersAsk(), PROCESSES)).spans
            if transfers:
                found = await collect_spans(bus, job, SpansAsk(trace=transfers[-1].trace), PROCESSES)
                assert found.processes == PROCESSES
                if wanted <= {span.name for span in found.spans}:
                    return Spans(process="all", spans=found.spans)


@pytest.mark.long
async def test_an_update_is_one_trace_that_all_processes_know_a_part_of(hub: RunningHub, bus: Bus) -> None:
    job = new_job()
    await one_update(hub, job)
    wanted = {"publish", "publish.agent", "transfer", "wait", "plan", "planner.plan", "lease", "lease.grant", "read"}
    spans = (await names_in(bus, job, wanted | {"version.published", "round.decided", "update"})).spans
    assert {span.instance for span in spans} >= PROCESSES
    (read,) = [span for span in spans if span.name == "read"]
    assert read.attributes["tensorhub.bytes"] == NBYTES
    code, out, err = await command(hub, "trace", "--job", job)
    assert (code, err, out.count("\n")) == (0, "", 2)
    transfer = out.splitlines()[1].split()[0]
    code, drawn, err = await command(hub, "trace", transfer, "--job", job)
    assert (code, err) == (0, ""), err
    assert re.search(r"^ *read +agent-1 +█+ +[\d.]+ .s$", drawn, re.MULTILINE), drawn
    assert "8.0 MiB" in drawn
    assert "from agent-0: the same host" in drawn
    code, out, err = await command(hub, "trace", "--version", "1", "--job", job, "--json")
    assert (code, err) == (0, "")
    assert {json.loads(line)["span"] for line in out.splitlines()} == {span.span for span in spans}


@pytest.mark.long
async def test_another_job_s_transfers_are_not_told(hub: RunningHub, bus: Bus) -> None:
    job = new_job()
    await one_update(hub, job)
    await names_in(bus, job, {"transfer"})
    assert (await collect_spans(bus, new_job(), TransfersAsk(), PROCESSES)).spans == ()
    code, out, err = await command(hub, "trace", "--job", new_job())
    assert (code, err) == (0, "")
    assert "no transfer" in out


@pytest.mark.long
async def test_what_an_agent_kept_outlives_its_sudden_end(hub: RunningHub, bus: Bus) -> None:
    job = new_job()
    await one_update(hub, job)
    before = await names_in(bus, job, {"transfer", "read"})
    pid = hub.file.agents[1].pid
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        while (pong := await ping(bus, "agent-1")) is None or pong.pid == pid:
            pass
        again = await names_in(bus, job, {"transfer", "read"})
    assert {span.span for span in again.spans} == {span.span for span in before.spans}


@pytest.mark.parametrize(
    ("what", "question"),
    [
        ("spans", b""),
        ("spans", b"\xff\xfe"),
        ("spans", b'{"trace":"../../etc/passwd"}'),
        ("spans", b"[" * 100_000),
        ("transfers", b'{"limit":0}'),
        ("transfers", b'{"limit":1000000000}'),
        ("transfers", b'{"version":"twelve"}'),
        ("transfers", b"nonsense"),
    ],
)
async def test_a_bad_question_is_answered_by_an_error_and_does_no_harm(
    hub: RunningHub, bus: Bus, what: str, question: bytes
) -> None:
    answer = json.loads(await bus.request(query_subject("default", what), question))
    assert (answer["type"], answer["error"]) == ("error", "BadCommand")
    assert len(answer["message"]) > 10
    assert (await collect_spans(bus, "default", TransfersAsk(), PROCESSES)).processes == PROCESSES


async def test_asking_ends_in_time_though_somebody_never_answers(bus: Bus) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await collect_spans(bus, "default", TransfersAsk(), {*PROCESSES, "agent-9"}, timeout_s=0.6)
    assert found.processes == PROCESSES
    assert loop.time() - began < WAIT_S


# ----------------------------------------------------------------------------------------------------------- metrics

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def url_of(hub: RunningHub, process: str) -> str:
    """Return where the process says that its page is; after a restart the last word counts."""
    text = (hub.directory / "logs" / f"{process}.log").read_text()
    return str(re.findall(r"metrics at (http://\S+)", text)[-1])


async def scraped(hub: RunningHub, process: str) -> Samples:
    def fetch() -> str:
        with urllib.request.urlopen(url_of(hub, process), timeout=120) as answer:  # noqa: S310 (a page of our own)
            return bytes(answer.read()).decode()

    families = text_string_to_metric_families(await asyncio.to_thread(fetch))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


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
    job = new_job()
    async with hub.connected(job) as (here, there):
        trainer = await here.register("policy", SPEC, replica="trainer")
        trainer.mark_loaded()
        engine = await there.register("policy", SPEC, replica="rollout-0")
        with pytest.raises(VersionUnavailable):
            await engine.replicate(77, timeout_s=0.1)
        await trainer.publish(1)
        await engine.replicate(1)
        registry = await scraped(hub, "registry-0")
    shown = {name for process in sorted(PROCESSES) for name, _ in await scraped(hub, process)}
    # The last ones count deltas, late reads and escaped errors, of which there are none here.
    late = {"tensorhub_planner_refusals_total", "tensorhub_agent_sources", "tensorhub_agent_encoded_bytes_total"}
    late |= {"tensorhub_faults_total", "tensorhub_agent_reads_late_total"}
    for metric in METRICS.values():
        name = prometheus_name(metric)
        assert (f"{name}_count" if metric.kind == "histogram" else name) in shown | late, name
    assert registry["tensorhub_registry_leads", frozenset()] == 1
    assert registry["tensorhub_registry_versions", frozenset({("job", job), ("model", "policy")})] == 1
