"""Digests of pieces and the root over them.

A piece's digest is XXH3-128 of its bytes; a shard's root is XXH3-128 of all its piece digests in piece order. The log
keeps the root, so a list of digests from any source can be checked against the log before one of them is used. They
guard against torn and mistaken bytes, not against somebody who forges them: see docs/design/protocol/digests.md.
"""

from typing import Final

import xxhash

PIECE_DIGEST_BYTES: Final = 16


def piece_digest(data: bytes | memoryview) -> bytes:
    """Return the 16 digest bytes of one piece."""
    return xxhash.xxh3_128_digest(data)


def root_digest(digests: bytes) -> str:
    """Return the root over concatenated piece digests, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(digests)


def digest_at(digests: bytes, piece: int) -> bytes:
    """Return the digest of one piece out of a concatenated list."""
    return digests[piece * PIECE_DIGEST_BYTES : (piece + 1) * PIECE_DIGEST_BYTES]
