"""Telemetry: what a log line holds, how a trace crosses NATS, and that nothing outlasts its bound."""

import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from tests.bounds import BUSY_S, WAIT_S

from tensorhub_common.config import settings
from tensorhub_common.observability import logs
from tensorhub_common.telemetry import log_output, process


@pytest.fixture
def provider() -> TracerProvider:
    return process.make_provider("registry", "registry-0", {})[0]


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Give a stream to log to, and put `logging` back as it was afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def start_logs(stream: io.StringIO, **variables: str) -> None:
    environ = {f"TENSORHUB_{name.upper()}": value for name, value in variables.items()}
    log_output.start_logs("registry", "registry-0", settings.load(environ), stream)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


# -------------------------------------------------------------------------------------------------------------- logs


def test_a_json_line_says_when_who_what_and_the_fields(stream: io.StringIO) -> None:
    start_logs(stream, log_format="json")
    logs.logger("tensorhub_registry.app.service").bind(job="run-7").warning("agent lost", agent="a-0", shards=(1, 2))
    (line,) = lines(stream)
    assert str(line.pop("timestamp")).endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "tensorhub_registry.app.service",
        "service": "registry",
        "instance": "registry-0",
        "event": "agent lost",
        "job": "run-7",
        "agent": "a-0",
        "shards": [1, 2],
    }


def test_a_line_within_a_span_carries_its_ids(stream: io.StringIO, provider: TracerProvider) -> None:
    start_logs(stream, log_format="json")
    log = logs.logger("tensorhub_agent.app.service")
    with provider.get_tracer("test").start_as_current_span("transfer") as span:
        log.info("within")
        logging.getLogger("nats").warning("of another library, within")
    log.info("outside")
    ours, theirs, outside = lines(stream)
    context = span.get_span_context()
    for line in (ours, theirs):
        assert line["trace_id"] == trace.format_trace_id(context.trace_id)
        assert line["span_id"] == trace.format_span_id(context.span_id)
    assert "trace_id" not in outside


def test_the_level_holds_for_us_and_others_are_heard_from_warning_on(stream: io.StringIO) -> None:
    start_logs(stream, log_format="json", log_level="debug")
    logs.logger("tensorhub").debug("ours")
    logging.getLogger("nats").info("chatter")
    logging.getLogger("nats").error("trouble %d", 7)
    start_logs(stream, log_format="json", log_level="error")
    logs.logger("tensorhub").warning("not wanted now")
    assert [line["event"] for line in lines(stream)] == ["ours", "trouble 7"]


def test_an_exception_is_written_with_its_traceback_in_both_formats(stream: io.StringIO) -> None:
    for form in ("json", "console"):
        start_logs(stream, log_format=form)
        try:
            raise KeyError(form)  # noqa: TRY301 (the fault is the subject)
        except KeyError:
            logs.logger("tensorhub").exception("it broke")
    first, *rest = stream.getvalue().splitlines()
    assert "KeyError: 'json'" in str(json.loads(first)["exception"])
    assert "it broke" in rest[0]
    assert rest[-1] == "KeyError: 'console'"


def test_console_lines_have_no_colors_where_there_is_no_terminal(stream: io.StringIO) -> None:
    start_logs(stream)
    logs.logger("tensorhub").info("hello", model="policy")
    assert "hello" in stream.getvalue()
    assert "model=policy" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_starting_again_replaces_the_stream(stream: io.StringIO) -> None:
    start_logs(io.StringIO())
    start_logs(stream, log_format="json")
    logs.logger("tensorhub").info("once")
    assert len(lines(stream)) == 1


def test_in_a_process_of_others_a_line_goes_by_their_logging(caplog: pytest.LogCaptureFixture) -> None:
    """The SDK configures nothing: a trainer's own handlers get our lines as text."""
    caplog.set_level(logging.WARNING, logger="tensorhub")
    logs.logger("tensorhub.aio.hub").warning("agent %s is gone", "a-0", wait_s=0.5)
    assert caplog.messages == ["agent a-0 is gone wait_s=0.5"]


