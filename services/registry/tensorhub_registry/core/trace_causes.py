"""Which span an event names as its cause, where that is not simply its command's. Pure.

A round is often decided by a command of another process: the publication that it waited for, or a holder's return. The
decision therefore names the publication of the decided version. The commands' headers tell which it is as the log is
folded, also in a registry that was just started. The catalog has no traces.
"""

from collections.abc import Hashable, Mapping
from typing import Final, TypeVar

import msgspec

from tensorhub_common.observability.trace_context import PUBLISH_HEADER, TRACEPARENT, TraceContext, context_in
from tensorhub_common.protocol.log.events import AnyEvent, RoundDecided, RoundJoined, VersionPublished

ONE_TRACE_S_MAX: Final = 600.0
"""A transfer that is decided later than this after the publication has a trace of its own, linked to the version's."""

VERSIONS_MAX: Final = 1024
"""Limit of versions whose publications are remembered; the oldest are dropped."""

ROUNDS_MAX: Final = 4096
"""Limit of replicas of which the last shard that joined the round is remembered."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TraceCause(msgspec.Struct, frozen=True):
    """What an event's message carries, and the context of the registry's own span about it."""

    event: VersionPublished | RoundDecided
    headers: Mapping[str, str]
    parent: TraceContext | None
    links: tuple[TraceContext, ...] = ()


class TraceCauses:
    """What one job's fold remembers of traces."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._versions: dict[tuple[str, int], tuple[TraceContext, float]] = {}
        self._joined: dict[tuple[str, str], TraceContext] = {}

    def of(self, group: tuple[AnyEvent, ...], trace: Mapping[str, str]) -> dict[int, TraceCause]:
        """Return the causes of a command's events, by their numbers in the group. `trace`: the command's headers."""
        context = context_in(trace) if trace else None
        found: dict[int, TraceCause] = {}
        for event in group:
            match event:
                case RoundJoined() if context is not None:
                    _remember(self._joined, (event.model, event.replica), context, ROUNDS_MAX)
                case VersionPublished():
                    if context is not None:
                        _remember(self._versions, (event.model, event.version), (context, event.time), VERSIONS_MAX)
                    found[event.i] = TraceCause(event, trace, context)
                case RoundDecided():
                    found[event.i] = self._decided(event)
                case _:
                    pass
        return found

    def _decided(self, event: RoundDecided) -> TraceCause:
        joined = self._joined.get((event.model, event.replica))
        context, at = self._versions.get((event.model, event.version), (None, 0.0))
        if context is not None and event.time - at <= ONE_TRACE_S_MAX:
            parent = context if joined is None else context.beside(joined.span_id)
            return TraceCause(event, {TRACEPARENT: context.traceparent}, parent)
        headers = {} if joined is None else {TRACEPARENT: joined.traceparent}
        if context is None:
            return TraceCause(event, headers, joined)
        return TraceCause(event, {**headers, PUBLISH_HEADER: context.traceparent}, joined, (context,))


def _remember(known: dict[K, V], key: K, value: V, count_max: int) -> None:
    """Keep the latest; the one that was set longest ago goes when there are too many."""
    known.pop(key, None)
    while len(known) >= count_max:
        del known[next(iter(known))]
    known[key] = value
