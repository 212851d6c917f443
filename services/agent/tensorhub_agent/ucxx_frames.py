"""What reader and source say to each other on the ucxx transport, beside the bytes.

The frames of `lease_frames.py` go over the stream of the same connection that brings the bytes, and one more. (Active
messages would not do: ucxx keeps an unanswered receive of a closed connection, and gives it what the next one at the
same address sends.)

    reader                                 source
      receives are posted, then
      Want(tag, origin, nbytes)        →
                                       ←   message i, `nbytes[i]` bytes from `origin[i]`, under tag + i
      Done                             →
                                       ←   Idle: the lease has ended; the connection may open another one

A source sends only what an open lease's reader has asked for and has memory waiting for. What it can't read, or what
reaches beyond the segment, ends the connection.
"""

from typing import Final

import msgspec

from tensorhub_agent.lease_frames import Frame, FromReader, FromSource

FRAME_BYTES_MAX: Final = 256 * 1024

TAG_BITS: Final = 64
COUNT_BITS: Final = 20
"""The low bits of a tag number the messages of one session; the others are the session's, random and never used again.

UCX matches tags in the whole worker, not by connection: a peer that guessed a tag could write into another's read."""


class Want(Frame, frozen=True, tag="want"):
    """Send these parts of the segment: the receives for them are posted."""

    tag: int
    origin: list[int]
    nbytes: list[int]


class Idle(Frame, frozen=True, tag="idle"):
    """The lease has ended in order, and nothing of it is under way: the connection may show another ticket."""


encode: Final = msgspec.msgpack.Encoder().encode
_from_reader: Final = msgspec.msgpack.Decoder(FromReader | Want)
_from_source: Final = msgspec.msgpack.Decoder(FromSource | Idle)


def from_reader(data: bytes) -> FromReader | Want:
    """Read a frame. Raises `msgspec.MsgspecError` for what is none."""
    frame: FromReader | Want = _from_reader.decode(data)
    return frame


def from_source(data: bytes) -> FromSource | Idle:
    """Read a frame. Raises `msgspec.MsgspecError` for what is none."""
    frame: FromSource | Idle = _from_source.decode(data)
    return frame
