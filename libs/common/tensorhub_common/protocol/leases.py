"""Questions for leases and digests between agents, and their answers."""

from typing import Final

import msgspec

from tensorhub_common.protocol.plans import ReadPriority, SourceId, Transport

DIGESTS_PAGE_PIECES: Final = 16_384
"""A grant carries the digests of at most this many pieces (256 KiB); the rest is asked for by page."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's agent asks a source's agent to keep (model, version, shard) as it is while it reads."""

    job: str
    model: str
    source: SourceId
    version: int
    root: str | None
    reader: SourceId
    transport: Transport = "local"
    turn: ReadPriority | None = None
    """The turn of the reader's round: a half-filled shard serves only later ones than its own."""
    mapped: bool = False
    """The reader's worker will map the shard's segment, for as long as it wants."""
    device: str = ""
    """With `mapped`, the UUID of the GPU whose memory it maps; empty: the host's."""
    units: bool = False
    """The reader goes by a transfer program, and needs no digests of the source's pieces."""
    nbytes: int = 0
    """How much of it the reader was planned to read, in bytes."""
    base: str | None = None
    """The root of a version whose bytes the reader holds: patches from there to what it wants would do."""
    awaits_patches: bool = True
    """To wait until they are made takes the reader less time than to read the pieces at once."""
    promises: bool = False
    """Of what the source lacks the reader waits only for what is promised, so the source's turn may be any."""
    program: str | None = None
    """The transfer program by which the reader goes: a source that is filled by the same one may tell of its units."""
    hold_s: float = 0.0
    """The ticket is shown later, since the reader has many sources: it should be valid for this long, if it may."""
    wrong: bool = False
    """No lease is asked for: bytes that came under one that held were not those that the log has of the version. The
    source's agent looks whether its memory still has them, and tells the worker if not."""
    again: str = ""
    """The lease that the reader has, and whose ticket it has not shown: hold it for `hold_s` from now on; where that is
    zero, end it."""


class LeaseGrant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """Granted. `ticket` opens the transport once, within `ticket_s`. `digests` is the first page of them."""

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
    """The descriptors that come with the transport's welcome carry a lock, and may be handed on to be mapped."""
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
    is_final: bool = False
    """This reader will never get it there: leave the source out for all of the read."""


class DigestsRequest(msgspec.Struct, frozen=True, kw_only=True):
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
