"""The frames that reader and source send each other on the ucxx transport, beside the bytes.

These frames and those of `lease_messages.py` go over the stream of the same connection that brings the bytes. Active
messages are not usable: ucxx keeps an unanswered receive of a closed connection, and gives it the message of the next
connection at the same address.

    reader                                         source
      receives are posted, then
      PieceRequest(tag, origin, nbytes)            →
                                                   ←   message i, `nbytes[i]` bytes from `origin[i]`, under tag + i
      PatchRequest(tag, pieces, sizes)             →
                                                   ←   their patches one after another, cut into messages under tag,
                                                       tag + 1, ...
      PackRequest(number, origin, nbytes, units)   →
                                                   ←   PackReply(number, sizes): 0 where a piece does not shrink
      receives are posted, then
      FetchPacked(number, tag)                     →
                                                   ←   what was packed, one piece after another, cut in the same way
      ReaderDone                                   →
                                                   ←   LeaseClosed: the lease has ended; the connection may open another

Boxes are asked for with frames of their own:

    reader                                         source
      receives are posted, then
      GatherRequest(tag, ...)                      →
                                                   ←   its messages under tag, tag + 1, ..., in any order
                                                   ←   GatherDigests(tag, sums), if they were wanted

Invariants:
- A source sends only what an open lease's reader has asked for and has memory waiting for.
- A frame that the source cannot read, or that reaches beyond the segment, ends the connection.
"""

from typing import Final

import msgspec

from tensorhub_agent.primitives.lease_messages import LeaseMessage, ReaderMessage, SourceMessage
from tensorhub_common.errors import BadCommand
from tensorhub_common.programs.regions import StridedForm

SLOT_BYTES: Final = 4 * 1024 * 1024
"""The boxes of one frame are packed into this many bytes at most; as long as the longest message."""

COMPUTED_BYTES_MAX: Final = 64 * 1024 * 1024
"""The boxes of one frame are computed of this many bytes at most, beside what is sent as it is or cast: scales are few
and made of many, and must come before the reader takes the source for stalled."""

AMAX_BYTES_MAX: Final = 32 * 1024
"""The most bytes of blocks' largest magnitudes in one frame, by which values are computed."""

MESSAGES_MAX: Final = 1024
"""The most messages of one frame."""

BOXES_MAX: Final = 4096
"""The most boxes of one frame that have to be packed."""

FORMS_MAX: Final = 256
"""The most forms of these boxes. With `DIMS_MAX` that keeps the frame well below `FRAME_BYTES_MAX`."""

FRAMES_UNDER_WAY_MAX: Final = 32
"""The most of these frames that a reader may have unanswered; ours stays below, see `LOTS_MAX`."""


class GatherRequest(LeaseMessage, frozen=True, tag="gather"):
    """Send these messages: the receives for them are posted.

    The first messages are parts of the segment as they are; each of the others is some boxes, packed one after
    another, the elements of each in the order of their indices.
    """

    tag: int
    origin: list[int]
    """Message i is `nbytes[i]` bytes from `origin[i]` on."""
    nbytes: list[int]
    counts: list[int]
    """Of the messages that follow, how many boxes each has."""
    box_origin: list[int]
    box_form: list[int]
    """Box i begins at `box_origin[i]`, and is of `forms[box_form[i]]`: from its place in the segment to packed."""
    forms: list[StridedForm]
    sums: bool
    """Whether the reader wants to know the digests of what is sent."""
    amax: bytes = b""
    """Of the boxes that are computed by their blocks' largest magnitudes, these, one box after another."""


class GatherDigests(LeaseMessage, frozen=True, tag="sums"):
    """The digests of a frame's messages, one after another, of the bytes that were sent."""

    tag: int
    sums: bytes


FRAME_BYTES_MAX: Final = 256 * 1024

LENGTH_BYTES: Final = 4
"""In front of each frame, big endian: a stream keeps order and knows no frames."""

TAG_BITS: Final = 64
COUNT_BITS: Final = 20
"""The low bits of a tag number the messages of one session; the others are the session's, random and never used again.

UCX matches tags in the whole worker, not by connection: a peer that guessed a tag could write into another's read."""


class PieceRequest(LeaseMessage, frozen=True, tag="want"):
    """Send these parts of the segment: the receives for them are posted."""

    tag: int
    origin: list[int]
    nbytes: list[int]


class PatchRequest(LeaseMessage, frozen=True, tag="patches"):
    """Send the patches of these pieces, which have the sizes that were told with the lease: the receives are posted."""

    tag: int
    pieces: list[int]
    sizes: list[int]


class PackRequest(LeaseMessage, frozen=True, tag="pack"):
    """Pack these parts of the segment, in these units, and keep them until they are fetched."""

    number: int
    origin: list[int]
    nbytes: list[int]
    units: list[int]


class PackReply(LeaseMessage, frozen=True, tag="packed"):
    """The packed size of each; 0: it does not shrink, and is to be asked for as it is."""

    number: int
    sizes: list[int]


class FetchPacked(LeaseMessage, frozen=True, tag="fetch"):
    """Send what was packed under this number: the receives are posted."""

    number: int
    tag: int


class LeaseClosed(LeaseMessage, frozen=True, tag="idle"):
    """The lease has ended in order, and nothing of it is under way: the connection may show another ticket."""


encode: Final = msgspec.msgpack.Encoder().encode
ReaderFrame = ReaderMessage | PieceRequest | PatchRequest | PackRequest | FetchPacked | GatherRequest
SourceFrame = SourceMessage | PackReply | LeaseClosed | GatherDigests
_from_reader: Final = msgspec.msgpack.Decoder(ReaderFrame)
_from_source: Final = msgspec.msgpack.Decoder(SourceFrame)


def from_reader(data: bytes) -> ReaderFrame:
    """Read a frame. Raises one of `MALFORMED` for what is none."""
    frame: ReaderFrame = _from_reader.decode(data)
    return frame


def from_source(data: bytes) -> SourceFrame:
    """Read a frame. Raises one of `MALFORMED` for what is none."""
    frame: SourceFrame = _from_source.decode(data)
    return frame


def framed(data: bytes) -> bytes:
    """Return a frame as it goes over the stream."""
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


class FrameAssembler:
    """Puts the frames of one stream together again. It never holds more than one that has not come whole."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._part = bytearray()

    def take(self, data: bytes) -> list[bytes]:
        """Take what came next; return the frames that are whole now. Raises `BadCommand` for one that is too long."""
        part = self._part
        part += data
        frames, at = [], 0
        while len(part) - at >= LENGTH_BYTES:
            nbytes = int.from_bytes(part[at : at + LENGTH_BYTES], "big")
            if not 0 < nbytes <= FRAME_BYTES_MAX:
                raise BadCommand(f"a frame of {nbytes} bytes came, and 1 to {FRAME_BYTES_MAX} are allowed")
            end = at + LENGTH_BYTES + nbytes
            if len(part) < end:
                break
            frames.append(bytes(part[at + LENGTH_BYTES : end]))
            at = end
        del part[:at]
        return frames
