"""What every transport does.

A transport has two sides in one object. The serving side listens, and accepts readers that show a ticket. The reading
side opens a session with a lease's ticket, and each session brings pieces from one source's segment into memory of this
agent.

A lease lives as long as its session: the session renews it on the data path, so no outage of NATS ends a read, and
either side's end is seen by the other at once. Nothing here decides: whether a ticket is good, whether a lease holds
and where to read instead is for the pure cores.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.encodings.codec_tasks import PatchTargets
from tensorhub_agent.primitives.lease_messages import AvailabilityUpdate
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_agent.storage.device_segments import AnySegment
from tensorhub_agent.storage.mapped_descriptors import LentMemory
from tensorhub_common.errors import BadCommand, TensorHubError
from tensorhub_common.programs.regions import StridedCopies
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.protocol.ranges import Range


class TransportLost(TensorHubError):
    """The source refused the ticket, broke the lease, went away, or the session was closed."""


class TransportSilent(TransportLost):
    """The source has not let the reader in within the bound of the transport: it may be busy, and be asked again."""


class TransportUnavailable(TensorHubError):
    """The host lacks what the transport needs. The agent goes on without it."""


class BeyondGrant(BadCommand):
    """A reader asked for what its ticket does not open."""


@contextlib.asynccontextmanager
async def opening(endpoint: str, bound_s: float) -> AsyncIterator[None]:
    """Bound the opening of a session, and raise every failure of it as `TransportLost` that names the source."""
    try:
        async with asyncio.timeout(bound_s):
            yield
    except TimeoutError:
        raise TransportSilent(f"the source at {endpoint} did not let us in within {bound_s:g} s") from None
    except (TensorHubError, *MALFORMED) as why:
        raise TransportLost(f"the source at {endpoint} can't be read from: {why}") from why


IsMissing = Callable[[int, int], bool]
"""Of a half-filled shard, whether any byte of (origin, nbytes) belongs to a piece that is not stored yet."""


class ReadableRange(NamedTuple):
    """The memory that a lease opens."""

    view: MemoryRegion
    is_missing: IsMissing | None = None
    """None: all of it is there."""

    def check(self, origins: Sequence[int], sizes: Sequence[int]) -> None:
        """Raise `BeyondGrant` unless each of these ranges may be read."""
        end, is_missing = len(self.view), self.is_missing
        for origin, nbytes in zip(origins, sizes, strict=True):
            if origin < 0 or nbytes <= 0 or nbytes > end - origin:
                raise BeyondGrant(f"{nbytes} bytes from {origin} on reach beyond the segment of {end}")
            if is_missing is not None and is_missing(origin, nbytes):
                raise BeyondGrant(f"{nbytes} bytes from {origin} on were asked for before they are stored here")


class LeaseOpened(msgspec.Struct, frozen=True):
    """A ticket was good: the lease is open, and this is the memory that may be read."""

    lease: str
    segment: AnySegment
    pieces: tuple[Range, ...] | None = None
    """Of a half-filled shard, the pieces that it has: its reader is told, and asks for no others. None: all."""
    lacks: IsMissing | None = None
    patches: Sequence[tuple[bytes, ...] | None] = ()
    """Of each piece what its reader may have instead, one patch after another; None, or no entry: nothing."""
    fds: LentMemory = ()
    """Descriptors with a lock, for a reader that maps the segment; the transport closes them."""
    promised: tuple[Range, ...] = ()
    """Of a half-filled shard, what its reader may wait for, where that is not everything."""


class TicketRejected(msgspec.Struct, frozen=True):
    """A ticket was not good. The reader is told the reason."""

    reason: str


class LeaseAuthority(Protocol):
    """Decides about the leases of the serving side. Every method answers at once and never raises."""

    def redeem(self, ticket: str, reader: str) -> LeaseOpened | TicketRejected:
        """Take the ticket of a reader's agent. It is good once, and for that agent; the authority decides that."""

    def renew(self, lease: str) -> bool:
        """The reader of an open lease is alive; tells whether it waits for pieces, and is to be told that we live."""

    def holds(self, lease: str) -> bool:
        """Tell whether the memory has been kept for the lease from its opening up to now."""

    def ended(self, lease: str, done: bool) -> None:  # noqa: FBT001 (two words of one sentence)
        """The reader has finished (`done`) or is gone. Told once for each opened lease that was not broken."""


