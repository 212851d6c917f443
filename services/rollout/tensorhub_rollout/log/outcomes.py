"""What the fold makes of one entry: what changed, or why nothing did."""

import msgspec

from tensorhub_common.protocol.rollout.entries import RequestId, TokensKept


class Attached(msgspec.Struct, frozen=True, tag=True):
    """The attachment is live. `replaced` is the one that was before it. `dropped` were open in an earlier epoch."""

    name: str
    epoch: int
    replaced: int | None = None
    dropped: tuple[RequestId, ...] = ()


class Submitted(msgspec.Struct, frozen=True, tag=True):
    """The requests that were opened, and the ids of groups that were known: nothing was opened for these."""

    opened: tuple[RequestId, ...]
    known: tuple[str, ...] = ()


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """The requests that were open."""

    requests: tuple[RequestId, ...]


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """The requests that are done since this entry."""

    requests: tuple[RequestId, ...]


class Leads(msgspec.Struct, frozen=True, tag=True):
    """The manager leads under this term."""

    term: int
    manager: str


class Kept(msgspec.Struct, frozen=True, tag=True):
    """The parts of a checkpoint that count."""

    parts: tuple[TokensKept, ...]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The requests that ended by this entry; others of it had ended before, or belong to an older attempt."""

    requests: tuple[RequestId, ...]


class Scaled(msgspec.Struct, frozen=True, tag=True):
    """The wish stands."""


class Repeated(msgspec.Struct, frozen=True, tag=True):
    """The sender said this before: at entry `of`, which had this outcome."""

    of: int
    error: str | None = None
    message: str | None = None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The entry changes nothing. `error` is the code of an error of TensorHub."""

    error: str
    message: str


Outcome = Attached | Submitted | Cancelled | Acknowledged | Leads | Kept | Ended | Scaled | Repeated | Refused


class Folded(msgspec.Struct, frozen=True):
    """The outcome of one entry, and the payloads that nothing names any more."""

    outcome: Outcome
    freed: tuple[str, ...] = ()
