"""What reader and source say to each other on the local transport.

Each frame is four bytes of length (big endian) and a MessagePack object, in this order:

    reader                                 source
      Hello(protocol, ticket, reader)  →
                                       ←   Welcome + descriptor, or No, and the end
      Renew, each RENEW_S              →
      Confirm(number)                  →
                                       ←   Holds(number, holds)
                                       ←   Broken, and the end (at any time)
      Done, and the end                →

Anything else ends the connection, with one line in the log of whoever saw it.
"""

import asyncio
from typing import Final

import msgspec

from tensorhub_common.framed import Framed, PeerGone

FRAME_BYTES_MAX: Final = 4096
REASON_CHARS_MAX: Final = 500

SEND_S: Final = 2.0
"""A peer that takes no frame for this long, though its socket has room for thousands, is gone."""


class Frame(msgspec.Struct, frozen=True, tag_field="t"):
    """The part common to all frames."""


class Hello(Frame, frozen=True, tag="hello"):
    """The reader shows its ticket."""

    protocol: int
    ticket: str
    reader: str


class Welcome(Frame, frozen=True, tag="welcome"):
    """The lease is open. A read-only descriptor of the segment comes with this frame."""

    segment: str
    nbytes: int


class No(Frame, frozen=True, tag="no"):
    """The source does not let the reader in."""

    reason: str


class Renew(Frame, frozen=True, tag="renew"):
    """The reader is alive."""


class Confirm(Frame, frozen=True, tag="confirm"):
    """Does the lease still hold?"""

    number: int


class Holds(Frame, frozen=True, tag="holds"):
    """The answer to the `Confirm` of that number."""

    number: int
    holds: bool


class Done(Frame, frozen=True, tag="done"):
    """The reader has all that it wants."""


class Broken(Frame, frozen=True, tag="broken"):
    """The source has ended the lease; its memory may change from now on."""

    reason: str


FromReader = Hello | Renew | Confirm | Done
FromSource = Welcome | No | Holds | Broken

_encode: Final = msgspec.msgpack.Encoder().encode
_from_reader: Final = msgspec.msgpack.Decoder(FromReader)
_from_source: Final = msgspec.msgpack.Decoder(FromSource)


async def send(framed: Framed, frame: Frame, fd: int | None = None) -> None:
    """Send a frame, and with it a descriptor, which stays the caller's. Raises `PeerGone`."""
    try:
        async with asyncio.timeout(SEND_S):
            await framed.send(_encode(frame), fd)
    except TimeoutError:
        raise PeerGone(f"the other side has taken no frame for {SEND_S:g} s") from None


async def from_reader(framed: Framed) -> FromReader:
    """Return the next frame. Raises `PeerGone`, `FrameTooLarge`, or `msgspec.MsgspecError` for what is no frame."""
    frame: FromReader = _from_reader.decode(await framed.receive())
    return frame


async def from_source(framed: Framed) -> FromSource:
    """Return the next frame. Raises `PeerGone`, `FrameTooLarge`, or `msgspec.MsgspecError` for what is no frame."""
    frame: FromSource = _from_source.decode(await framed.receive())
    return frame
