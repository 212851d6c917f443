"""The keeper of finished spans: nobody waits for it, nothing breaks it, and it counts what it drops."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import structs
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.util.types import AnyValue
from tests.unit.span_places import place_at

from tensorhub_common.observability.span_lines import TEXT_CHARS_MAX
from tensorhub_common.observability.trace_context import finished_span
from tensorhub_common.protocol.spans import FinishedSpan, SpanLink
from tensorhub_common.telemetry import span_store
from tensorhub_common.telemetry.span_files import SpanFiles
from tensorhub_common.telemetry.span_maker import SpanMaker
from tensorhub_common.telemetry.span_store import QUEUE_SPANS_MAX, SpanStore

RESOURCE = Resource.create({"service.name": "tensorhub-agent", "service.instance.id": "agent-0"})
HANDED = FinishedSpan(
    trace="0af7651916cd43dd8448eb211c80319c",
    span="b7ad6b7169203331",
    name="update",
    service="tensorhub-sdk",
    instance="4242",
    start_ns=1,
    end_ns=2,
    attributes={"tensorhub.version": 12},
    links=(SpanLink(trace="0af7651916cd43dd8448eb211c80319c", span="00f067aa0ba902b7"),),
)


class Slow(SpanFiles):
    """Files whose disk answers when the test says so."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 1 << 20)
        self.go = threading.Event()
        self.writers: set[str] = set()

    def append(self, spans: object) -> int | None:
        self.writers.add(threading.current_thread().name)
        assert self.go.wait(60)
        return super().append(spans)  # type: ignore[arg-type]


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[SpanStore]:
    made = SpanStore(SpanFiles(tmp_path / "spans", 1 << 20))
    yield made
    made.shutdown()


def provider_of(keeper: SpanStore) -> TracerProvider:
    provider = TracerProvider(resource=RESOURCE, shutdown_on_exit=False)
    provider.add_span_processor(keeper)
    return provider


def test_a_record_is_found_as_the_span_that_others_would_make_of_it(tmp_path: Path) -> None:
    keeper = SpanStore(SpanFiles(tmp_path / "spans", 1 << 20), "agent", "a-0")
    record = finished_span(
        "read",
        place_at(0xA, 0xB),
        place_at(0xA, 0xC),
        (5, 4),
        {"tensorhub.bytes": 7, "tensorhub.transports": ("local", "ucxx"), "long": "x" * 5_000},
        links=(place_at(0xD, 0xE),),
        error="lost: " + "x" * 5_000,
    )
    maker = SpanMaker.own(TracerProvider(resource=RESOURCE, shutdown_on_exit=False), keeper, keeper.take)
    assert maker is not None
    maker.make(record)
    kept, made = sorted(everything(keeper), key=lambda span: span.service)
    keeper.shutdown()
    assert (kept.service, kept.instance) == ("agent", "a-0")
    assert kept == structs.replace(made, service="agent", instance="a-0")
    assert (kept.span, kept.parent, kept.end_ns, len(kept.attributes["long"])) == (  # type: ignore[arg-type]
        "000000000000000b", "000000000000000c", 5, 1_000,
    )  # fmt: skip


def everything(keeper: SpanStore) -> list[FinishedSpan]:
    return keeper.newest(b"", lambda _: True, 100_000)[0]


def test_a_finished_span_is_found_as_it_was(keeper: SpanStore) -> None:
    tracer = provider_of(keeper).get_tracer("test")
    with tracer.start_as_current_span("publish") as other:
        pass
    link = trace.Link(other.get_span_context())
    with tracer.start_as_current_span("transfer") as parent:
        given: dict[str, AnyValue] = {
            "tensorhub.bytes": 7,
            "tensorhub.transports": ("local", "ucxx"),
            "long": "x" * 5_000,
            "on": True,
        }
        with tracer.start_as_current_span("read", attributes=given, links=[link]):
            pass
    with pytest.raises(KeyError), tracer.start_as_current_span("plan"):
        raise KeyError("no planner")
    plan, transfer, read, publish = everything(keeper)
    assert (read.trace, read.parent) == (transfer.trace, transfer.span)
    assert (read.service, read.instance, transfer.parent) == ("tensorhub-agent", "agent-0", None)
    assert parent.get_span_context().span_id == int(transfer.span, 16)
    assert read.attributes == {**given, "long": "x" * TEXT_CHARS_MAX}
    assert read.links == (SpanLink(trace=publish.trace, span=publish.span),)
    assert transfer.start_ns <= read.start_ns <= read.end_ns <= transfer.end_ns
    assert (read.error, plan.error) == (None, "KeyError: 'no planner'")


