"""What a worker reports to the script, one JSON object a line. `at` is CLOCK_MONOTONIC, which all processes share."""

import msgspec


class Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="report"):
    at: float


class OfCall(Report, frozen=True, kw_only=True):
    """Of one call; `margin_s` is what the SDK states to need beyond the caller's bound."""

    number: int
    call: str
    shard: int | None
    bound_s: float
    margin_s: float


class Begun(OfCall, frozen=True, kw_only=True, tag="begun"):
    """A call begins."""


class Ended(OfCall, frozen=True, kw_only=True, tag="ended"):
    """A call has returned or raised. `outcome` is "done", or the name of the error."""

    took_s: float
    outcome: str
    message: str = ""


class Found(Report, frozen=True, kw_only=True, tag="found"):
    """The worker has registered its shards, and found this version (or none) in each."""

    versions: dict[int, int | None]
    fresh: bool


class Compared(Report, frozen=True, kw_only=True, tag="compared"):
    """A shard was compared with what its version must be. `moment`: "commit", "held", "found" or "published"."""

    shard: int
    version: int
    nbytes: int
    moment: str
    wrong: str | None


class Published(Report, frozen=True, kw_only=True, tag="published"):
    """All shards have published; the calls had begun at `began_at`."""

    version: int
    began_at: float


class Closed(Report, frozen=True, kw_only=True, tag="closed"):
    """The worker was asked to end, has released its shards, and ends."""


AnyReport = Begun | Ended | Found | Compared | Published | Closed
