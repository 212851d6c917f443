"""Spans made of records: ids as they were given out, the provider's own sampler, and no harm to who goes on."""

import asyncio
import os
import random
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler
from opentelemetry.trace import StatusCode
from tests.bounds import WAIT_S
from tests.unit.span_places import place_at

from tensorhub_common.observability import deferred_spans
from tensorhub_common.observability.deferred_spans import (
    STORIES_MAX,
    TURN_STORIES_MAX,
    DeferredSpans,
    flush_deferred_spans,
    new_span_id,
    new_trace_id,
)
from tensorhub_common.observability.span_cost import CpuAccount
from tensorhub_common.observability.trace_context import SpanRecord, finished_span
from tensorhub_common.telemetry.process import make_provider
from tensorhub_common.telemetry.span_maker import SpanMaker

PLACE, PARENT, OTHER = place_at(1, 2), place_at(1, 3), place_at(4, 5)


class Heard(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def maker(sampler: Sampler | None = None) -> tuple[SpanMaker, Heard]:
    provider, heard = TracerProvider(sampler=sampler, shutdown_on_exit=False), Heard()
    provider.add_span_processor(heard)
    made = SpanMaker.of(provider)
    assert made is not None
    return made, heard


def record(error: str | None = None) -> SpanRecord:
    return finished_span("read", PLACE, PARENT, (10, 30), {"tensorhub.bytes": 7}, links=(OTHER,), error=error)


def test_a_span_is_as_its_record_says() -> None:
    made, heard = maker()
    made.make_all([record(), record(error="lost")])
    good, bad = heard.spans
    context = good.get_span_context()
    assert context is not None
    assert (context.trace_id, context.span_id) == (1, 2)
    assert good.parent is not None
    assert good.parent.span_id == 3
    assert [link.context.span_id for link in good.links] == [5]
    assert (good.start_time, good.end_time, dict(good.attributes or {})) == (10, 30, {"tensorhub.bytes": 7})
    assert good.status.status_code is StatusCode.UNSET
    assert (bad.status.status_code, bad.status.description) == (StatusCode.ERROR, "lost")


def test_the_sampler_decides_about_a_new_trace_and_without_a_provider_there_is_no_maker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not maker(ALWAYS_OFF)[0].new_trace("publish").sampled
    assert maker()[0].new_trace("publish").sampled
    assert SpanMaker.of(trace.NoOpTracerProvider()) is None
    assert SpanMaker.of(make_provider("agent", "a-0", {})[0]) is not None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert SpanMaker.of(make_provider("agent", "a-0", {})[0]) is None


async def wait_until_told(later: DeferredSpans) -> None:
    """Wait until all that was added is told."""
    all_told = asyncio.Event()
    later.add(all_told.set)
    async with asyncio.timeout(WAIT_S):
        await all_told.wait()


async def test_stories_are_told_later_a_few_at_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_spans, "SOON_S", 0.0)
    told, later = list[int](), DeferredSpans()
    for number in range(3 * TURN_STORIES_MAX):
        later.add(partial(told.append, number))
    assert told == [], "whoever waits for an answer has it first"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(told) <= TURN_STORIES_MAX
    await wait_until_told(later)
    assert told == list(range(3 * TURN_STORIES_MAX))


async def test_where_stories_end_all_the_time_their_spans_are_made_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first after a quiet time are made soon; the next wait until so much time has passed since then."""
    monkeypatch.setattr(deferred_spans, "SOON_S", 0.0)
    told, later = list[int](), DeferredSpans()
    later.add(partial(told.append, 1))
    await wait_until_told(later)
    began = asyncio.get_running_loop().time()
    later.add(partial(told.append, 2))
    assert later._timer is not None
    assert began < later._timer.when() <= began + deferred_spans.LATER_S
    assert told == [1]
    later.flush()
    assert told == [1, 2]


async def test_who_asks_gets_what_waits_and_the_end_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_spans, "SOON_S", 3600.0)
    told: list[str] = []
    later = DeferredSpans(lambda: told.append("all"))
    for number in range(TURN_STORIES_MAX + 1):
        later.add(partial(told.append, str(number)))
    flush_deferred_spans()
    stories = [str(number) for number in range(TURN_STORIES_MAX)]
    assert told == [*stories, str(TURN_STORIES_MAX), "all"]
    flush_deferred_spans()
    assert len(told) == TURN_STORIES_MAX + 2


async def test_so_many_stories_wait_and_one_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    told, later = list[int](), DeferredSpans()
    for number in range(STORIES_MAX + 1):
        later.add(partial(told.append, number))
    later.add(lambda: told.append(1 // 0))
    later.flush()
    assert (len(told), told[0], told[-1]) == (STORIES_MAX - 1, 2, STORIES_MAX)
    later.add(lambda: told.append(1 // 0))
    later.add(partial(told.append, -1))
    later.flush()
    assert told[-1] == -1
    assert "making spans failed" in caplog.text


def test_processor_time_counts_and_waiting_does_not_and_threads_are_summed() -> None:
    account = CpuAccount()
    with account.counted():
        threading.Event().wait(0.05)
    assert account.spent_s < 0.04

    def part() -> None:
        with suppress(ZeroDivisionError), account.counted():
            until = time.thread_time() + 0.02
            while time.thread_time() < until:
                pass
            _ = 1 / 0

    threads = [threading.Thread(target=part) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert account.spent_s >= 0.06, "who fails counts, too"


def test_a_program_that_seeds_chance_gets_its_numbers_and_ids_of_its_own() -> None:
    """Trainers seed `random`, two of them often alike."""
    random.seed(3)
    expected = random.random()
    ids = set()
    for _ in range(2):
        random.seed(3)
        ids |= {new_trace_id(), new_span_id()}
        assert random.random() == expected
    assert len(ids) == 4


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_draws_other_ids_than_its_parent() -> None:
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, new_trace_id().encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        assert told.read() != new_trace_id()
    os.wait()
