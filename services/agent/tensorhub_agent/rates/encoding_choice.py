"""What a reader asks a source for: pieces as they are, patches, or packed pieces. Pure.

By cost: how long a way takes at the rate that was measured of this source, with the work that it makes at both ends.
Sending and working overlap, so a way of many batches is as slow as its slowest part.

Always true: nothing is chosen that is expected to take more bytes than the pieces themselves.
"""

from dataclasses import dataclass, field
from typing import Final

from tensorhub_agent.rates.source_rate import SourceRate

RATE_GUESSED: Final = 1e9
"""Bytes in a second of a link of which nothing is known yet: one between two hosts of one rack."""

MAKE_RATE: Final = 0.2e9
"""Bytes of pieces in a second that a publisher compares beside its other work, where some values of a hundred have
changed. A faster link has brought all of them before they are compared."""

PATCH_RATE: Final = 0.1e9
"""Bytes of patches in a second that one thread applies; measured by benchmarks/kernels/encodings.py."""

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
    """Tell whether patches of this size bring these pieces sooner than the pieces themselves would come."""
    speed = rate or RATE_GUESSED
    return max(patch_bytes / speed, patch_bytes / PATCH_RATE + nbytes / TOUCH_RATE) < nbytes / speed


def awaits_patches(rate: float | None, *, far: bool) -> bool:
    """Tell whether a reader waits for patches that are being made; of an unknown link it does so to another site."""
    return far if rate is None else rate < MAKE_RATE


SLOW_BATCHES_MIN: Final = 4
"""This many batches in a row, as they are, have to find a line slow before pieces come packed over it: of a machine
that paused one or two do."""

LOOK_AFTER_MIN: Final = 2
"""After this many batches that came otherwise, because the line seemed slow, one comes as it is and measures it,"""

LOOK_AFTER_MAX: Final = 32
"""... each time after twice as many, up to this many: a line that is slow pays 3 % for being looked at."""


@dataclass(slots=True)
class LineEstimate:
    """What is known of the line to one source, from the pieces that came as they are, and of how pieces shrink.

    Always true: a line over which pieces come packed, or patched because it seems slow, is measured again and again. So
    a pause that made it seem slow costs some batches and never the rest of the read.
    """

    known: float | None = None
    """Bytes in a second that came over its link in other reads."""
    _pace: SourceRate = field(default_factory=SourceRate)
    _flying: int = 0
    _since: float = 0.0
    _busy_since: float = 0.0
    """When the first of those under way as they are was asked for,"""
    _busy_bytes: int = 0
    """... and what has come since."""
    _slow: int = 0
    """The number of batches in a row that have found it slow."""
    _unseen: int = 0
    """The number that have come otherwise since it was measured."""
    _look_after: int = LOOK_AFTER_MIN
    _plain_bytes: int = 0
    _packed_bytes: int = 0

    @property
    def rate(self) -> float | None:
        """Bytes in a second, once any came in this read."""
        return self._pace.rate

    @property
    def best_rate(self) -> float | None:
        """Bytes in a second by this read, or else by others."""
        return self.rate or self.known

    def asked(self, now: float) -> None:
        """Pieces are under way as they are."""
        if not self._flying:
            self._since = self._busy_since = now
            self._busy_bytes = 0
        self._flying += 1

    def came(self, nbytes: int, now: float) -> None:
        """They have come; none, if they won't. What is under way beside them is not counted twice."""
        self._flying -= 1
        if nbytes:
            self._pace.record(nbytes, now - self._since)
            self._busy_bytes += nbytes
            self._see(now - self._busy_since)
        self._since = now

    def _see(self, busy_s: float) -> None:
        """Judge the line by what has just come.

        What was asked for and came since nothing was under way is the least that the line gives, whatever it gave
        before: a rate that a pause has lowered is forgotten.
        """
        rate = self._pace.rate
        if rate is not None and self._busy_bytes > rate * busy_s:
            self._pace = SourceRate()
            self._pace.record(self._busy_bytes, busy_s)
        if self._is_slow:
            self._slow += 1
        else:
            self._slow, self._look_after = 0, LOOK_AFTER_MIN

    def packed(self, nbytes: int, packed_bytes: int) -> None:
        """Count how many bytes the bytes of pieces have become."""
        self._plain_bytes += nbytes
        self._packed_bytes += packed_bytes

    @property
    def prefers_compressed(self) -> bool:
        """Whether packed pieces come sooner. Each read sees for itself first: packed ones tell of no line."""
        return self._slow >= SLOW_BATCHES_MIN and self._is_slow

    @property
    def _is_slow(self) -> bool:
        """Whether packed pieces would come sooner at the rate that was measured."""
        if self.rate is None:
            return False
        # What other reads got over the link counts as well: a batch that met a busy machine must not make it busier.
        rate = max(self.rate, self.known or 0.0)
        ratio = self._packed_bytes / self._plain_bytes if self._plain_bytes else RATIO_GUESSED
        return max(ratio / rate, 1 / PACK_RATE) < PACK_GAIN / rate

    def patches_for_slowness(self, nbytes: int, patch_bytes: int) -> bool:
        """Tell whether patches are taken only because the line was found slow, by earlier reads or by this one alone.

        What both have found is so. Of a line that came to be known in one bad moment no read would see anything, if
        patches came of all its pieces.
        """
        if self.best_rate is None or not takes_patches(nbytes, patch_bytes, self.best_rate):
            return False
        fast = RATE_GUESSED if self.rate is None else max(self.rate, self.known or RATE_GUESSED)
        return not takes_patches(nbytes, patch_bytes, fast)

    def probes_plain(self) -> bool:
        """Tell of a batch that would come otherwise, since the line seems slow, whether it comes as it is instead."""
        if self._unseen < self._look_after:
            self._unseen += 1
            return False
        self._unseen, self._look_after = 0, min(2 * self._look_after, LOOK_AFTER_MAX)
        return True

    @property
    def why(self) -> str:
        """Say by which rate pieces come as they do."""
        if self.rate is not None:
            return f"{self.rate / 1e6:.4g} MB/s in this read"
        if self.known is not None:
            return f"{self.known / 1e6:.4g} MB/s in earlier reads"
        return f"{RATE_GUESSED / 1e6:.4g} MB/s guessed"
