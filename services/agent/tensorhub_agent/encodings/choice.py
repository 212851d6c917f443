"""What a reader asks a source for: pieces as they are, patches, or compressed pieces. Pure.

By cost: how long a way takes at the rate that was measured of this source, with the work that it makes at both ends.
Sending and working overlap, so a way of many batches is as slow as its slowest part.

Always true: nothing is chosen that has more bytes than the pieces themselves.
"""

from typing import Final

RATE_GUESSED: Final = 1e9
"""Bytes in a second of a source of which nothing is known yet: a link between two hosts of one rack."""

PATCH_RATE: Final = 0.1e9
"""Bytes of patches in a second that one thread applies; measured by benchmarks/encodings.py."""


def takes_patches(nbytes: int, patch_bytes: int, rate: float | None) -> bool:
    """Tell whether patches of so many bytes bring these pieces sooner than the pieces themselves would come."""
    speed = rate or RATE_GUESSED
    return max(patch_bytes / speed, patch_bytes / PATCH_RATE) < nbytes / speed
