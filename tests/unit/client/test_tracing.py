"""The spans of a worker's calls: whose they are, where they stand, and that no call waits for them."""

import subprocess
import sys

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from tests.kit.waiting import until
from tests.unit.client.fake_agent import FakeAgent, engine, trainer
from tests.unit.span_places import place_at

from tensorhub import AsyncHub
from tensorhub._agent import call_spans
from tensorhub_common.errors import NotFilled
from tensorhub_common.observability.trace_context import parse_traceparent
from tensorhub_common.protocol import worker as w
from tensorhub_common.protocol.spans import FinishedSpan

PLACE = place_at(0xBBBB, 0xB1)


def traced(agent: FakeAgent) -> list[FinishedSpan]:
    return [span for frame in agent.calls(w.Traced) for span in frame.spans]


async def spans(agent: FakeAgent, count: int) -> list[FinishedSpan]:
    await until(lambda: len(traced(agent)) >= count)
    return traced(agent)


def answer(agent: FakeAgent, traceparent: str | None) -> None:
    """Let publications and reads of version 7 be answered, naming this span."""
    for kind in (w.PublishCall, w.ReadCall):
        agent.hooks[kind] = lambda worker, frame: worker.tell(
            w.Done(call=frame.call, version=7, traceparent=traceparent)
        )


class Heard(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """An application that has configured a provider of its own."""
    provider, heard = TracerProvider(shutdown_on_exit=False), Heard()
    provider.add_span_processor(heard)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return heard


async def test_a_publication_is_a_root_that_its_agent_was_told_of(agent: FakeAgent, hub: AsyncHub) -> None:
    shard, reader = await trainer(hub), await engine(hub)
    assert await reader.update() is None
    await shard.publish(3)
    (span,) = await spans(agent, 1)
    (call,) = agent.calls(w.PublishCall)
    place = parse_traceparent(call.traceparent)
    assert place is not None
    assert (span.trace, span.span, span.parent) == (place.trace_id, place.span_id, None)
    assert (span.name, span.service, span.error) == ("publish", "tensorhub-sdk", None)
    assert span.attributes["tensorhub.version"] == 3
    assert span.attributes["tensorhub.replica"] == "trainer"
    assert span.start_ns < span.end_ns


@pytest.mark.long
async def test_a_call_stands_below_the_span_that_its_answer_names(agent: FakeAgent, hub: AsyncHub) -> None:
    """A read below its transfer, and a shard whose word was not a version's last below the one whose was."""
    shard, reader = await trainer(hub), await engine(hub)
    answer(agent, PLACE.traceparent)
    for name, call in (("publish", shard.publish), ("update", reader.update), ("replicate", reader.replicate)):
        agent.frames.clear()
        await call()
        (span,) = await spans(agent, 1)
        assert (span.name, span.trace, span.parent) == (name, PLACE.trace_id, PLACE.span_id)
        if name == "publish":
            place = parse_traceparent(agent.calls(w.PublishCall)[0].traceparent)
            assert place is not None
            assert span.span == place.span_id, "its agent's spans stand below this id"


@pytest.mark.parametrize("garbage", [None, "", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_an_answer_without_a_readable_span(agent: FakeAgent, hub: AsyncHub, garbage: str | None) -> None:
    shard, reader = await trainer(hub), await engine(hub)
    answer(agent, garbage)
    await shard.publish(7)
    await reader.update()
    publish, update = await spans(agent, 2)
    assert (publish.parent, update.parent) == (None, None)
    assert publish.trace != update.trace


async def test_a_call_that_raises_is_told_with_its_error(agent: FakeAgent, hub: AsyncHub) -> None:
    shard = await trainer(hub)
    agent.refuse(w.PublishCall, NotFilled, traceparent=PLACE.traceparent)
    with pytest.raises(NotFilled):
        await shard.publish()
    (span,) = await spans(agent, 1)
    assert span.error == "NotFilled: not now"
    assert "tensorhub.version" not in span.attributes


async def test_an_applications_own_provider_and_active_span(agent: FakeAgent, hub: AsyncHub, heard: Heard) -> None:
    shard, reader = await trainer(hub), await engine(hub)
    with trace.get_tracer_provider().get_tracer("app").start_as_current_span("step") as step:
        await shard.publish()
        answer(agent, PLACE.traceparent)
        await reader.update()
    await spans(agent, 2)
    ours = {span.name: span for span in heard.spans if span.name != "step"}
    assert set(ours) == {"publish", "update"}
    assert ours["publish"].parent is None, "a version's trace is not its training run's"
    for span in ours.values():
        assert [link.context.span_id for link in span.links] == [step.get_span_context().span_id]
    (read,) = agent.calls(w.ReadCall)
    engines = parse_traceparent(read.traceparent)
    assert engines is not None
    assert engines.span_id == trace.format_span_id(step.get_span_context().span_id), (
        "so the transfer is linked to it as well"
    )


async def test_spans_come_between_answer_and_end(agent: FakeAgent, hub: AsyncHub, heard: Heard) -> None:
    """Their agent may be away; and it is so where nothing is released that would be waited for."""
    shard = await trainer(hub)
    await shard.publish()
    assert heard.spans == []
    agent.stop()
    await until(lambda: len(heard.spans) == 1)
    agent.start()
    agent.frames.clear()
    assert await shard.publish(1) == 1
    await hub.close(release=False)
    assert [span.name for span in await spans(agent, 1)] == ["publish"]


async def test_with_telemetry_off_nothing(agent: FakeAgent, hub: AsyncHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_spans, "_makers", [])
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    shard = await trainer(hub, w=torch.ones(3))
    await shard.publish()
    await hub.close()
    assert traced(agent) == []
    assert [call.traceparent for call in agent.calls(w.PublishCall)] == [None]


def test_importing_and_using_the_sdk_configures_no_provider() -> None:
    """The global provider stays the application's to set."""
    program = (
        "from opentelemetry import trace; import tensorhub._agent.call_spans as t; assert t._private() is not None; "
        "assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
