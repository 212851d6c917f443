"""What the hub has of the simulated model: versions that are published, retired, kept, held, or still with somebody."""

from collections.abc import Iterable
from random import Random
from typing import Final

from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.state import Catalog, Model, Version, VersionHold
from tensorhub_common.protocol.log.commands import AnyCommand, EndHold, Hold, Sender
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_common.protocol.queries import VersionState
from tensorhub_common.protocol.rollout.messages import PublishedVersions
from tensorhub_common.protocol.subjects import REGISTRY
from tensorhub_registry.core.hold_ending import HoldEnding
from tensorhub_rollout.core.leader_events import HubHold, VersionsSeen
from tensorhub_rollout.decisions.version_holds import HOLDER, HoldWord

NO_HOLD: Final = VersionHold(0, 0, (), 0.0)


class Hub:
    """One model, from its first version on. Holds are those of the production catalog; their copies are modelled."""

    def __init__(self, model: str) -> None:
        """The trainer has published version 1."""
        self.versions = PublishedVersions(1, (1,))
        self.rewinds: list[tuple[int, int]] = []
        """The first and last version that each has retired."""
        self.retained: set[int] = set()
        """Versions of which the hub keeps a copy, once their trainer has gone on."""
        self.drained: int | None = None
        """The version whose only memory its trainer is about to overwrite: it can't be had any more."""
        self.copies: set[int] = set()
        """Versions that are held, and of which the hub has a copy."""
        self.coming: set[int] = set()
        """Versions of which a copy is being read, and is finished whatever becomes of others that have them."""
        self._model = model
        self._highest = 1
        self._catalog = Catalog("job", level=NEWEST_LEVEL)
        self._catalog.models[model] = Model(model, last=1, versions={1: Version(1, 0.0, "trainer", {})})
        self._ending = HoldEnding()

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
        record = self._catalog.models[self._model]
        record.last, record.versions[self._highest] = self._highest, Version(self._highest, 0.0, "trainer", {})
        self._change((*self.versions.published, self._highest), self.versions.retired)

    def rewind(self, random: Random) -> bool:
        """Go back behind the newest versions: later ones have numbers above theirs. False: nothing was newer."""
        to = random.choice(self.versions.published[-3:])
        if to >= self._highest:
            return False
        self.rewinds.append((to + 1, self._highest))
        left = tuple(each for each in self.versions.published if each <= to)
        for number, version in self._catalog.models[self._model].versions.items():
            if number > to:
                version.state = VersionState.RETIRED
        self.copies.intersection_update(left)
        self.coming.intersection_update(left)
        self._change(left, (*self.versions.retired, (to + 1, self._highest)))
        return True

    def _change(self, published: tuple[int, ...], retired: tuple[tuple[int, int], ...]) -> None:
        self.versions = PublishedVersions(self.versions.seq + 1, published, retired)

    # Holds.

    @property
    def hold(self) -> VersionHold:
        """What the log has of the managers' hold."""
        return self._catalog.models[self._model].holds.get(HOLDER, NO_HOLD)

    def say_hold(self, word: HoldWord, term: int, now: float) -> tuple[int, ...]:
        """Take a manager's word as the log does; return the versions of which a copy is to be made."""
        before = self.hold
        said = Hold(model=word.model, holder=HOLDER, term=term, n=word.n, versions=word.versions, lasts_s=word.lasts_s)
        self._apply(said, now)
        return tuple(each for each in self.hold.versions if each not in before.versions)

    def end_holds(self, now: float) -> None:
        """Let the registry end what was not stated again in time."""
        for overdue in self._ending.due(self._catalog, now):
            by = Sender(REGISTRY, 1, self._catalog.seq + 1)
            self._apply(EndHold(by=by, model=overdue.model, holder=overdue.holder, term=1), now)

    def _apply(self, command: AnyCommand, now: float) -> None:
        apply(self._catalog, self._catalog.seq + 1, now, command)
        self.copies.intersection_update(self.hold.versions)
        self.coming.intersection_update(self.hold.versions)

    # What there is.

    def available(self, loaded: Iterable[int]) -> frozenset[int]:
        """Return the versions that can be loaded: the newest, what the hub keeps, and what runners have (`loaded`)."""
        newest = {self.newest} - {self.drained}
        return frozenset({*newest, *self.retained, *self.copies, *loaded}.intersection(self.versions.published))

    def seen(self, loaded: Iterable[int]) -> VersionsSeen:
        """Return what a manager sees of it."""
        kept = frozenset({*self.retained, *self.copies}.intersection(self.versions.published))
        hold = self.hold
        stands = HubHold(hold.term, hold.n, hold.versions, frozenset(self.copies), frozenset(self.coming - self.copies))
        return VersionsSeen(self._model, self.versions, self.available(loaded), kept, stands)
