"""Finished spans, as they are kept, handed over and answered, and the two questions about them.

Every process of the hub keeps its own spans and answers for itself. One form is used in the files, in the answers and
in `tensorhub trace --json`, so its keys are an interface.
"""

import re
from typing import Final, Literal

import msgspec

TRANSFER: Final = "transfer"
"""The name of the span that is one shard's read of one version, from its plan to its end."""

RESPONSE: Final = "response"
"""The name of the span that is one response of a job's rollouts, from its submission to its end in the log."""
QUEUE: Final = "queue"
"""Of a response: it waits for an instance."""
ATTEMPT: Final = "attempt"
"""Of a response: one placement on an instance."""
STORE: Final = "store"
"""Of a response: from its last token to its end in the log."""
DELIVERY: Final = "delivery"
"""Of a response: from its end in the log to its trainer's `done`."""
SUBMIT: Final = "submit"
"""The name of the span that is a trainer's call; its responses are linked to it."""

TRANSFERS_MAX: Final = 1_000
"""Limit of transfers in one process's answer."""

ANSWER_BYTES_MAX: Final = 768 * 1024
"""The spans of one answer, as JSON; it stays below the 1 MiB that NATS takes."""

_TRACE: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_SPAN: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)

Scalar = str | bool | int | float
Attribute = Scalar | tuple[Scalar, ...]


class SpanLink(msgspec.Struct, frozen=True, kw_only=True):
    """Another span that this one has to do with, in this trace or in another."""

    trace: str
    span: str


class FinishedSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A finished span. Times are nanoseconds since 1970; ids are lower-case hexadecimal, as in `traceparent`."""

    trace: str
    span: str
    parent: str | None = None
    name: str
    service: str
    instance: str
    start_ns: int
    end_ns: int
    error: str | None = None
    """What the span failed with; None where it ended well or did not say."""
    attributes: dict[str, Attribute] = {}
    links: tuple[SpanLink, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what can't be a span. Raises ValueError."""
        ids = [(self.trace, self.span), *((link.trace, link.span) for link in self.links)]
        if not all(_TRACE.fullmatch(trace) and _SPAN.fullmatch(span) for trace, span in ids):
            raise ValueError("the ids of a trace and a span are 32 and 16 lower-case hexadecimal digits")
        if self.parent is not None and not _SPAN.fullmatch(self.parent):
            raise ValueError("the id of a parent is 16 lower-case hexadecimal digits")


class TransfersAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Which transfers of this job, or responses of its rollouts, have ended lately? `begins`: how their ids begin.

    A process of a release that knows no responses answers with transfers.
    """

    begins: str = ""
    model: str | None = None
    version: int | None = None
    replica: str | None = None
    limit: int = 20
    kind: Literal["transfer", "response"] = TRANSFER
    group: str | None = None
    """Of responses: those of this group, and of this index in it."""
    index: int | None = None


class SpansAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Which spans belong to this trace, or name it in a link?"""

    trace: str

    def __post_init__(self) -> None:
        """Refuse what is no trace's id. Raises ValueError."""
        if not _TRACE.fullmatch(self.trace):
            raise ValueError("the id of a trace is 32 lower-case hexadecimal digits")


class Spans(msgspec.Struct, frozen=True, kw_only=True, tag="spans"):
    """The spans that one process keeps, newest first. `left_out` of them were too many for one answer."""

    process: str
    spans: tuple[FinishedSpan, ...]
    left_out: int = 0


TRANSFERS: Final = "transfers"


SPANS: Final = "spans"


QUESTIONS_PENDING_MAX: Final = 16
