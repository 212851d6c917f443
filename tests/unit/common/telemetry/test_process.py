"""Telemetry: what a log line holds, how a trace crosses NATS, and that nothing outlasts its bound."""

import io
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from tests.bounds import BUSY_S, WAIT_S
from tests.kit.otlp_receiver import receiving

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


def test_starting_again_replaces_the_stream_and_has_no_colors_where_there_is_no_terminal(stream: io.StringIO) -> None:
    start_logs(io.StringIO())
    start_logs(stream)
    logs.logger("tensorhub").info("hello", model="policy")
    (line,) = stream.getvalue().splitlines()
    assert "hello" in line
    assert "model=policy" in line
    assert "\x1b" not in line


def test_in_a_process_of_others_a_line_goes_by_their_logging(caplog: pytest.LogCaptureFixture) -> None:
    """The SDK configures nothing: a trainer's own handlers get our lines as text."""
    caplog.set_level(logging.WARNING, logger="tensorhub")
    logs.logger("tensorhub.aio.hub").warning("agent %s is gone", "a-0", wait_s=0.5)
    assert caplog.messages == ["agent a-0 is gone wait_s=0.5"]


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


def test_the_service_is_named_unless_open_telemetry_s_variable_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.shutdown(), "nothing was started here"
    assert process.make_provider("agent", "a-0", {})[0].resource.attributes["service.name"] == "agent"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    resource = process.make_provider("agent", "a-0", os.environ)[0].resource
    assert (resource.attributes["service.name"], resource.attributes["service.instance.id"]) == ("mine", "a-0")


# Processes.

PROGRAM = """
import json, os, pathlib, sys, time
from opentelemetry import metrics, trace
from tensorhub_common.config import settings
from tensorhub_common.telemetry import process as telemetry, process_spans
from tensorhub_common.observability.metrics import METER, observe, unlabelled

for _ in range(2):
    telemetry.start("tensorhub-agent", "agent-0", settings.load(os.environ), pathlib.Path(sys.argv[1]))
observe(metrics.get_meter(METER), "tensorhub.agent.workers", unlabelled(lambda: 7))
with trace.get_tracer("test").start_as_current_span("decide") as span:
    trace_id = trace.format_trace_id(span.get_span_context().trace_id)
begin = time.monotonic()
whole = telemetry.shutdown(float(sys.argv[2]))
print(json.dumps({
    "trace": trace_id, "whole": whole, "took_s": time.monotonic() - begin,
    "kept": process_spans.span_store() is not None,
    "exporter": "trace_exporter" in " ".join(sys.modules), "page": "prometheus_client" in sys.modules,
}))
"""


def run_program(state: Path, environ: Mapping[str, str], timeout_s: float = 10) -> dict[str, Any]:
    """Run a program of its own, since a process has one provider of spans and one of metrics for good."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TENSORHUB_"))}
    arguments = [sys.executable, "-c", PROGRAM, str(state), str(timeout_s)]
    done = subprocess.run(arguments, env={**clean, **environ}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def spans_kept(state: Path) -> str:
    return (state / "spans" / "spans.jsonl").read_text()


def test_spans_reach_the_collector_that_the_environment_names(tmp_path: Path) -> None:
    with receiving() as collector:
        said = run_program(tmp_path, collector.environ)
    assert (said["whole"], said["exporter"], said["page"]) == (True, True, False)
    assert [(span.trace, span.name) for span in collector.everything] == [(said["trace"], "decide")]


def test_metrics_are_pushed_to_the_endpoint_for_metrics_and_spans_are_kept(tmp_path: Path) -> None:
    with receiving() as collector:
        url = f"http://127.0.0.1:{collector.server_port}/v1/metrics"
        said = run_program(tmp_path, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": url, "TENSORHUB_METRICS": "0"})
    assert (said["whole"], said["kept"], said["page"], said["exporter"]) == (True, True, True, False)
    assert (collector.gauges["tensorhub.agent.workers"], collector.everything) == (7, [])
    assert '"name":"decide"' in spans_kept(tmp_path)


def test_without_an_endpoint_spans_have_ids_and_no_exporter_nor_page_is_imported(tmp_path: Path) -> None:
    said = run_program(tmp_path, {})
    assert int(said["trace"], 16) != 0
    assert (said["whole"], said["kept"], said["exporter"], said["page"]) == (True, True, False, False)
    assert said["trace"] in spans_kept(tmp_path)


def test_open_telemetry_s_switch_turns_all_of_it_off(tmp_path: Path) -> None:
    said = run_program(tmp_path, {"OTEL_SDK_DISABLED": "true", "TENSORHUB_METRICS": "0"})
    assert (said["whole"], said["kept"], said["page"]) == (True, False, False)
    assert list(tmp_path.iterdir()) == []


def test_a_collector_that_does_not_answer_holds_up_neither_shutdown_nor_exit(tmp_path: Path) -> None:
    begin = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_TIMEOUT": "600"}
        said = run_program(tmp_path, environ, 0.3)
    assert not said["whole"]
    assert said["took_s"] < BUSY_S
    assert time.monotonic() - begin < WAIT_S
