"""Messages between reader, planner and source about one read, and the packed form of a plan. Pure.

A reader's agent sends the planner a `PlanRequest` and receives a `Plan` or a `Refusal`. It sends each source's agent a
`LeaseRequest`. The grant carries the digests of the source's pieces and a single-use ticket, which opens the transport.

A plan with thousands of sources names each source by agent, layout and root. Such a plan is larger than NATS allows
(1 MiB by default); compressed it is a small part of that. `packed` compresses a large answer. The planner sends the
packed form only to a reader that says it can read it (`PlanRequest.packs`). Agents of older releases receive the plain
form.

Invariants:
- The first bytes of a packed plan differ from those of any JSON text.
- Unpacking produces at most `PLAN_BYTES_MAX` bytes.
"""

from typing import Final, Literal

import msgspec
import zstandard

from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.ranges import Range

PLAN_ASK_S: Final = 0.9
"""Who asks for a plan has given up after this, a little before a read asks again: a planner drops what is older."""

SHARES_MAX: Final = 4096
"""Limit of a plan's sources: a shard may consist of parts of as many others."""

RATES_MAX: Final = 64
"""Limit of the links whose rates a demand has."""

Transport = Literal["local", "ucxx"]


class SourceId(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False, cache_hash=True):
    """A shard in the memory of one incarnation of an agent."""

    agent: str
    incarnation: int
    replica: str
    shard: int


class ReadPriority(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """When a replica's round was decided: a place in the log, and the round where one command decided several.

    All turns of a model are in one order. A half-filled replica serves only those whose turn is later (`has_priority`).
    """

    decided: int
    round: int


def has_priority(source: ReadPriority, reader: ReadPriority | None) -> bool:
    """Tell whether a half-filled source may serve a reader.

    A reader thus waits only for a source of an earlier turn, and no chain of waiting comes back to itself.
    """
    return reader is not None and source < reader


class LinkRate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How fast bytes came to a reader's agent over a link, as it has measured."""

    link: str
    """As the planner named it in a share."""
    transport: Transport
    bps: int
    """Bytes in a second."""
    samples: int
    age_s: float


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One shard wants a version. `pieces` in numbers of the canonical pieces of its own layout; None means all."""

    model: str
    version: int
    replica: str
    shard: int
    agent: str
    root: str | None
    at_seq: int
    """The planner folds the log up to this sequence before it answers."""
    pieces: tuple[Range, ...] | None = None
    avoid: tuple[SourceId, ...] = ()
    """Sources that failed this read."""
    turn: ReadPriority | None = None
    """The turn of the reader's round; without it only holders that are ready may be named."""
    mapped: bool = False
    """The memory of one ready holder on the reader's host is to be mapped, and nothing copied."""
    program: str | None = None
    """The read goes by this transfer program, and `pieces` are in numbers of its units."""
    rates: tuple[LinkRate, ...] = ()
    """What the reader's agent has measured, at most `RATES_MAX` rows: no planner need remember it."""
    promises: bool = False
    """The reader knows what promises are, so it may be sent to those of its group that cross to the site for it."""
    uncrossed: tuple[SourceId, ...] = ()
    """Of the reader's group, who does not bring these pieces over to the site, though it would be its part."""
    packs: bool = False
    """The reader can read an answer that is compressed (`packed`)."""
    crossers: tuple[SourceId, ...] = ()
    """The reader's group, as its first plan had it: what is shared out anew is so among the same ones, also after
    losses and new ready sources."""


class Share(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the demander reads from one source: pieces of its own layout, in the order in which to ask for them.

    Where the plan names a program they are units of that.
    """

    source: SourceId
    transport: Transport
    pieces: tuple[Range, ...]
    nbytes: int
    why: str
    layout: str | None = None
    """The source's layout, as the program names it."""
    root: str | None = None
    """By the log the root of what the source holds, where that is not the reader's own."""
    link: str = ""
    """What the bytes come by; what the reader gets over it, it tells under this name. Empty: it tells nothing."""
    far: bool = False
    """It is in another site: no other source takes over what a nearer one has promised."""
    streams: int = 1
    """The number of sessions that carry it side by side."""
    crosses: bool = False
    """It is half-filled, of the reader's own group, and brings these pieces over to the site for all of the group."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag="plan", gc=False):
    """Every piece of the demand from exactly one source."""

    version: int
    shares: tuple[Share, ...]
    why: str
    crossers: tuple[SourceId, ...] = ()
    """Those of the reader's site that bring a part over each, it among them; it says so when it asks again."""
    program: str | None = None
    """The digest of the transfer program by which a shard of another layout than its sources' is filled."""
    unregistered: tuple[str, ...] = ()
    """To one shard of a replica: tensors of the version of which none of its shards has anything, the first of
    `unregistered_count`."""
    unregistered_count: int = 0
    """How many they are; 0 to the other shards."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """No plan. `error` is the error class that the caller should see."""

    error: str
    reason: str
    is_held: bool | None = None
    """Whether the log counts a holder of the version from which the reader could read; None: the planner can't say."""


PlanAnswer = Plan | Refusal


PACK_BYTES_MIN: Final = 64 * 1024
"""Shorter answers go as they are: most plans name a handful of sources."""

PLAN_BYTES_MAX: Final = 64 * 1024 * 1024
"""Limit of an uncompressed plan's bytes."""

MAGIC: Final = b"\x28\xb5\x2f\xfd"
"""What each frame of zstd begins with."""

ZSTD_LEVEL: Final = 1
"""It takes some milliseconds for a plan of 4,096 sources, in the planner's loop."""


def packed(answer: bytes) -> bytes:
    """Return the message for an answer to somebody who can read packed ones."""
    return answer if len(answer) < PACK_BYTES_MIN else zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(answer)


def unpacked(message: bytes) -> bytes:
    """Return the answer in a message. Raises `BadCommand` where it is damaged, or inflates beyond its bound."""
    if not message.startswith(MAGIC):
        return message
    try:
        if zstandard.get_frame_parameters(message).content_size > PLAN_BYTES_MAX:
            raise BadCommand(f"a plan has more than {PLAN_BYTES_MAX} bytes")
        return zstandard.ZstdDecompressor().decompress(message, max_output_size=PLAN_BYTES_MAX)
    except zstandard.ZstdError as why:
        raise BadCommand(f"a packed plan can't be read: {why}") from None
