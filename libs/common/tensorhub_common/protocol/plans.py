"""What reader, planner and source say to each other about one read.

A reader's agent asks the planner with a `Demand` and gets a `Plan` or a `Refusal`. It asks each source's agent for a
lease with a `LeaseAsk`; the grant carries a single-use ticket, which opens the transport, and the digests of the
source's pieces.
"""

from typing import Final, Literal

import msgspec

DIGESTS_PAGE_PIECES: Final = 16_384
"""A grant carries the digests of so many pieces at most (256 KiB); the rest is asked for by page."""

PLAN_ASK_S: Final = 0.9
"""Who asks for a plan has given up after this, a little before a read asks again: a planner drops what is older."""

SHARES_MAX: Final = 4096
"""A plan reads from at most so many sources: a shard may consist of parts of as many others."""

RATES_MAX: Final = 64
"""A demand tells the rates of so many links at most."""

Transport = Literal["local", "ucxx"]

Range = tuple[int, int]
"""(first, count) of consecutive piece numbers."""


class SourceId(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False, cache_hash=True):
    """A shard in the memory of one incarnation of an agent."""

    agent: str
    incarnation: int
    replica: str
    shard: int


class Turn(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """When a replica's round was decided: a place in the log, and the round where one command decided several.

    All turns of a model are in one order. A half-filled replica serves only those whose turn is later (`precedes`).
    """

    decided: int
    round: int


def precedes(source: Turn, reader: Turn | None) -> bool:
    """Tell whether a half-filled source may serve a reader.

    So whoever waits for bytes waits for somebody of an earlier turn, and no chain of waiting comes back to itself.
    """
    return reader is not None and source < reader


class LinkRate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How fast bytes came to a reader's agent over a link, as it has measured: in so many samples, the last so old."""

    link: str
    """As the planner named it in a share."""
    transport: Transport
    bps: int
    """Bytes in a second."""
    samples: int
    age_s: float


class Demand(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    turn: Turn | None = None
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
    """The reader can read an answer that is compressed (`plan_packing.py`)."""
    crossers: tuple[SourceId, ...] = ()
    """The reader's group, as its first plan had it: what is shared out anew is so among the same ones, whoever was lost
    or has become ready meanwhile."""


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
    """It stands in another site: nobody takes over from a nearer source what it has promised."""
    streams: int = 1
    """So many sessions carry it side by side."""
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


class LeaseAsk(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's agent asks a source's agent to keep (model, version, shard) as it is while it reads."""

    job: str
    model: str
    source: SourceId
    version: int
    root: str | None
    reader: SourceId
    transport: Transport = "local"
    turn: Turn | None = None
    """The turn of the reader's round: a half-filled shard serves only later ones than its own."""
    mapped: bool = False
    """The reader's worker will map the shard's segment, for as long as it wants."""
    units: bool = False
    """The reader goes by a transfer program, and needs no digests of the source's pieces."""
    nbytes: int = 0
    """So much of it the reader was planned to read."""
    base: str | None = None
    """The root of a version whose bytes the reader holds: patches from there to what it wants would do."""
    awaits_patches: bool = True
    """To wait until they are made takes the reader less time than to read the pieces at once."""
    promises: bool = False
    """Of what does not stand there yet the reader waits only for what is promised, so the source's turn may be any."""
    program: str | None = None
    """The transfer program by which the reader goes: a source that is filled by the same one may tell of its units."""
    hold_s: float = 0.0
    """The ticket is shown later, since the reader has many sources: it is to be good for so long, if it may."""
    wrong: bool = False
    """No lease is asked for: bytes that came under one that held were not those that the log has of the version. The
    source's agent looks whether its memory still has them, and tells the worker if not."""
    again: str = ""
    """The lease that the reader has, and whose ticket it has not shown: hold it for `hold_s` from now on; where that is
    zero, end it."""


class LeaseGrant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """The lease stands. `ticket` opens the transport once, within `ticket_s`. `digests` is the first page of them."""

    lease: str
    ticket: str
    ticket_s: float
    endpoint: str
    """Where the transport listens: a socket's path for "local", address:port for "ucxx"."""
    pieces: int
    digests: bytes
    filling: bool = False
    """The source is being filled with the version: it says over the transport what it has, and gives that."""
    promises: bool = False
    """The source says what it promises, and of what it lacks the reader waits for that alone."""
    program: str | None = None
    """What the source tells of are units of this program, the reader's own; None: pieces of the source's layout."""
    mapped: bool = False
    """The descriptor that comes with the transport's welcome carries a lock, and may be handed on to be mapped."""
    patch_sizes: bytes = b""
    """Of the pieces of the first page, how many bytes their patches have: 4 bytes each, little endian, all ones where
    there is none. Empty: there are no patches from the reader's base."""
    patches_coming: bool = False
    """Patches are being made: the pages of their sizes may be asked for again."""


class LeaseRefusal(msgspec.Struct, frozen=True, kw_only=True, tag="no"):
    """The source does not hold it (any more), or has no room for another reader."""

    reason: str
    is_early: bool = False
    """It may hold it soon: ask again."""


class DigestsAsk(msgspec.Struct, frozen=True, kw_only=True):
    """The page of digests that begins at piece `first`."""

    lease: str
    first: int


class DigestsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of consecutive pieces, and the sizes of their patches; empty when the lease is over."""

    digests: bytes
    patch_sizes: bytes = b""
    patches_coming: bool = False
    """As in the grant."""


LeaseAnswer = LeaseGrant | LeaseRefusal
