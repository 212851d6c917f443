"""A receiver of spans and metrics by OTLP over HTTP: an HTTP server and opentelemetry-proto."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import msgspec
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

WAIT_S: Final = 60.0
LOOK_S: Final = 0.02


class Received(msgspec.Struct, frozen=True):
    """A span as the receiver got it; ids in hex digits, `parent` "" for a root."""

    service: str
    instance: str
    name: str
    trace: str
    span: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    links: tuple[str, ...]
    """The spans linked to."""
    error: str | None


class Receiver(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.gauges: dict[str, int] = {}
        """The last value of each gauge of whole numbers."""
        self._spans: list[Received] = []
        self._lock = threading.Lock()

    @property
    def environ(self) -> dict[str, str]:
        """What a process must have in its environment to export to here, soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def spans(self, job: str) -> list[Received]:
        with self._lock:
            traces = {each.trace for each in self._spans if each.attributes.get("tensorhub.job") == job}
            return [each for each in self._spans if each.trace in traces]

    def wait(self, job: str, enough: Callable[[list[Received]], bool]) -> list[Received]:
        """Return the job's spans once they are enough, or whatever has come at the bound."""
        deadline = time.monotonic() + WAIT_S
        while not enough(found := self.spans(job)) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return found

    @property
    def everything(self) -> list[Received]:
        """All spans so far."""
        with self._lock:
            return list(self._spans)

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            about = {each.key: _value(each.value) for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                with self._lock:
                    self._spans += [_received(about, span) for span in scope.spans]

    def take_metrics(self, request: ExportMetricsServiceRequest) -> None:
        """Keep the gauges of one export."""
        scopes = (scope for resource in request.resource_metrics for scope in resource.scope_metrics)
        for metric in (metric for scope in scopes for metric in scope.metrics):
            for point in metric.gauge.data_points:
                self.gauges[metric.name] = int(point.as_int)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/traces":
            self.server.take(ExportTraceServiceRequest.FromString(body))
        elif self.path == "/v1/metrics":
            self.server.take_metrics(ExportMetricsServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind is not None else None


def _received(about: dict[str, object], span: Span) -> Received:
    failed = span.status.code == Status.STATUS_CODE_ERROR
    return Received(
        service=str(about.get("service.name")),
        instance=str(about.get("service.instance.id")),
        name=span.name,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={each.key: _value(each.value) for each in span.attributes},
        links=tuple(link.span_id.hex() for link in span.links),
        error=span.status.message if failed else None,
    )


@contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as receiver:
        serving = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.02})
        serving.start()
        try:
            yield receiver
        finally:
            receiver.shutdown()
            serving.join(60)


def tree(spans: list[Received]) -> dict[str, str]:
    """Return each span's parent, as "service name" of both; "" above a root, "?" above a span that is not there."""
    by_id = {each.span: each for each in spans}
    return {
        each.span: ""
        if not each.parent
        else f"{by_id[each.parent].service} {by_id[each.parent].name}"
        if each.parent in by_id
        else "?"
        for each in spans
    }
