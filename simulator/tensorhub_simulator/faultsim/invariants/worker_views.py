"""What workers see in their tensors between two calls: byte for byte the version that they were told of.

A read in place may change the memory while its call is under way, and a call that raised may have; at all other times
an engine computes with what stands there, and a trainer trusts that nobody writes over what it has published.
"""

from typing import TYPE_CHECKING

from tensorhub_common.catalog.state import root_key
from tensorhub_simulator.faultsim.models.segments import Violation

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.nodes.worker import WorkerNode
    from tensorhub_simulator.faultsim.world import World


class WorkerViews:
    """Looks at tensors through the workers' eyes."""

    def __init__(self, world: "World") -> None:
        """Begin with nothing seen."""
        self.world = world
        self._seen: dict[str, tuple[int, int, int]] = {}

    def check(self, rank: "WorkerNode") -> None:
        """Raise `Violation` when a worker's tensors are not what it was told."""
        shelved = rank.agent.shelf.get(rank.key)
        if rank.trusts is None or not rank.up or shelved is None:
            return
        segment = rank.shows if shelved.spare is not None and rank.shows is not None else shelved.segment
        state = (rank.trusts, id(segment), segment.generation)
        if self._seen.get(rank.name) == state:
            return
        place = root_key(shelved.place.shards, rank.key.shard, shelved.place.layout)
        if not self.world.truth.is_true(rank.key.model, rank.trusts, place, segment):
            raise Violation("what workers see", f"{rank.name} was told of version {rank.trusts}, and sees other bytes")
        self._seen[rank.name] = state
