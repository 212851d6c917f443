"""A crowd: hundreds of replicas read one version at once, while its holder is stopped and woken.

Production's cores stand still where something costs as much as there are readers, each time; and a reader that is one
of many is refused, kept waiting and asked again more often than one of a few ever is. No trainer unpublishes here, and
the log never loses the stopped agent, so the rule is simple: see `invariants/crowd.py`.
"""

from functools import partial
from typing import Final

from tensorhub_simulator.faultsim.nodes.worker import ReplicaPlan
from tensorhub_simulator.faultsim.workload.director import Director

READ_S: Final = 30.0
"""The bound of each read: many times what all of them take together."""
TOGETHER_S: Final = 0.05
"""All begin to read within this."""


class Once(Director):
    """Tells the trainer to publish once, and each reader to read it once."""

    def start(self) -> None:
        """Tell all of them, at about the same time."""
        for group in self.processes.replicas:
            delay_s = 0.5 if group.trains else 1.0 + group.user.random() * TOGETHER_S
            self.clock.after(delay_s, None, partial(self._tell, group))

    def _tell(self, group: ReplicaPlan) -> None:
        group.act, group.want = ("publish", 1) if group.trains else ("read", "latest")
        group.version = 1 if group.trains else None
        group.timeout_s = group.wait_s = READ_S
        group.serial += 1

    def missing(self) -> str | None:
        """Say which readers do not have the version yet."""
        workers = self.processes.workers
        late = [worker.name for worker in workers if worker.version != 1]
        return f"{len(late)} of {len(workers)} do not hold version 1, {late[:3]} among them" if late else None
