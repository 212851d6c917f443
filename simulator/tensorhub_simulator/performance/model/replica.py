"""A replica of a modelled cluster: joins rounds, begins when all its shards have their leases, is ready with the last.

The log's word takes its time, and the registry takes commands one after the other; both as `spec.Control` says.
"""

from typing import TYPE_CHECKING

from tensorhub_common.protocol.plans import ReadPriority
from tensorhub_simulator.performance.results import Update

if TYPE_CHECKING:
    from tensorhub_simulator.performance.model.cluster import ClusterRun
    from tensorhub_simulator.performance.model.shard import ShardNode


class Replica:
    """All modelled shards of one copy."""

    def __init__(self, world: "ClusterRun", kind: str, number: int, ranks: "tuple[ShardNode, ...]") -> None:
        """Hold nothing."""
        self.world, self.kind, self.number, self.ranks = world, kind, number, ranks
        for rank in ranks:
            rank.replica = self
        self.version: int | None = None
        self.update: Update | None = None
        self.life = 0
        self.here = True

    @property
    def name(self) -> str:
        """Its name in the hub."""
        return f"{self.kind}-{self.number}"

    def hold(self, version: int) -> None:
        """Stand ready at a version that was made here."""
        self.version = version
        for rank in self.ranks:
            rank.version, rank.serves = version, True
            self.world.planning.holds(rank.seat, version, None)

    def fetch(self, version: int, turn: ReadPriority, asked_s: float) -> None:
        """The log has decided that this replica reads a version."""
        world = self.world
        self.update = Update(kind=self.kind, replica=self.number, version=version, asked_s=asked_s)
        world.result.updates.append(self.update)
        leases = [len(self.ranks)]
        life = self.life
        for rank in self.ranks:
            world.planning.holds(rank.seat, version, turn)
            rank.leased = lambda: world.say(self.ranks[0], lambda: self._leased(leases, life))
            rank.failed = lambda: self._failed(life)
        for rank in self.ranks:
            if self.update is not None:
                rank.begin(version, turn)

    def _leased(self, left: list[int], life: int) -> None:
        """One more shard has its leases; with the last of them all begin."""
        left[0] -= 1
        if left[0] or life != self.life or self.update is None:
            return
        self.update.started_s = self.world.agenda.now
        filled = [len(self.ranks)]
        for rank in self.ranks:
            rank.filled = lambda rank=rank: self.world.say(rank, lambda: self._filled(filled, life))
        for rank in self.ranks:
            if rank.turn is not None:
                self.world.planning.holds(rank.seat, self.update.version, rank.turn, asked=True)
            rank.start()

    def _filled(self, left: list[int], life: int) -> None:
        """One more shard is filled; with the last of them the replica is ready."""
        left[0] -= 1
        if left[0] or life != self.life or self.update is None:
            return
        update, self.update = self.update, None
        update.ready_s = self.world.agenda.now
        self.version = update.version
        for rank in self.ranks:
            self.world.planning.holds(rank.seat, update.version, None)
        self.world.ready(self, update)

    def _failed(self, life: int) -> None:
        """A shard found no source: the round is over, and asked for again."""
        if life != self.life or self.update is None:
            return
        self.life += 1
        update, self.update = self.update, None
        self.world.result.failed += 1
        self.world.result.updates.remove(update)
        for rank in self.ranks:
            rank.drop()
            # As an agent does: what stands half-filled here is written again, perhaps with another version.
            rank.drop_readers()
            self.world.planning.gone(rank.seat)
        self.world.again(self, update.asked_s)

    def vanish(self) -> None:
        """The instance is gone."""
        self.here, self.life, self.version, self.update = False, self.life + 1, None, None
        for rank in self.ranks:
            rank.vanish()

    def come(self) -> None:
        """The instance is back, with nothing."""
        self.here, self.life = True, self.life + 1
        for rank in self.ranks:
            rank.alive = True
