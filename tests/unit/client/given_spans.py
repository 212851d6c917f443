"""Spans as the processes of a hub make them: a version, and its way to a replica that loses a source."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from tensorhub_common.protocol.spans import Attribute, FinishedSpan, SpanLink

TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
BEGIN_NS: Final = 1_763_692_800_000_000_000
MS: Final = 1_000_000


def span_id(number: int) -> str:
    return f"{number:016x}"


@dataclass
class Story:
    """Makes spans with times in milliseconds."""

    trace: str = TRACE
    spans: list[FinishedSpan] = field(default_factory=list)

    def add(
        self,
        number: int,
        parent: int | None,
        name: str,
        where: str,
        from_ms: float,
        to_ms: float,
        *,
        error: str | None = None,
        links: tuple[SpanLink, ...] = (),
        about: Mapping[str, Attribute] = MappingProxyType({}),
    ) -> FinishedSpan:
        service, _, instance = where.partition(" ")
        span = FinishedSpan(
            trace=self.trace,
            span=span_id(number),
            parent=None if parent is None else span_id(parent),
            name=name,
            service=f"tensorhub-{service}",
            instance=instance,
            start_ns=BEGIN_NS + round(from_ms * MS),
            end_ns=BEGIN_NS + round(to_ms * MS),
            error=error,
            attributes={f"tensorhub.{key}": value for key, value in about.items()},
            links=links,
        )
        self.spans.append(span)
        return span


ABOUT: Final[Mapping[str, Attribute]] = {"job": "run-7", "model": "policy", "version": 12, "shard": 0}
LOST: Final = "lost: its connection was reset"
ENDED: Final[Mapping[str, Attribute]] = {
    **ABOUT,
    "replica": "rollout-0",
    "bytes": 1 << 28,
    "pieces": 64,
    "retries": 3,
    "sources": 2,
    "transports": ("local", "ucxx"),
}
OF_LOST: Final[Mapping[str, Attribute]] = {
    "transport": "ucxx",
    "why": "the same site; number 1 of 2 there by load",
    "source.agent": "agent-2",
    "bytes": 50_000_000,
    "pieces": 12,
    "retries": 3,
    "GBps": 1.25,
    "end": LOST,
}
OF_DONE: Final[Mapping[str, Attribute]] = {
    "transport": "local",
    "why": "the same host",
    "source.agent": "agent-0",
    "bytes": 218_435_456,
    "pieces": 52,
    "retries": 0,
    "GBps": 1.21,
    "end": "done",
}


def one_lost_source() -> list[FinishedSpan]:
    """A publication, a transfer that lost one of two sources, and another replica's transfer of the same version."""
    story = Story()
    story.add(1, None, "publish", "sdk 4242", 0, 30)
    story.add(2, 1, "publish.agent", "agent agent-0", 1, 29)
    story.add(3, 2, "digest", "agent agent-0", 1, 25)
    story.add(4, 1, "version.published", "registry registry-0", 26, 28)
    story.add(16, 1, "transfer", "agent agent-1", 40, 240, about=ENDED)
    story.add(17, 16, "update", "sdk 4243", 40, 241)
    story.add(18, 16, "round", "agent agent-1", 40, 44)
    story.add(19, 16, "plan", "agent agent-1", 44, 48)
    story.add(20, 19, "planner.plan", "planner planner-0", 45, 47)
    story.add(21, 16, "lease", "agent agent-1", 48, 50)
    story.add(22, 21, "lease.grant", "agent agent-0", 48.5, 48.54)
    story.add(23, 16, "read", "agent agent-1", 50, 90, error=LOST, about=OF_LOST)
    story.add(24, 16, "read", "agent agent-1", 50, 230, about=OF_DONE)
    story.add(25, 16, "verify", "agent agent-1", 230, 231)
    story.add(26, 16, "ready", "agent agent-1", 231, 240)
    story.add(32, 1, "transfer", "agent agent-3", 41, 300, about={**ABOUT, "replica": "rollout-1"})
    story.add(33, 32, "read", "agent agent-3", 60, 290, about={"source.agent": "agent-0", "bytes": 1 << 28})
    return story.spans
