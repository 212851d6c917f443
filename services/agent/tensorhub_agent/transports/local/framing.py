"""How the frames of `primitives/lease_messages.py` travel on the local transport.

Each is four bytes of length (big endian) and a MessagePack object.
"""

import asyncio
from typing import Final

import msgspec

from tensorhub_agent.primitives.lease_messages import LeaseMessage, ReaderMessage, SourceMessage
from tensorhub_common.runtime.framed_socket import FramedSocket, PeerGone

FRAME_BYTES_MAX: Final = 4096

SEND_S: Final = 2.0
"""A peer that takes no frame for this long, though its socket has room for thousands, is gone."""


_encode: Final = msgspec.msgpack.Encoder().encode
_from_reader: Final = msgspec.msgpack.Decoder(ReaderMessage)
_from_source: Final = msgspec.msgpack.Decoder(SourceMessage)


async def send(framed: FramedSocket, frame: LeaseMessage, *fds: int) -> None:
    """Send a frame, and with it descriptors, which stay the caller's. Raises `PeerGone`."""
    try:
        async with asyncio.timeout(SEND_S):
            await framed.send(_encode(frame), *fds)
    except TimeoutError:
        raise PeerGone(f"the other side has taken no frame for {SEND_S:g} s") from None


async def from_reader(framed: FramedSocket) -> ReaderMessage:
    """Return the next frame. Raises `PeerGone`, `FrameTooLarge`, or one of `MALFORMED` for what is no frame."""
    frame: ReaderMessage = _from_reader.decode(await framed.receive())
    return frame


async def from_source(framed: FramedSocket) -> SourceMessage:
    """Return the next frame. Raises `PeerGone`, `FrameTooLarge`, or one of `MALFORMED` for what is no frame."""
    frame: SourceMessage = _from_source.decode(await framed.receive())
    return frame
