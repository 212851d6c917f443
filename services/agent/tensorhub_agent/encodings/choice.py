"""What a reader asks a source for: pieces as they are, patches, or packed pieces. Pure.

By cost: how long a way takes at the rate that was measured of this source, with the work that it makes at both ends.
Sending and working overlap, so a way of many batches is as slow as its slowest part.

Always true: nothing is chosen that is expected to take more bytes than the pieces themselves.
"""

from dataclasses import dataclass, field
from typing import Final

from tensorhub_agent.pace import Pace

RATE_GUESSED: Final = 1e9
"""Bytes in a second of a link of which nothing is known yet: one between two hosts of one rack."""

MAKE_RATE: Final = 0.2e9
"""Bytes of pieces in a second that a publisher compares beside its other work, where some values of a hundred have
changed. A faster link has brought all of them before they are compared."""

PATCH_RATE: Final = 0.1e9
"""Bytes of patches in a second that one thread applies; measured by benchmarks/encodings.py."""

TOUCH_RATE: Final = 8e9
"""Bytes of pieces in a second that one thread copies from their base, and hashes again: what a patch costs at least."""

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
    return max(patch_bytes / speed, patch_bytes / PATCH_RATE + nbytes / TOUCH_RATE) < nbytes / speed


def awaits_patches(rate: float | None, *, far: bool) -> bool:
    """Tell whether a reader waits for patches that are being made; of an unknown link it does so to another site."""
    return far if rate is None else rate < MAKE_RATE


@dataclass(slots=True)
class Line:
    """What is known of the line to one source, from the pieces that came as they are, and of how pieces shrink."""

    known: float | None = None
    """Bytes in a second that came over its link in other reads."""
    _pace: Pace = field(default_factory=lambda: Pace("ucxx"))
    _flying: int = 0
    _since: float = 0.0
    _plain_bytes: int = 0
    _packed_bytes: int = 0

    @property
    def rate(self) -> float | None:
        """Bytes in a second, once any came in this read."""
        return self._pace.rate

    @property
    def believed(self) -> float | None:
        """Bytes in a second by this read, or else by others."""
        return self.rate or self.known

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
        """Whether packed pieces come sooner. Each read sees for itself first: packed ones tell of no line."""
        if self.rate is None:
            return False
        # What other reads got over the link counts as well: a batch that met a busy machine must not make it busier.
        rate = max(self.rate, self.known or 0.0)
        ratio = self._packed_bytes / self._plain_bytes if self._plain_bytes else RATIO_GUESSED
        return max(ratio / rate, 1 / PACK_RATE) < PACK_GAIN / rate
