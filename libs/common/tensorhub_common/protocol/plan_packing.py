"""A plan as one message: compressed where it has many sources. Pure.

A plan from thousands of sources names each by its agent, layout and root, and has more bytes than NATS lets through
(1 MiB by default). Compressed it is a small part of that. Only who says that it can read it so is answered so
(`Demand.packs`): a planner answers agents of older releases as ever.

Always true: what is packed begins unlike any JSON, and nothing inflates beyond `PLAN_BYTES_MAX`.
"""

from typing import Final

import zstandard

from tensorhub_common.errors import BadCommand

PACK_BYTES_MIN: Final = 64 * 1024
"""Shorter answers go as they are: most plans name a handful of sources."""

PLAN_BYTES_MAX: Final = 64 * 1024 * 1024
"""A plan has at most so many bytes when it is uncompressed."""

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
