"""What must hold of versions that managers hold: none that requests need is let go of, and none is held for nothing."""

from collections.abc import Iterable
from random import Random
from typing import Final

from tensorhub_common.catalog.state import VersionHold
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.messages import PublishedVersions

HEARD_S: Final = 3.0
"""Within this a leader that runs has heard of a request, and that it has ended, and its words are in the log."""
COPIED_S: Final = (0.05, 1.0)
"""How long a copy of a version that is held takes."""


class HoldRules:
    """The requests that are for one version alone, and what holds of their versions."""

    def __init__(self, seed: int, versions_max: int) -> None:
        """Know no request yet."""
        self.random = Random(f"holds {seed}")
        self._versions_max = versions_max
        self._pinned: dict[RequestId, int] = {}
        self._opened_at: dict[RequestId, float] = {}
        self._ended_at: dict[RequestId, float] = {}

    def opened(self, of: RequestId, version: int, now: float) -> None:
        """Note that a request for a version alone is open."""
        self._pinned[of], self._opened_at[of] = version, now

    def ended(self, requests: Iterable[RequestId], now: float) -> None:
        """Note that requests have ended."""
        self._ended_at.update(dict.fromkeys(requests, now))

    def copy_s(self) -> float:
        """Return how long the next copy takes, in seconds."""
        return self.random.uniform(*COPIED_S)

    def check(
        self, before: VersionHold, hold: VersionHold, versions: PublishedVersions, now: float, *, is_late: bool
    ) -> None:
        """Judge a word that counts. `is_late`: it is one of an earlier leader."""
        if hold == before:
            return
        stood, holds = (before.term, before.n), (hold.term, hold.n)
        assert not hold.versions or holds > stood, f"hold {holds} takes the place of {stood}, which is later"
        held = hold.versions
        assert len(held) <= self._versions_max
        open_ = {of: version for of, version in self._pinned.items() if of not in self._ended_at}
        needed = {version for of, version in open_.items() if now - self._opened_at[of] >= HEARD_S}
        lost = {each for each in {*before.versions} - {*held} if each in needed and not versions.is_retired(each)}
        assert not lost, f"versions {sorted(lost)} are let go of, and requests are for them alone"
        wanted = {
            version
            for of, version in self._pinned.items()
            if of not in self._ended_at or now - self._ended_at[of] < HEARD_S
        }
        assert is_late or {*held} <= wanted, f"versions {held} are held, and requests are for {wanted} alone"
