"""What reader and source say to each other about an open lease, on any transport.

    reader                                 source
      Hello(protocol, ticket, reader)  →
                                       ←   Welcome, or No, and the end
      Renew, each RENEW_S              →
      Confirm(number)                  →
                                       ←   Holds(number, holds)
                                       ←   Have(pieces), where the source is half-filled: at first, with each
                                           piece that stands there, and as the answer to Renew
                                       ←   Promise(pieces), Retract(pieces), Cede(pieces, heir), to a reader that
                                           counts on promises
                                       ←   Broken, and the end (at any time)
      Done, and the end                →

How frames travel, and how the bytes come, is the transport's: `transports/local/framing.py`,
`transports/ucxx/protocol/frames.py`. Anything else ends the connection, with one line in the log of the process that
saw it.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from tensorhub_common.protocol.plans import SourceId
from tensorhub_common.protocol.ranges import Range

REASON_CHARS_MAX: Final = 500

RENEW_S: Final = 1.0
"""A reader says so often that it is alive."""

HAVE_RANGES_MAX: Final = 256
"""A frame has at most this many ranges of pieces."""

CONFIRM_S: Final = 30.0
"""A source that doesn't say within this whether the lease holds is lost. The answer comes behind the bytes that are
under way: over a thin line, or from a busy machine, that takes seconds."""


class LeaseMessage(msgspec.Struct, frozen=True, tag_field="t"):
    """The part common to all frames."""


class Hello(LeaseMessage, frozen=True, tag="hello"):
    """The reader shows its ticket."""

    protocol: int
    """The oldest protocol that the reader speaks (`handshake.py`)."""
    ticket: str
    reader: str
    newest: int = 0
    """The newest; 0: that one alone."""


class Welcome(LeaseMessage, frozen=True, tag="welcome"):
    """The lease is open on this segment. Locally a read-only descriptor of it comes with this frame.

    Where it is mapped on a GPU, the descriptor with the lock comes behind that of the memory.
    """

    segment: str
    nbytes: int
    origin: int = 0
    """Where in the descriptor's file the segment begins."""
    device: str = ""
    """The UUID of the GPU whose memory the segment is; empty: the host's."""


class Denied(LeaseMessage, frozen=True, tag="no"):
    """The source does not let the reader in."""

    reason: str


class Renew(LeaseMessage, frozen=True, tag="renew"):
    """The reader is alive."""


class ConfirmRequest(LeaseMessage, frozen=True, tag="confirm"):
    """Does the lease still hold?"""

    number: int


class ConfirmReply(LeaseMessage, frozen=True, tag="holds"):
    """The answer to the `ConfirmRequest` of that number."""

    number: int
    holds: bool


class PiecesAvailable(LeaseMessage, frozen=True, tag="have"):
    """These pieces stand in the source, verified, beside those it has told of; with none of them: it lives."""

    pieces: tuple[Range, ...] = ()


class PiecesPromised(LeaseMessage, frozen=True, tag="promise"):
    """The source has these pieces under way and waits for no other reader to get them; its reader may wait for them."""

    pieces: tuple[Range, ...]


class PromiseRetracted(LeaseMessage, frozen=True, tag="retract"):
    """The source waits for somebody else to get these pieces: its reader must not wait for them any more."""

    pieces: tuple[Range, ...]


class PiecesHandedOff(LeaseMessage, frozen=True, tag="cede"):
    """These pieces of the source's part are brought over to the site by that peer of its group from now on."""

    pieces: tuple[Range, ...]
    new_owner: SourceId = msgspec.field(name="heir")


AvailabilityUpdate = PiecesAvailable | PiecesPromised | PromiseRetracted | PiecesHandedOff
"""What a half-filled source tells of its pieces."""


def split_update(update: AvailabilityUpdate) -> Sequence[AvailabilityUpdate]:
    """Return the frames that tell of this, one at least, each short enough."""
    starts = range(0, max(len(update.pieces), 1), HAVE_RANGES_MAX)
    return [msgspec.structs.replace(update, pieces=update.pieces[start : start + HAVE_RANGES_MAX]) for start in starts]


class ReaderDone(LeaseMessage, frozen=True, tag="done"):
    """The reader has all that it wants. `nbytes`: how much it took, where the source can't see that itself."""

    nbytes: int = 0


class LeaseBroken(LeaseMessage, frozen=True, tag="broken"):
    """The source has ended the lease; its memory may change from now on."""

    reason: str


ReaderMessage = Hello | Renew | ConfirmRequest | ReaderDone
SourceMessage = (
    Welcome
    | Denied
    | ConfirmReply
    | PiecesAvailable
    | PiecesPromised
    | PromiseRetracted
    | PiecesHandedOff
    | LeaseBroken
)