def silent(_: int) -> None:
    """Ignore progress."""


class SourceSession(Protocol):
    """One open lease, seen from the reader. Its methods belong to the event loop; several reads may be under way."""

    async def read(
        self, destination: MemoryRegion, spans: Spans, *, digests: bool, progress: Callable[[int], None] = silent
    ) -> bytes:
        """Bring pieces into the destination; return their digests one after another (empty without `digests`).

        Where that may take long, `progress` is told a few times a second how many more bytes have come.

        - The digests are of the destination after the last write of this read.
        - It returns or raises only when none of its bytes can be written any more, also when the caller is cancelled.
        - Nothing outside the spans is written.

        Raises `TransportLost`; the destination is undefined then. A read that was under way when the
        session was lost may still return: its digests tell whether the bytes are good.
        """

    async def gather(
        self,
        destination: MemoryRegion,
        regions: StridedCopies,
        *,
        digests: bool,
        progress: Callable[[int], None] = silent,
    ) -> None:
        """Bring boxes that may lie strided at either end, or both, into the destination.

        It ends, writes and tells of progress as `read` does. With `digests` a source on another host hashes what it
        sends, and what came is compared with that before it counts; on one host nothing is sent that could differ.

        Raises `TransportLost`, also when the bytes of a box are not what the source has sent; `CastUnknown` and
        `BadForm`, before a byte moves, when the boxes are of a kind that no source can send.
        """

    async def still_holds(self) -> bool:
        """Ask the source, after the last byte, whether the lease has held all the time.

        Bounded; a source that doesn't answer is lost, and the answer is False.
        """

    async def close(self) -> None:
        """End the session and the lease. It returns only when no byte can be written any more.

        Reads under way are stopped and raise `TransportLost`. A second call waits for the same end. A cancelled caller
        is kept until then too.
        """


@runtime_checkable
class EncodingSession(SourceSession, Protocol):
    """A session that can bring pieces in fewer bytes. Within a host no transport does: a copy is sooner made."""

    async def overwrite(
        self, destination: MemoryRegion, base: MemoryRegion | None, wanted: PatchTargets
    ) -> tuple[bytes, list[bytes]]:
        """Bring patches and apply them; return the digests of the pieces, and the patches.

        With `base` each piece is copied from there before. A digest of zeros: its patches are damaged. For the rest it
        keeps to what `read` does.
        """

    async def unpack(self, destination: MemoryRegion, spans: Spans, units: Sequence[int]) -> tuple[bytes, int]:
        """Have pieces packed at the source, bring and unpack them; return their digests, and how many bytes came.

        A digest of zeros: the piece does not shrink, or came damaged. For the rest it keeps to what `read` does.
        """


OnLost = Callable[[str], None]
"""Called once with the reason when a session that is not closed is of no more use, in the event loop."""


OnAvailability = Callable[[AvailabilityUpdate], None]
"""Called when a half-filled source tells of its pieces; with `PiecesAvailable` of none it only says that it lives."""


def unheard(_: AvailabilityUpdate) -> None:
    """Ignore availability: the source has everything."""


class Transport(Protocol):
    """Both sides of one way for bytes."""

    @property
    def endpoint(self) -> str:
        """Where readers find the serving side; it travels in the grant."""

    @property
    def links(self) -> int:
        """How many connections there are, idle ones included."""

    served_bytes: int
    """What readers took from here, as far as is known; it only grows."""

    async def start(self) -> None:
        """Begin to let readers in."""

    async def stop(self) -> None:
        """Accept no more readers and end all served leases. Sessions of the reading side are closed by their owners."""

    def break_lease(self, lease: str, reason: str) -> None:
        """Tell a lease's reader that it is over, and end its session; the lease table is not told. Unknown: nothing."""

    def announce(self, lease: str, update: AvailabilityUpdate) -> None:
        """Tell the reader of a half-filled shard of its pieces. Unknown: no effect."""

    async def open(
        self, grant: LeaseGrant, *, reader: str, on_lost: OnLost, on_have: OnAvailability = unheard
    ) -> SourceSession:
        """Show the grant's ticket to the source, as agent `reader`. Bounded. Raises `TransportLost`."""
