"""What the hub has of the simulated model: versions that are published, retired, kept, or still with somebody."""

from collections.abc import Iterable
from random import Random

from tensorhub_common.protocol.rollout.messages import PublishedVersions
from tensorhub_rollout.core.leader_events import VersionsSeen


class Hub:
    """One model, from its first version on."""

    def __init__(self, model: str) -> None:
        """The trainer has published version 1."""
        self.versions = PublishedVersions(1, (1,))
        self.rewinds: list[tuple[int, int]] = []
        """The first and last version that each has retired."""
        self.retained: set[int] = set()
        """Versions of which the hub keeps a copy, once their trainer has gone on."""
        self.drained: int | None = None
        """The version whose only memory its trainer is about to overwrite: it can't be had any more."""
        self._model = model
        self._highest = 1

    @property
    def newest(self) -> int:
        """The newest version that is published."""
        return max(self.versions.published)

    def publish(self, random: Random, retained: float) -> None:
        """Publish the next version; a trainer may leave numbers out. `retained`: the chance that the hub keeps it."""
        self._highest += random.choice((1, 1, 3))
        if random.random() < retained:
            self.retained.add(self._highest)
        self.drained = None
        self._change((*self.versions.published, self._highest), self.versions.retired)

    def rewind(self, random: Random) -> bool:
        """Go back behind the newest versions: later ones have numbers above theirs. False: nothing was newer."""
        to = random.choice(self.versions.published[-3:])
        if to >= self._highest:
            return False
        self.rewinds.append((to + 1, self._highest))
        left = tuple(each for each in self.versions.published if each <= to)
        self._change(left, (*self.versions.retired, (to + 1, self._highest)))
        return True

    def _change(self, published: tuple[int, ...], retired: tuple[tuple[int, int], ...]) -> None:
        self.versions = PublishedVersions(self.versions.seq + 1, published, retired)

    def available(self, loaded: Iterable[int]) -> frozenset[int]:
        """Return the versions that can be loaded: the newest, what the hub keeps, and what runners have (`loaded`)."""
        newest = {self.newest} - {self.drained}
        return frozenset({*newest, *self.retained, *loaded}.intersection(self.versions.published))

    def seen(self, loaded: Iterable[int]) -> VersionsSeen:
        """Return what a manager sees of it."""
        kept = frozenset(self.retained.intersection(self.versions.published))
        return VersionsSeen(self._model, self.versions, self.available(loaded), kept)
