"""Snapshots in the simulation: the stream in which they stand, and the steps in which a leader makes one.

The steps are production's (`jobs/snapshot_maker.py`), each a message that takes its time, may get lost or arrive after
its sender's death: look at the index, write the bytes, write the index against what was seen, read both back, trim.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tensorhub_common.catalog.snapshot import Snapshot, decode, encode
from tensorhub_registry.core.snapshot_policy import TIGHT_SHARE_MAX, SnapshotPolicy
from tensorhub_simulator.faultsim.faults.rolling_upgrade import built

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.nodes.registry import RegistryNode

ENTRIES: Final = 30
"""After so many entries a snapshot is due."""
GIVE_UP_S: Final = 3.0

Record = tuple[int, bytes]
"""At which entry, and the bytes that stand for its digest."""


@dataclass(slots=True)
class DurableSnapshots:
    """What stands in the snapshot stream."""

    newer: Record | None = None
    older: Record | None = None
    written: int = 0
    """How often the index was."""
    parts: dict[bytes, None] = field(default_factory=dict)
    made: int = 0
    loaded: int = 0

    def newest(self, job: str, beyond: int) -> Snapshot | None:
        """Return what a fold may go on with, or None."""
        for record in (self.newer, self.older):
            if record is not None and record[0] > beyond and record[1] in self.parts:
                self.loaded += 1
                return decode(job, record[1])
        return None


class Snapshotting:
    """One registry's way to its next snapshot."""

    def __init__(self, node: "RegistryNode") -> None:
        """Begin without any."""
        self.node, self.shelf, self.clock = node, node.world.log.shelf, node.clock
        self._at = node.fold.seq
        self._under_way: object = None

    def look(self) -> None:
        """Make a snapshot if one is due; between two entries, while leading."""
        fold = self.node.fold
        if self._under_way is not None or fold.seq - self._at < ENTRIES:
            return
        snapshot = fold.snapshot()
        if snapshot is None:
            return
        self._at, record = snapshot.seq, (snapshot.seq, encode(snapshot))
        me = self._under_way = object()
        self.clock.after(GIVE_UP_S, self.node, lambda: self._ended(me))
        self._ask(lambda: self._indexed(record, me, self.shelf.written))

    def _ended(self, me: object) -> None:
        if self._under_way is me:
            self._under_way = None

    def _ask(self, then: Callable[[], None]) -> None:
        """Let a question take its time; its answer may never come."""
        if not self.node.world.net_loses(self.node):
            self.clock.after(self.node.lag(), self.node, then)

    def _send(self, arrive: Callable[[], None], then: Callable[[], None]) -> None:
        """Send what arrives also after our death, and go on once it is acknowledged."""
        if self.node.world.net_loses(self.node):
            return
        life = self.node.life

        def arrived() -> None:
            if self.node.world.log.up:
                arrive()
                if not self.node.world.net_loses(self.node):
                    self.clock.after(self.node.world.nats.lag(), self.node, then, life)

        self.clock.after(self.node.lag(), self.node.world.nats, arrived)

    def _indexed(self, record: Record, me: object, seen: int) -> None:
        """The index was read: write the bytes, and then the index."""
        if self.shelf.newer is not None and self.shelf.newer[0] >= record[0]:
            self._ended(me)
            return

        def part() -> None:
            self.shelf.parts[record[1]] = None

        def index() -> None:
            if self.shelf.written == seen:
                self.shelf.newer, self.shelf.older = record, self.shelf.newer
                self.shelf.written += 1
                self.shelf.made += 1

        self._send(part, lambda: self._send(index, lambda: self._ask(lambda: self._verify(me, record))))

    def _verify(self, me: object, record: Record) -> None:
        """Both were read back: remove what is older, and trim the log."""
        shelf, node = self.shelf, self.node
        self._ended(me)
        if shelf.newer != record or node.term is None:
            return
        kept = [each for each in (shelf.newer, shelf.older) if each is not None]
        with built(node.build, node.fold.catalog):
            if any(body not in shelf.parts or decode(node.world.job, body).seq != seq for seq, body in kept):
                return
        older = None if shelf.older is None else shelf.older[0]
        fold = node.fold
        first = SnapshotPolicy().first_kept(record[0], older, fold.last_event_seq, fold.time, TIGHT_SHARE_MAX)

        def purge() -> None:
            shelf.parts = {body: None for _, body in kept if body in shelf.parts} | {
                body: None for body in shelf.parts if shelf.newer is not None and body == shelf.newer[1]
            }
            node.world.log.trim(first)

        self._send(purge, lambda: None)