def test_a_span_of_another_process_is_kept_beside_ours_and_one_that_is_too_long_dropped(keeper: SpanStore) -> None:
    keeper.take(HANDED)
    keeper.take(structs.replace(HANDED, error="x" * 5_000))
    keeper.take(structs.replace(HANDED, attributes={str(key): "x" * 900 for key in range(100)}))
    cut, whole = everything(keeper)
    assert whole == HANDED
    assert (cut.error, keeper.dropped) == ("x" * TEXT_CHARS_MAX, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"trace": "0"},
        {"span": "G" * 16},
        {"parent": "1"},
        {"start_ns": "now"},
        {"name": None},
        {"links": 5},
        {"links": [{"trace": "1", "span": "2"}]},
        {"attributes": {"a": {"b": 1}}},
    ],
)
def test_what_is_no_span_can_t_come_over_a_wire(change: dict[str, object]) -> None:
    body = msgspec.json.encode({**msgspec.to_builtins(HANDED), **change})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=FinishedSpan)


def ends(keeper: SpanStore, spans: int = 1) -> None:
    """End so many spans of the keeper's provider."""
    tracer = provider_of(keeper).get_tracer("test")
    for _ in range(spans):
        tracer.start_span("read").end()


def written(directory: Path) -> int:
    return len(SpanFiles(directory, 1 << 20).newest(b"read", lambda _: True, 10)[0])


def test_whoever_ends_a_span_never_waits_for_the_disk_and_a_full_queue_drops(tmp_path: Path) -> None:
    files = Slow(tmp_path)
    keeper = SpanStore(files)
    ends(keeper, QUEUE_SPANS_MAX + 100)
    assert keeper.dropped == 100
    assert len(keeper._queue) <= QUEUE_SPANS_MAX
    assert files.writers <= {"span-keeper"}
    files.go.set()
    keeper.shutdown()
    keeper._thread.join(60)
    assert written(tmp_path) == 10


def test_a_directory_that_cant_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "spans").write_text("in the way")
    keeper = SpanStore(SpanFiles(tmp_path / "spans", 1 << 20))
    with caplog.at_level(logging.WARNING):
        for count in range(1, 4):
            ends(keeper)
            assert keeper.force_flush()
            assert keeper.dropped == count
    keeper.shutdown()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(tmp_path / "spans") in caplog.text


def test_the_first_span_is_written_soon_and_the_next_ones_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_store, "LOOK_EVERY_S", 0.002)
    keeper = SpanStore(SpanFiles(tmp_path, 1 << 20))
    looks, wait = threading.Semaphore(0), keeper._closed.wait

    def looking(timeout: float | None = None) -> bool:
        looks.release()
        return wait(timeout)

    monkeypatch.setattr(keeper._closed, "wait", looking)
    for number in (1, 2):
        keeper.take(finished_span("read", place_at(1, number), None, (1, 2), {}))
        for _ in range(10):
            assert looks.acquire(timeout=120)
        assert written(tmp_path) == 1
    keeper.shutdown()
    assert written(tmp_path) == 2


def test_a_span_that_is_no_text_costs_itself_alone(keeper: SpanStore, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("before", "half a surrogate: \ud800", "after"):
        keeper.take(finished_span("read", place_at(1, 2), None, (1, 2), {"text": text}))
    with caplog.at_level(logging.WARNING):
        assert [span.attributes["text"] for span in everything(keeper)] == ["after", "before"]
    assert keeper.dropped == 1
    assert len(caplog.records) == 1


def test_a_full_disk_costs_spans_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """/dev/full takes no byte, as a full disk."""

    class Full(SpanFiles):
        def _append(self, chunk: bytes) -> None:
            with Path("/dev/full").open("wb", buffering=0) as full:
                full.write(chunk)

    keeper = SpanStore(Full(Path("/dev/shm"), 1 << 20))  # noqa: S108 (only locked)
    with caplog.at_level(logging.WARNING):
        ends(keeper)
        assert keeper.force_flush()
    assert keeper.dropped == 1
    assert "No space left" in caplog.text
    keeper.shutdown()


def test_shutdown_writes_what_is_left_and_returns_within_its_bound(tmp_path: Path) -> None:
    keeper = SpanStore(SpanFiles(tmp_path, 1 << 20))
    ends(keeper)
    keeper.shutdown()
    assert written(tmp_path) == 1
    stuck = Slow(tmp_path)
    keeper = SpanStore(stuck)
    ends(keeper)
    keeper.shutdown()
    assert keeper._thread.is_alive()
    stuck.go.set()
    keeper._thread.join(60)
    assert not keeper._thread.is_alive()
