"""Named streams of random numbers: one seed gives each name a generator of its own.

What one stream draws depends on the seed and its name alone. So a part of the simulation that draws more numbers, or a
new part, changes no number that another part draws.
"""

from hashlib import blake2b
from random import Random
from typing import Final

_DIGEST_BYTES: Final = 16


class Streams:
    """The streams of one seed."""

    def __init__(self, seed: int) -> None:
        """Take the seed."""
        self.seed = seed

    def of(self, *names: object) -> Random:
        """Return the generator of a name, at its beginning: the caller keeps it, and no two callers share a name."""
        text = "/".join(map(str, (self.seed, *names)))
        return Random(int.from_bytes(blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()))
