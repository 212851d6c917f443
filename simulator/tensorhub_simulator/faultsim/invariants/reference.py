"""The bytes that trainers published, kept aside, and the events that the log still owes.

No process of the simulation may look here; the invariants do.
"""

from collections import deque

from tensorhub_common.catalog.state import root_key
from tensorhub_common.protocol.log.commands import NO_ROOT, Ready, Sender
from tensorhub_common.protocol.log.events import AnyEvent, CommandRejected, CommandRepeated, VersionPublished
from tensorhub_registry.queries.version_history import line
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.models.layouts import Values, bytes_of, values_of
from tensorhub_simulator.faultsim.observations import CommandFolded, EventStored, ShardCommitted, ShardOffered

Place = tuple[str, str, int]


class Reference:
    """What is true of one job's bytes and log."""

    def __init__(self, job: Job) -> None:
        """Begin with an empty log."""
        self._job, self._layouts = job, job.layouts
        self._due: deque[AnyEvent] = deque()
        self._offered: dict[Sender, tuple[str, bytes]] = {}
        self._offers: dict[Place, Sender] = {}
        self._bytes: dict[tuple[str, int, str], bytes | None] = {}
        self._values: dict[tuple[str, int], Values] = {}
        """Of each version, its tensors as they were published."""
        job.subscribe(ShardOffered, self._on_offer)
        job.subscribe(ShardCommitted, self._on_commit)
        job.subscribe(CommandFolded, self._on_command)
        job.subscribe(EventStored, self._on_event)

    # The truth about bytes.

    def _on_offer(self, offer: ShardOffered) -> None:
        """Note which bytes a shard has digested and offers."""
        spec = offer.spec
        self._offered[offer.by] = (root_key(spec.shards, spec.key.shard, spec.layout), offer.data)

    def _on_commit(self, commit: ShardCommitted) -> None:
        """A shard commits: its bytes must be the version's, and its root the one that the log keeps for them."""
        command, spec = commit.command, commit.spec
        key = root_key(spec.shards, spec.key.shard, spec.layout)
        if not self.is_true(command.model, command.version, key, commit.data):
            raise Violation("exact version", f"{spec.key} commits version {command.version} with other bytes")
        if command.root not in (NO_ROOT, commit.root):
            raise Violation("the log's root", f"{spec.key} commits root {command.root}, and that is of other bytes")
        if not commit.is_kept:
            raise Violation("what counts outlives its process", f"{spec.key} commits, and no manifest tells of it")
        model = self._job.view.model(command.model)
        record = model.versions.get(command.version) if model is not None else None
        known = record.roots.get(key) if record is not None else None
        if known not in (None, command.root):
            raise Violation("the log's root", f"{spec.key} commits root {command.root}, and the log keeps {known}")

    def bytes_of(self, model: str, version: int, key: str) -> bytes | None:
        """Return what was published as this version, for a shard of this place and layout."""
        place = model, version, key
        if place not in self._bytes:
            values = self._values.get((model, version))
            layout = self._layouts.layout(key.rpartition(".")[2])
            self._bytes[place] = None if values is None else bytes_of(layout, values)
        return self._bytes[place]

    def is_true(self, model: str, version: int, key: str, data: bytes | bytearray) -> bool:
        """Tell whether memory holds exactly the version."""
        return self.bytes_of(model, version, key) == data

    # The log.

    def _on_command(self, folded: CommandFolded) -> None:
        command, events = folded.command, folded.events
        self._due.extend(events)
        taken = not isinstance(events[0], CommandRejected | CommandRepeated)
        if taken and isinstance(command, Ready) and command.by is not None:
            self._offers[command.model, command.replica, command.shard] = command.by
        for event in events:
            if isinstance(event, VersionPublished):
                self._published(event)

    def _published(self, event: VersionPublished) -> None:
        for place in [each for each in self._bytes if each[:2] == (event.model, event.version)]:
            del self._bytes[place]
        offers = [self._offers[event.model, event.replica, shard] for shard in range(len(event.roots))]
        shards = [self._offered[offer] for offer in offers]
        for key, data in shards:
            self._bytes[event.model, event.version, key] = data
        named = [(self._layouts.layout(key.rpartition(".")[2]), data) for key, data in shards]
        self._values[event.model, event.version] = values_of(named)

    def _on_event(self, stored: EventStored) -> None:
        event = stored.event
        if not self._due:
            raise Violation("one outcome per command", f"nothing was due, and the log says {line(event)}")
        due = self._due.popleft()
        if due != event:
            raise Violation("one outcome per command", f"{line(due)} was due, and the log says {line(event)}")

    @property
    def pending(self) -> int:
        """How many events are due."""
        return len(self._due)