# ------------------------------------------------------------------------------------------------------------ traces


def test_the_service_is_named_unless_open_telemetry_s_variable_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.make_provider("agent", "a-0", {})[0].resource.attributes["service.name"] == "agent"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    resource = process.make_provider("agent", "a-0", os.environ)[0].resource
    assert resource.attributes["service.name"] == "mine"
    assert resource.attributes["service.instance.id"] == "a-0"


# ----------------------------------------------------------------------------------------------------------- process

PROGRAM = """
import pathlib, sys, time
from opentelemetry import trace
from tensorhub_common.config import settings
from tensorhub_common.telemetry import log_output, process as telemetry

telemetry.start("registry", "registry-0", settings.load({}), pathlib.Path(sys.argv[2]))
telemetry.start("registry", "registry-0", settings.load({}), pathlib.Path(sys.argv[2]))
with trace.get_tracer("test").start_as_current_span("decide") as span:
    print(trace.format_trace_id(span.get_span_context().trace_id))
begin = time.monotonic()
print(telemetry.shutdown(timeout_s=float(sys.argv[1])))
print(time.monotonic() - begin)
print("exporter" in " ".join(sys.modules))
"""


def run_program(timeout_s: float, environ: Mapping[str, str]) -> tuple[str, bool, float, bool]:
    """Run a program of its own, since a process has one provider of spans for good."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    with tempfile.TemporaryDirectory() as state:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(timeout_s), state],
            env={**clean, **environ},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    trace_id, whole, took_s, exporter = done.stdout.split()
    return trace_id, whole == "True", float(took_s), exporter == "True"


class Collector(ThreadingHTTPServer):
    """Takes spans by OTLP; one that is `stuck` never answers until it is closed."""

    daemon_threads = True

    def __init__(self, *, stuck: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.stuck = stuck
        self.closing = threading.Event()
        self.spans: dict[str, str] = {}

    @property
    def environ(self) -> dict[str, str]:
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.server_port}"}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.stuck:
            self.server.closing.wait(600)
            return
        request = ExportTraceServiceRequest.FromString(body)
        for scope in (scope for resource in request.resource_spans for scope in resource.scope_spans):
            self.server.spans.update({span.trace_id.hex(): span.name for span in scope.spans})
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    with Collector(stuck=request.param) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        serving.start()
        yield server
        server.closing.set()
        server.shutdown()
        serving.join(60)


@pytest.mark.parametrize("collector", [False], indirect=True)
def test_spans_reach_the_collector_that_the_environment_names(collector: Collector) -> None:
    trace_id, whole, _, exporter = run_program(10, collector.environ)
    assert whole
    assert exporter
    assert collector.spans == {trace_id: "decide"}


def test_without_an_endpoint_spans_have_ids_and_no_exporter_is_imported() -> None:
    trace_id, whole, _, exporter = run_program(10, {})
    assert int(trace_id, 16) != 0
    assert whole
    assert not exporter


@pytest.mark.parametrize("collector", [True], indirect=True)
def test_a_collector_that_does_not_answer_holds_up_neither_shutdown_nor_exit(collector: Collector) -> None:
    begin = time.monotonic()
    _, whole, took_s, _ = run_program(0.3, {**collector.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "600"})
    assert not whole
    assert took_s < BUSY_S
    assert time.monotonic() - begin < WAIT_S


def test_shutdown_in_a_process_that_never_started_is_nothing() -> None:
    assert process.shutdown()


@pytest.mark.parametrize(
    ("headers", "ids"),
    [
        ({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}, {"trace_id": "a" * 32, "span_id": "b" * 16}),
        ({"traceparent": "garbage"}, {}),
        ({}, {}),
    ],
)
def test_a_line_that_is_logged_while_a_question_is_answered_names_who_asked(
    headers: dict[str, str], ids: dict[str, str]
) -> None:
    told = logs.REQUEST_HEADERS.set(headers)
    try:
        assert log_output.trace_ids() == ids
    finally:
        logs.REQUEST_HEADERS.reset(told)
    assert log_output.trace_ids() == {}
