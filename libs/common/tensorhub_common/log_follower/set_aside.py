"""When a job that was set aside is tried again. Pure.

A job that can't go on from what its log says is set aside, and the registry goes on with all others. Perhaps somebody
mends the log, its permissions or the release that runs, so the job is tried again, from its newest snapshot: soon, and
then ever more rarely, since a job that fails once more has cost the others a part of the event loop.

Invariants: the wait doubles, up to `AGAIN_S_MAX`, and begins anew for a job that went on for as long as it had been
left alone. How far it folded says nothing: each try adds to its log that a registry leads.
"""

from dataclasses import dataclass
from typing import Final

AGAIN_S_MIN: Final = 5.0
"""A job that was set aside is tried again after this."""

AGAIN_S_MAX: Final = 600.0
"""The longest wait: a job that fails at each try costs the others two seconds of folding in ten minutes at most."""

_DOUBLINGS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class SetAside:
    """A job that was set aside, and how often it was in a row."""

    seq: int
    """The last entry that it has folded."""
    since: float
    """When it was set aside first, in seconds since the epoch."""
    failures: int
    again_at: float
    """When it is tried again, in seconds since the epoch."""

    @property
    def wait_s(self) -> float:
        """How long to wait for the next try."""
        return wait_s(self.failures)


def wait_s(failures: int) -> float:
    """Return how long a job is left alone after this many failures in a row."""
    return min(AGAIN_S_MAX, AGAIN_S_MIN * (1 << min(failures - 1, _DOUBLINGS_MAX)))


def set_aside(before: SetAside | None, seq: int, now: float) -> SetAside:
    """Set a job aside that has folded its log up to entry `seq`. `before`: when it was set aside the last time."""
    if before is None or now - before.again_at >= before.wait_s:
        return SetAside(seq, now, 1, now + wait_s(1))
    failures = before.failures + 1
    return SetAside(max(seq, before.seq), before.since, failures, now + wait_s(failures))
