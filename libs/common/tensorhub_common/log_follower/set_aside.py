"""When a job that was set aside is tried again. Pure.

A job that can't go on from what its log says is set aside, and its process goes on with all others. An operator may
correct the log, its permissions or the release that runs, so the job is tried again from its newest snapshot. The wait
grows, since each try costs the other jobs a part of the event loop.

Invariant: the wait begins at `first_s`, doubles with each failure up to `max_s`, and begins again for a job that has
recovered. The owner of the job says what counts as that.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

_DOUBLINGS_MAX: Final = 16


class RetryLimits(NamedTuple):
    """The first and the longest wait."""

    first_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class SetAside:
    """A job that was set aside, and how often in a row. Times are of the owner's clock."""

    seq: int
    """The last entry that it has folded."""
    since: float
    """When it was set aside first."""
    failures: int
    wait_s: float
    again_at: float
    """When it is tried again."""

    def has_lasted(self, now: float) -> bool:
        """Tell whether the job went on, once it was tried again, for as long as it had been left alone."""
        return now - self.again_at >= self.wait_s


def set_aside(before: SetAside | None, seq: int, now: float, limits: RetryLimits, *, has_recovered: bool) -> SetAside:
    """Set a job aside that has folded its log up to entry `seq`. `before`: when it was set aside the last time."""
    if before is None or has_recovered:
        return SetAside(seq, now, 1, limits.first_s, now + limits.first_s)
    failures = before.failures + 1
    wait_s = min(limits.max_s, limits.first_s * (1 << min(failures - 1, _DOUBLINGS_MAX)))
    return SetAside(max(seq, before.seq), before.since, failures, wait_s, now + wait_s)
