"""The spans of this process's calls: `publish`, `replicate`, `update`, `submit`.

If the application has a provider of spans of its own, they go there too; otherwise, where OpenTelemetry's standard
variables name an endpoint or a sampler, to a private provider, never the global one. Each finished span is handed to
the agent, those of some calls in one small frame a little later, so that `tensorhub trace` shows it without any server.
OpenTelemetry's SDK is imported only where one of these needs it, and its API not at all.

Invariants: nothing is made, sent or exported before the call's answer has been taken; with `OTEL_SDK_DISABLED` nothing
is made at all, and an update that found nothing newer leaves no span.
"""

import asyncio
import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Final, Protocol

from tensorhub._agent.channel import ChannelLost
from tensorhub._agent.process_end import at_child_end
from tensorhub._agent.shards import AttachedShard, ShardSpec
from tensorhub_common.errors import TensorHubError
from tensorhub_common.observability import logs, trace_context
from tensorhub_common.observability.deferred_spans import DeferredSpans, new_span_id, new_trace_id
from tensorhub_common.observability.span_lines import of_record
from tensorhub_common.observability.trace_context import (
    AttributeValue,
    SpanRecord,
    TraceContext,
    finished_span,
    parse_traceparent,
)
from tensorhub_common.protocol.spans import FinishedSpan
from tensorhub_common.protocol.worker import Traced

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

SERVICE: Final = "tensorhub-sdk"

EXIT_S_MAX: Final = 1.0
"""What a process that ends gives the private provider's exporter."""

PUBLISH: Final = "publish"

log = logs.logger(__name__)


class SpanMaker(Protocol):
    """Makes spans of records; `tensorhub_common.telemetry.span_maker` has the one for OpenTelemetry's providers."""

    def new_trace(self, name: str) -> TraceContext:
        """Give out the context of a root span."""

    def make(self, record: SpanRecord) -> None:
        """Make a finished span, and hand it over."""


class _AgentAlone:
    """Makes nothing: the agent gets every span, and no one else does."""

    def new_trace(self, _: str) -> TraceContext:
        return TraceContext(new_trace_id(), new_span_id())

    def make(self, record: SpanRecord) -> None:
        pass


@dataclass(slots=True)
class TracedCall:
    """One call under way. A publication has its context from the beginning, since its agent names it to others."""

    name: str
    began_ns: int
    context: TraceContext | None
    active: TraceContext | None
    """The application's own span, which is linked to."""
    version: int | None = None
    error: str | None = None

    @property
    def traceparent(self) -> str | None:
        """Return what the agent gets: the context of a publication, or the span that is active in an engine."""
        context = self.context or self.active
        return None if context is None else context.traceparent


class Tracing:
    """The spans of one session. It belongs to the event loop that made it."""

    def __init__(self, job: str, hand_over: Callable[[Traced], None], push: Callable[[], None]) -> None:
        """Hand finished spans over; `push` sends what was handed over where the event loop turns no more."""
        self._job, self._hand_over, self._push = job, hand_over, push
        self._loop = asyncio.get_running_loop()
        self._later = DeferredSpans(self._hand_over_made)
        self._made: list[FinishedSpan] = []
        self._provider: TracerProvider | None = None
        self._maker: SpanMaker | None = None
        _tracings.add(self)
        # After the end of the sync SDK's event loops, as below.
        at_child_end(_end_at_exit, order=0)

    @contextmanager
    def call(self, name: str, attachment: AttachedShard) -> Iterator[TracedCall]:
        """Follow a call about a shard, whose `version` is set within when it is answered."""
        maker = self._current()
        context = maker.new_trace(name) if maker is not None and name == PUBLISH else None
        call = TracedCall(name, time.time_ns(), context, _active() if maker is not None else None)
        attachment.traceparent = None
        try:
            yield call
        except BaseException as why:
            call.error = f"{type(why).__name__}: {why}"
            raise
        finally:
            if maker is not None and (call.version is not None or call.error is not None):
                above, ended_ns = parse_traceparent(attachment.traceparent), time.time_ns()
                self._later.add(partial(self._tell, maker, call, attachment, above, ended_ns))

    @contextmanager
    def root(self, name: str, attributes: Mapping[str, AttributeValue]) -> Iterator[TracedCall]:
        """Follow a call that concerns no shard: its span is a root, and others link to it."""
        maker = self._current()
        context = None if maker is None else maker.new_trace(name)
        call = TracedCall(name, time.time_ns(), context, _active() if maker is not None else None)
        try:
            yield call
        except BaseException as why:
            call.error = f"{type(why).__name__}: {why}"
            raise
        finally:
            if maker is not None and context is not None and context.sampled:
                said = {"tensorhub.job": self._job, **attributes}
                self._later.add(partial(self._tell_root, maker, call, context, said, time.time_ns()))

    def flush(self) -> None:
        """Make and hand over what is left: the session ends."""
        self._later.flush()

    def flush_at_exit(self) -> None:
        """The same in the interpreter's last moments: nothing else uses the event loop, unless it turns still."""
        if not self._loop.is_running():
            self._later.flush()
            self._push()

    def _current(self) -> SpanMaker | None:
        """Return the maker of the provider that this process has now; an application may bring its own late."""
        api = _api()
        provider: TracerProvider | None = None if api is None else api.get_tracer_provider()
        if api is None or provider is None or isinstance(provider, api.ProxyTracerProvider):
            return _private()
        if provider is not self._provider:
            self._provider, self._maker = provider, _maker_of(provider)
        return self._maker

    def _tell(
        self, maker: SpanMaker, call: TracedCall, attachment: AttachedShard, above: TraceContext | None, ended_ns: int
    ) -> None:
        """Make the span of a call, and hand it over. `above` is what the agent answered: a publication, a transfer."""
        if call.context is None:
            context = maker.new_trace(call.name) if above is None else above.beside(new_span_id())
        else:
            above = None if above is None or above.trace_id == call.context.trace_id else above
            context = call.context if above is None else above.beside(call.context.span_id)
        if not context.sampled:
            return
        record = self._record(call, attachment.spec, context, above, ended_ns)
        maker.make(record)
        self._made.append(of_record(record, SERVICE, str(os.getpid())))

    def _tell_root(
        self,
        maker: SpanMaker,
        call: TracedCall,
        context: TraceContext,
        attributes: Mapping[str, AttributeValue],
        ended_ns: int,
    ) -> None:
        links = () if call.active is None else (call.active,)
        record = finished_span(
            call.name, context, None, (call.began_ns, ended_ns), attributes, links=links, error=call.error
        )
        maker.make(record)
        self._made.append(of_record(record, SERVICE, str(os.getpid())))

    def _hand_over_made(self) -> None:
        made, self._made = self._made, []
        # With the agent away it will not show these spans; an exporter has them all the same.
        if made:
            with suppress(ChannelLost, TensorHubError):
                self._hand_over(Traced(spans=tuple(made)))

    def _record(
        self, call: TracedCall, where: ShardSpec, context: TraceContext, parent: TraceContext | None, ended_ns: int
    ) -> SpanRecord:
        attributes: dict[str, AttributeValue] = {
            "tensorhub.job": self._job,
            "tensorhub.model": where.model,
            "tensorhub.replica": where.replica,
            "tensorhub.shard": where.shard,
        }
        if call.version is not None:
            attributes["tensorhub.version"] = call.version
        return finished_span(
            call.name,
            context,
            parent,
            (call.began_ns, ended_ns),
            attributes,
            links=() if call.active is None else (call.active,),
            error=call.error,
        )


