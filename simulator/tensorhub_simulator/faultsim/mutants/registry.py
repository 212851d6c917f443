"""Planted bugs of registries: of what they keep through a restart, and of who may speak."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from tensorhub_registry.core import election as leading
from tensorhub_registry.core.job_fold import JobFold
from tensorhub_registry.core.liveness import Liveness
from tensorhub_simulator.faultsim.mutants.replacement import Replacement
from tensorhub_simulator.faultsim.nodes.registry import RegistryNode


def _outcome_lost() -> list[Replacement]:
    """A snapshot lacks the events that were decided and not said yet: their commands are trimmed with their outcome."""
    snapshot = JobFold.snapshot

    def without(self: JobFold) -> Any:
        made = snapshot(self)
        return made if made is None else replace(made, told=replace(made.told, due=()))

    return [Replacement(JobFold.snapshot, without)]


def _snapshot_misses_last() -> list[Replacement]:
    """A snapshot says that it goes one entry further than it does."""
    snapshot = JobFold.snapshot

    def ahead(self: JobFold) -> Any:
        made = snapshot(self)
        return made if made is None else replace(made, seq=made.seq + 1)

    return [Replacement(JobFold.snapshot, ahead)]


def _stale_leader_expires() -> list[Replacement]:
    """A leader that wakes up expires whom it did not hear while it slept, under whatever term the log has by then."""
    look = RegistryNode._look

    def tick_first(self: Any) -> None:
        if self.leader.state is leading.LeaderState.LEADING:
            self.claim.term = self.claim.term or self.fold.catalog.term or None
            self._tick()
        look(self)

    def spoken(self: Any) -> int:
        return int(max(self.claim.term, self.fold.catalog.term))

    return [
        Replacement(RegistryNode._look, tick_first),
        Replacement(RegistryNode._spoken_term, spoken),
        Replacement(Liveness.pause_max_s, property(lambda _: math.inf)),
    ]


BUGS: Final[dict[str, Callable[[], list[Replacement]]]] = {
    "outcome-lost-after-trimming": _outcome_lost,
    "snapshot-misses-last-command": _snapshot_misses_last,
    "stale-leader-expires": _stale_leader_expires,
}
