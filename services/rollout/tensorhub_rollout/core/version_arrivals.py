"""When the newest version will be in an instance's memory: as its runner tells, or as long as it took before. Pure.

A runner tells how long its transfer will take, as fast as it goes now. Before it has begun to, an instance is expected
to take as long as at its last version, counted from the publication, or from when it was told to go on from a version
that it was to keep. One of which that is not known takes as long as the others did. What is overdue is not expected any
more: it may never come. Nor is the newest version expected on an instance that is to keep another one.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

LEAST_S: Final = 0.05
"""What has not arrived takes at least so long."""
OVERDUE_FACTOR: Final = 2.0
"""What takes this multiple of the time before is not expected any more."""
OVERDUE_S: Final = 1.0
"""Nor what takes so much longer than that."""
OTHERS_MAX: Final = 64
"""Limit of the latest arrivals by which one of an instance that had none is expected."""


@dataclass(slots=True)
class _Told:
    at: float
    loads_in_s: float


@dataclass(slots=True)
class VersionArrivals:
    """The arrivals of one model's versions."""

    version: int | None = None
    """The newest one, as far as it is known."""
    changes: int = 0
    """How often something has come that an expectation may follow from, beside the time."""
    _published_at: float | None = None
    _took_s: dict[str, float] = field(default_factory=dict)
    """By runner: how long its last version took."""
    _latest_s: deque[float] = field(default_factory=lambda: deque(maxlen=OTHERS_MAX))
    _told: dict[str, _Told] = field(default_factory=dict)
    _wanted: dict[str, int] = field(default_factory=dict)
    """By runner: the version that it is to keep, where it is not to follow the newest one."""
    _goes_on_at: dict[str, float] = field(default_factory=dict)
    """By runner: when it was told to follow the newest one again, having kept an older one, until it has it."""
    _had: set[str] = field(default_factory=set)
    """Runners that have had a version. One that begins to run reads the newest, however long ago that was published."""

    def published(self, version: int, now: float, *, is_new: bool) -> None:
        """Take the newest version. `is_new`: it was published just now, and not before this leader began."""
        if version != self.version:
            self.version, self._published_at = version, now if is_new else None
            self._told.clear()
            self.changes += 1

    def wanted(self, runner: str, version: int | None, now: float) -> None:
        """Take what a runner was told to have: one version, or the newest one (None)."""
        if version is not None:
            self._wanted[runner] = version
            self._goes_on_at.pop(runner, None)
        elif self._wanted.pop(runner, self.version) != self.version:
            self._goes_on_at[runner] = now
        self.changes += 1

    def heard(self, runner: str, before: int | None, version: int | None, loads_in_s: float | None, now: float) -> None:
        """Take what a runner has in memory, what it had at its last heartbeat, and when it says it has the next one."""
        if loads_in_s is not None:
            self._told[runner] = _Told(now, loads_in_s)
            self.changes += 1
        elif self._told.pop(runner, None) is not None:
            self.changes += 1
        if version == self.version and before != version and self._published_at is not None and runner in self._had:
            self._took_s[runner] = took_s = now - max(self._published_at, self._goes_on_at.get(runner, -math.inf))
            self._latest_s.append(took_s)
            self.changes += 1
        if version == self.version:
            self._goes_on_at.pop(runner, None)
        if version is not None:
            self._had.add(runner)

    def lost(self, runner: str) -> None:
        """Forget a runner."""
        self._told.pop(runner, None)
        self._took_s.pop(runner, None)
        self._wanted.pop(runner, None)
        self._goes_on_at.pop(runner, None)
        self._had.discard(runner)
        self.changes += 1

    def arrives_in_s(self, runner: str, version: int | None, now: float) -> float | None:
        """Return in how many seconds one with `version` has the newest; None: it has, or that is not known."""
        if self.version is None or version == self.version or self._wanted.get(runner, self.version) != self.version:
            return None
        told = self._told.get(runner)
        if told is not None:
            return _left(told.loads_in_s, now - told.at)
        took_s = self._took_s.get(runner)
        if took_s is None and self._latest_s and version is not None:
            took_s = median(self._latest_s)
        if took_s is None or self._published_at is None:
            return None
        return _left(took_s, now - max(self._published_at, self._goes_on_at.get(runner, -math.inf)))


def _left(whole_s: float, gone_s: float) -> float | None:
    """Return what is left of a time; None: it is overdue."""
    if gone_s > OVERDUE_FACTOR * whole_s + OVERDUE_S:
        return None
    return max(LEAST_S, whole_s - gone_s)
