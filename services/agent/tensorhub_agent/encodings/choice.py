"""What a reader asks a source for: pieces as they are, patches, or packed pieces. Pure.

By cost: how long a way takes at the rate that was measured of this source, with the work that it makes at both ends.
Sending and working overlap, so a way of many batches is as slow as its slowest part.

Always true: nothing is chosen that is expected to take more bytes than the pieces themselves.
"""

from dataclasses import dataclass, field
from typing import Final

from tensorhub_agent.pace import Pace

RATE_GUESSED: Final = 1e9
"""Bytes in a second of a source of which nothing is known yet: a link between two hosts of one rack."""

PATCH_RATE: Final = 0.1e9
"""Bytes of patches in a second that one thread applies; measured by benchmarks/encodings.py."""

PACK_RATE: Final = 0.15e9
"""Bytes of pieces in a second that one thread packs on a busy machine; measured there too. So a link is slow below
1 Gbit/s: a loopback that is slow because the machine is busy must not get more work."""

PACK_GAIN: Final = 0.9
"""Packing has to take less than this part of the time: it is work for two machines that have others to do."""

RATIO_GUESSED: Final = 0.7
"""What becomes of weights in bfloat16."""


def takes_patches(nbytes: int, patch_bytes: int, rate: float | None) -> bool:
    """Tell whether patches of so many bytes bring these pieces sooner than the pieces themselves would come."""
    speed = rate or RATE_GUESSED
    return max(patch_bytes / speed, patch_bytes / PATCH_RATE) < nbytes / speed


@dataclass(slots=True)
class Line:
    """What is known of the line to one source, from the pieces that came as they are, and of how pieces shrink."""

    _pace: Pace = field(default_factory=lambda: Pace("ucxx"))
    _flying: int = 0
    _since: float = 0.0
    _plain_bytes: int = 0
    _packed_bytes: int = 0

    @property
    def rate(self) -> float | None:
        """Bytes in a second, once any came."""
        return self._pace.rate

    def asked(self, now: float) -> None:
        """Pieces are under way as they are."""
        if not self._flying:
            self._since = now
        self._flying += 1

    def came(self, nbytes: int, now: float) -> None:
        """They have come; none, if they won't. What is under way beside them is not counted twice."""
        self._flying -= 1
        if nbytes:
            self._pace.came(nbytes, now - self._since)
        self._since = now

    def packed(self, nbytes: int, packed_bytes: int) -> None:
        """So many bytes of pieces have become so many."""
        self._plain_bytes += nbytes
        self._packed_bytes += packed_bytes

    @property
    def takes_packed(self) -> bool:
        """Whether packed pieces come sooner. Of a line that is not known yet they are not asked for."""
        if self.rate is None:
            return False
        ratio = self._packed_bytes / self._plain_bytes if self._plain_bytes else RATIO_GUESSED
        return max(ratio / self.rate, 1 / PACK_RATE) < PACK_GAIN / self.rate
