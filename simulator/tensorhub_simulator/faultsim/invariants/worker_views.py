"""What workers see in their tensors between two calls: byte for byte the version that they were told of.

A read in place may change the memory while its call is under way, and a call that raised may have; at all other times
an engine computes with what stands there, and a trainer trusts that nothing writes over what it has published.
"""

from collections.abc import Sequence

from tensorhub_common.catalog.state import root_key
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.env import Env
from tensorhub_simulator.faultsim.invariants.reference import Reference
from tensorhub_simulator.faultsim.nodes.worker import WorkerNode
from tensorhub_simulator.faultsim.observations import BytesWritten


class WorkerViews:
    """Looks at tensors through the workers' eyes."""

    def __init__(self, env: Env, reference: Reference, workers: Sequence[WorkerNode]) -> None:
        """Begin with nothing seen."""
        self._reference, self._workers = reference, workers
        self._seen: dict[str, tuple[int, int, int]] = {}
        env.subscribe(BytesWritten, self._on_write)

    def _on_write(self, written: BytesWritten) -> None:
        """Raise `Violation` when a read writes where a worker's tensors are."""
        if written.is_spare and any(worker.shows is written.memory and worker.up for worker in self._workers):
            raise Violation("what is shown", f"{written.key} is written where the tensors of its worker stand")

    def check(self, rank: WorkerNode) -> None:
        """Raise `Violation` when a worker's tensors are not what it was told."""
        stored = rank.agent.stored.get(rank.key)
        if rank.trusts is None or not rank.up or stored is None:
            return
        segment = rank.shows if stored.spare is not None and rank.shows is not None else stored.segment
        state = (rank.trusts, id(segment), segment.generation)
        if self._seen.get(rank.name) == state:
            return
        place = root_key(stored.spec.shards, rank.key.shard, stored.spec.layout)
        if not self._reference.is_true(rank.key.model, rank.trusts, place, segment.data):
            raise Violation("what workers see", f"{rank.name} was told of version {rank.trusts}, and sees other bytes")
        self._seen[rank.name] = state
