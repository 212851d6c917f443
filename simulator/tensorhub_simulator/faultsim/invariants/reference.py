"""What is true, kept aside: the log folded the moment it is written, and the bytes that trainers published.

No process of the simulation may look here; the invariants do.
"""

from collections import deque
from typing import cast

from tensorhub_agent.primitives.digests import root_digest
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.invariants import check_invariants
from tensorhub_common.catalog.state import Catalog, root_key
from tensorhub_common.protocol.log.codec import decode_command
from tensorhub_common.protocol.log.commands import NO_ROOT, Filled, Ready, Sender
from tensorhub_common.protocol.log.events import (
    AnyEvent,
    CommandRejected,
    CommandRepeated,
    RoundJoined,
    VersionPublished,
)
from tensorhub_common.protocol.subjects import cached_version
from tensorhub_registry.queries.version_history import line
from tensorhub_simulator.faultsim.faults.rolling_upgrade import NEW, built
from tensorhub_simulator.faultsim.invariants.log_rules import LogRules, UpdateFloors
from tensorhub_simulator.faultsim.invariants.retention import RetentionRule
from tensorhub_simulator.faultsim.models.job_log import Entry
from tensorhub_simulator.faultsim.models.layouts import Layouts, Values, bytes_of, values_of
from tensorhub_simulator.faultsim.models.segments import ModelledShard, Segment, Violation

Place = tuple[str, str, int]


class Reference:
    """Sees every entry as it is stored."""

    def __init__(self, job: str, level: int, story: deque[str], layouts: Layouts) -> None:
        """Begin with an empty log."""
        self._layouts = layouts
        self.catalog = Catalog(job, level=level)
        self.rules = LogRules()
        self._floors = UpdateFloors(level)
        self.commands = self.events = 0
        self.published: dict[str, int] = {}
        self.published_at: dict[tuple[str, int], int] = {}
        """Where the command stands by which a version came to be."""
        self.round_of: dict[Sender, int] = {}
        self.told: dict[int, int] = {}
        """Where the last event of a command's outcome stands."""
        self._story = story
        self._retained = RetentionRule()
        self._due: deque[AnyEvent] = deque()
        self._offered: dict[Sender, tuple[str, bytes]] = {}
        self._offers: dict[Place, Sender] = {}
        self._bytes: dict[tuple[str, int, str], bytes | None] = {}
        self._values: dict[tuple[str, int], Values] = {}
        """Of each version, its tensors as they were published."""

    # The truth about bytes.

    def offered(self, command: Ready, shelved: ModelledShard) -> None:
        """Note which bytes a shard has digested and offers."""
        assert command.by is not None
        place = shelved.place
        key = root_key(place.shards, place.key.shard, place.layout)
        self._offered[command.by] = (key, bytes(shelved.segment.data))

    def filled(self, command: Filled, shelved: ModelledShard) -> None:
        """A shard commits: its bytes must be the version's, and its root the one that the log keeps for them."""
        place, segment = shelved.place, shelved.target
        key = root_key(place.shards, place.key.shard, place.layout)
        if not self.is_true(command.model, command.version, key, segment):
            raise Violation("exact version", f"{place.key} commits version {command.version} with other bytes")
        if command.root not in (NO_ROOT, root_digest(segment.digests())):
            raise Violation("the log's root", f"{place.key} commits root {command.root}, and that is of other bytes")
        if not place.swaps and not _is_kept(shelved, command.version):
            raise Violation("what counts outlives its process", f"{place.key} commits, and no manifest tells of it")
        model = self.catalog.models.get(command.model)
        record = model.versions.get(command.version) if model is not None else None
        known = record.roots.get(key) if record is not None else None
        if known not in (None, command.root):
            raise Violation("the log's root", f"{place.key} commits root {command.root}, and the log keeps {known}")

    def bytes_of(self, model: str, version: int, key: str) -> bytes | None:
        """Return what was published as this version, for a shard of this place and layout."""
        place = model, version, key
        if place not in self._bytes:
            values = self._values.get((model, version))
            layout = self._layouts.layout(key.rpartition(".")[2])
            self._bytes[place] = None if values is None else bytes_of(layout, values)
        return self._bytes[place]

    def is_true(self, model: str, version: int, key: str, segment: Segment) -> bool:
        """Tell whether memory holds exactly the version."""
        return self.bytes_of(model, version, key) == bytes(segment.data)

    # The log.

    def entry(self, entry: Entry) -> None:
        """Take the entry that was just stored."""
        if entry.event is not None:
            self._event(entry.event, entry.seq)
            return
        self.commands += 1
        tokens = entry.subject.split(".")
        process = tokens[5] if len(tokens) > 5 else None  # noqa: PLR2004 (tensorhub.v1.<job>.cmd.<verb>.<process>)
        command = decode_command(tokens[4], process, entry.data, self.catalog.level)
        before = self.catalog.seq
        assert entry.seq > before
        with built(NEW, self.catalog):
            events = cast("tuple[AnyEvent, ...]", apply(self.catalog, entry.seq, entry.time, command))
        check_invariants(self.catalog)
        self._retained.see(self.catalog, command, events)
        self.rules.see(entry.seq, command, events)
        self._floors.see(command, events)
        self._due.extend(events)
        taken = not isinstance(events[0], CommandRejected | CommandRepeated)
        if taken and isinstance(command, Ready) and command.by is not None:
            self._offers[command.model, command.replica, command.shard] = command.by
        for event in events:
            if isinstance(event, VersionPublished):
                self._published(event)
            elif isinstance(event, RoundJoined) and event.by is not None:
                self.round_of.setdefault(event.by, event.round)

    def _published(self, event: VersionPublished) -> None:
        self.published[event.model] = self.published.get(event.model, 0) + 1
        self.published_at[event.model, event.version] = event.cmd
        for place in [each for each in self._bytes if each[:2] == (event.model, event.version)]:
            del self._bytes[place]
        offers = [self._offers[event.model, event.replica, shard] for shard in range(len(event.roots))]
        shards = [self._offered[offer] for offer in offers]
        for key, data in shards:
            self._bytes[event.model, event.version, key] = data
        named = [(self._layouts.layout(key.rpartition(".")[2]), data) for key, data in shards]
        self._values[event.model, event.version] = values_of(named)

    def _event(self, event: AnyEvent, seq: int) -> None:
        self.events += 1
        if event.i == event.k:
            self.told[event.cmd] = seq
        self._story.append(line(event))
        if not self._due:
            raise Violation("one outcome per command", f"nothing was due, and the log says {line(event)}")
        due = self._due.popleft()
        if due != event:
            raise Violation("one outcome per command", f"{line(due)} was due, and the log says {line(event)}")

    def holders(self, model: str) -> dict[str, int | None]:
        """Return what each replica holds by the log."""
        record = self.catalog.models.get(model)
        return {} if record is None else {name: replica.version for name, replica in record.replicas.items()}

    @property
    def pending(self) -> int:
        """How many events are due."""
        return len(self._due)


def _is_kept(shelved: ModelledShard, version: int) -> bool:
    """Tell whether the next process finds what is filled; what a worker reads may go without."""
    if shelved.refused == version and cached_version(shelved.place.key.replica) is None:
        return True
    kept = shelved.manifest
    return kept is not None and (kept.state, kept.version) == ("ready", version)