def _api() -> ModuleType | None:
    """Return OpenTelemetry's API where the application has imported it: without it there is no provider and no span."""
    return sys.modules.get("opentelemetry.trace")


def _maker_of(provider: "TracerProvider") -> SpanMaker | None:
    """Return the maker for an application's provider; None where that makes no spans."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from tensorhub_common.telemetry import span_maker  # noqa: PLC0415 (it needs OpenTelemetry's SDK)

    return span_maker.SpanMaker.of(provider)


def _active() -> TraceContext | None:
    api = _api()
    span = None if api is None else api.get_current_span().get_span_context()
    if api is None or span is None or not span.is_valid:
        return None
    ids = api.format_trace_id(span.trace_id), api.format_span_id(span.span_id)
    return TraceContext(*ids, span.trace_flags.sampled)


# --------------------------------------------------------------------------------------------------- our own provider

_makers: Final[list[SpanMaker | None]] = []
"""Of the private provider, once a call has needed it."""

_last_exports: Final[list["_LastExport"]] = []
"""Of the private provider, once there is one that exports."""

_making: Final = threading.Lock()

_tracings: Final["weakref.WeakSet[Tracing]"] = weakref.WeakSet()


@atexit.register
def _end_at_exit() -> None:
    """Make the spans that are left, and export them within a bound.

    A program need not close its hub. This runs after the end of the sync SDK's event loops: `background` imports this
    module before it registers its own end, and the last to register is the first to be called.
    """
    for each in list(_tracings):
        each.flush_at_exit()
    for export in _last_exports:
        export.end()


def _private() -> SpanMaker | None:
    with _making:
        if not _makers:
            _makers.append(_make_private())
        return _makers[0]


def _make_private() -> SpanMaker | None:
    if trace_context.is_disabled(os.environ):
        return None
    named = [name for name in (*trace_context.ENDPOINTS, trace_context.SAMPLER) if os.environ.get(name)]
    if not named:
        return _AgentAlone()
    try:
        from tensorhub_common.telemetry import process, span_maker  # noqa: PLC0415 (they need OpenTelemetry's SDK)
    except ImportError as error:
        log.warning(
            "spans go to the agent alone: pip install 'tensorhub[telemetry]'", variable=named[0], missing=error.name
        )
        return _AgentAlone()
    provider, exporting = process.make_provider(SERVICE, str(os.getpid()), os.environ)
    if exporting is not None:
        _last_exports.append(_LastExport(provider.shutdown))
    return span_maker.SpanMaker.own(provider, exporting)


class _LastExport:
    """Exports what is left at the end of the process, within a bound: a trainer's end never waits for a collector.

    Its thread is begun at once and waits, since Python 3.12.0 and 3.12.1 begin none while the interpreter ends.
    """

    def __init__(self, shutdown: Callable[[], object]) -> None:
        self._shutdown = shutdown
        self._begin()

    def _begin(self) -> None:
        self._pid, self._is_due = os.getpid(), threading.Event()
        self._thread = threading.Thread(target=self._export, name="tensorhub-spans", daemon=True)
        self._thread.start()

    def _export(self) -> None:
        # As long as the process lives; a daemon thread holds no process up.
        self._is_due.wait()
        self._shutdown()

    def end(self) -> None:
        """Export, and wait for that no longer than `EXIT_S_MAX`."""
        if self._pid != os.getpid():
            # A fork has no thread but the one that forked.
            try:
                self._begin()
            except RuntimeError:
                # One of those two Pythons: without a thread the export could not be bounded, so these spans are lost.
                return
        self._is_due.set()
        self._thread.join(EXIT_S_MAX)
