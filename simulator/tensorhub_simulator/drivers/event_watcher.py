"""What can be known from the events alone, as `hub.watch` sees them: which replicas and versions can be read.

Invariant, asserted by `check`: it is what the catalog knows. So no event is missing, doubled or out of order.
"""

from collections.abc import Sequence

from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.log.events import (
    Event,
    JobDeleted,
    ModelDeleted,
    PublishFailed,
    PublishJoined,
    PublishWithdrawn,
    ReplicaLost,
    ReplicaReady,
    RoundFailed,
    RoundJoined,
    RoundSettled,
    RoundStarted,
    ShardDraining,
    ShardReleased,
    VersionAvailable,
    VersionGone,
    VersionPublished,
    VersionRetired,
)
from tensorhub_common.protocol.queries import VersionState


class EventWatcher:
    """What can be known from the events so far."""

    def __init__(self) -> None:
        """Begin with an empty log."""
        self.holds: dict[tuple[str, str], int] = {}
        self.versions: dict[tuple[str, int], str] = {}
        self.over: set[int] = set()
        self.opened: set[int] = set()

    def see(self, events: Sequence[Event]) -> None:
        """Take one command's events."""
        for event in events:
            if isinstance(event, JobDeleted):
                self.versions.clear()
                self.holds.clear()
            self._versions(event)
            self._replicas(event)
            self._rounds(event)

    def _versions(self, event: Event) -> None:
        match event:
            case VersionPublished():
                assert (event.model, event.version) not in self.versions
                self.versions[event.model, event.version] = "available"
            case VersionAvailable():
                assert self.versions[event.model, event.version] == "unavailable"
                self.versions[event.model, event.version] = "available"
            case VersionGone():
                assert self.versions[event.model, event.version] == "available"
                self.versions[event.model, event.version] = "unavailable"
            case VersionRetired():
                # What no replica holds is forgotten; a rewind retires also what can be read.
                state = self.versions.pop((event.model, event.version))
                assert state == "unavailable" or event.reason != "forgotten"
            case ModelDeleted():
                self.versions = {key: state for key, state in self.versions.items() if key[0] != event.model}

    def _replicas(self, event: Event) -> None:
        match event:
            case ReplicaReady():
                self.holds[event.model, event.replica] = event.version
            case RoundStarted() if event.stands:
                pass
            case ReplicaLost() | RoundStarted() | ShardDraining() | ShardReleased():
                self.holds.pop((event.model, event.replica), None)

    def _rounds(self, event: Event) -> None:
        match event:
            case RoundJoined():
                self.opened.add(event.round)
            case RoundFailed() | RoundSettled():
                self._end(event.round)
            case ReplicaReady() if event.round is not None:
                self._end(event.round)
            case PublishJoined() | PublishFailed() | PublishWithdrawn():
                pass

    def _end(self, number: int) -> None:
        assert number in self.opened, f"round {number} ended and no shard had joined it"
        assert number not in self.over, f"round {number} ended twice"
        self.over.add(number)

    def check(self, catalog: Catalog) -> None:
        """Compare with the catalog."""
        holds, versions, rounds = {}, {}, set()
        for model in catalog.models.values():
            for number, version in model.versions.items():
                if version.state is not VersionState.RETIRED:
                    versions[model.name, number] = str(version.state)
            for replica in model.replicas.values():
                if replica.version is not None:
                    holds[model.name, replica.name] = replica.version
                if replica.round is not None:
                    rounds.add(replica.round.number)
        assert self.versions == versions
        assert self.holds == holds
        assert not rounds & self.over, "a round that has ended goes on"
