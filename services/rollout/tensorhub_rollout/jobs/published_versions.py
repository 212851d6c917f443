"""Which versions of a job's models are published and unretired, by following the job's log. I/O.

It folds the whole catalog, as registry and planner do, so that a rewind counts here as it counts there.
"""

from collections.abc import Callable
from typing import Final, NoReturn

from tensorhub_common.bus.connection import Bus
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.snapshot import Snapshot
from tensorhub_common.catalog.state import Catalog, Model, Replica
from tensorhub_common.catalog.transitions import RoundState
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.jetstream.stream_log import LogExtent
from tensorhub_common.log_follower.follower import LogFollower
from tensorhub_common.protocol.log.commands import Rewind
from tensorhub_common.protocol.log.entries import command_in
from tensorhub_common.protocol.log.events import VersionRetired
from tensorhub_common.protocol.log.levels import Level
from tensorhub_common.protocol.queries import VersionState
from tensorhub_common.protocol.rollout.messages import PublishedVersions
from tensorhub_rollout.core.leader_events import HubHold, VersionsSeen
from tensorhub_rollout.decisions.version_holds import HOLDER

BURST: Final = 32
"""Other work has its turn after this many entries, which take about a millisecond."""
RETRY_S: Final = 0.2
RETIRED_MAX: Final = 16
"""Limit of the rewinds of a model that are remembered, the latest."""

OnVersions = Callable[[VersionsSeen], None]
"""Takes the versions of a model, each time that they have changed."""


class VersionFollower:
    """The versions of one job's models."""

    def __init__(self, bus: Bus, job: str, on_versions: OnVersions) -> None:
        self.seen: dict[str, VersionsSeen] = {}
        """By model."""
        self._bus, self._job, self._on_versions = bus, job, on_versions
        self._catalog, self._position = Catalog(job), 0
        self._retired: dict[str, tuple[tuple[int, int], ...]] = {}
        """By model: what its trainer went back behind since this process follows the log."""

    async def run(self) -> NoReturn:
        """Follow the log. Raises what `LogFollower.run` raises."""
        await LogFollower(self._bus, self._job, self, burst=BURST, retry_s=RETRY_S).run()

    @property
    def folded_seq(self) -> int:
        """The last entry that is folded."""
        return self._position

    def restore(self, snapshot: Snapshot, _: LogExtent) -> int:
        """Go on from a snapshot, with the entry after it."""
        self._catalog, self._position = snapshot.catalog, snapshot.seq
        self._look()
        return snapshot.seq + 1

    async def take(self, entry: StoredEntry) -> None:
        """Fold the next entry."""
        self._position = entry.seq
        command = command_in(entry, self._catalog.level)
        if command is None:
            return
        last = self._last_of(command.model) if isinstance(command, Rewind) else None
        events = apply(self._catalog, entry.seq, entry.time, command)
        if (
            isinstance(command, Rewind)
            and last is not None
            and any(isinstance(each, VersionRetired) for each in events)
        ):
            spans = (*self._retired.get(command.model, ()), (command.to + 1, last))
            self._retired[command.model] = spans[-RETIRED_MAX:]
        if events:
            self._look()

    def has_seen(self, model: str, version: int | None) -> bool:
        """Tell whether the log is folded up to the publication of a version; None: of none at all."""
        if version is None:
            return True
        known = self.seen.get(model)
        return known is not None and (
            version <= max(known.versions.published, default=-1) or known.versions.is_retired(version)
        )

    def root_of(self, model: str, version: int) -> str:
        """Return the root of the first shard that published a version; empty where it is not known."""
        found = self._catalog.models.get(model)
        record = None if found is None else found.versions.get(version)
        return "" if record is None else next(iter(record.roots.values()), "")

    def _last_of(self, model: str) -> int | None:
        found = self._catalog.models.get(model)
        return None if found is None else found.last

    def _hold_of(self, model: Model) -> HubHold | None:
        if self._catalog.level < Level.HOLDING:
            return None
        hold = model.holds.get(HOLDER)
        if hold is None:
            return HubHold()
        copies = [each for each in model.replicas.values() if each.cache in hold.versions]
        whole = frozenset(each.cache for each in copies if each.cache is not None and each.cache == each.version)
        read = frozenset(each.cache for each in copies if each.cache is not None and _is_read(each))
        return HubHold(hold.term, hold.n, hold.versions, whole, read - whole)

    def _look(self) -> None:
        for name, model in self._catalog.models.items():
            standing = [each for each in model.versions.values() if each.state is not VersionState.RETIRED]
            published = tuple(sorted(each.number for each in standing))
            available = frozenset(each.number for each in standing if each.state is VersionState.AVAILABLE)
            hold = self._hold_of(model)
            kept = frozenset(each.number for each in standing if each.kept or (hold and each.number in hold.copied))
            known, retired = self.seen.get(name), self._retired.get(name, ())
            versions = PublishedVersions(self._position, published, retired)
            if known is not None and (known.versions.published, known.versions.retired) == (published, retired):
                versions = known.versions
            seen = VersionsSeen(name, versions, available, kept, hold)
            if seen != known:
                self.seen[name] = seen
                self._on_versions(seen)


def _is_read(replica: Replica) -> bool:
    """Tell whether a replica is being filled from sources that serve it."""
    return replica.round is not None and replica.round.state is RoundState.STARTED
