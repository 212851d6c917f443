"""A rolling upgrade: the folds are begun anew one by one with a build that knows a changed transition.

The new build must fold as the old one did until a logged command switches the change on, and that is said once nobody
runs the old build any more. Here the change is that the catalog forgets unavailable versions sooner, and a job's quota
of `SWITCH_BYTES` is the command: it is kept in the catalog, and so in snapshots too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from tensorhub_common.catalog import availability
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.wire.commands import Quota

if TYPE_CHECKING:
    from tensorhub_simulator.world import World

OLD: Final = 1
NEW: Final = 2
SWITCH_BYTES: Final = 1 << 50
KEPT: Final = "VERSIONS_KEPT_MAX"
KEPT_SINCE: Final = 3
"""So many unavailable versions the new transition keeps."""
SWITCH_LOOK_S: Final = 0.5
START_S: Final = 3.0


def is_on(build: int, catalog: Catalog) -> bool:
    """Tell whether a build folds with the changed transition."""
    return build >= NEW and catalog.quota_bytes == SWITCH_BYTES


@contextmanager
def built(build: int, catalog: Catalog) -> Iterator[None]:
    """Fold as a build does while this lasts."""
    before = getattr(availability, KEPT)
    if is_on(build, catalog):
        setattr(availability, KEPT, KEPT_SINCE)
    try:
        yield
    finally:
        setattr(availability, KEPT, before)


class Upgrade:
    """Has everybody begun anew with the new build, each at its time, and switches the change on at the end."""

    def __init__(self, world: "World") -> None:
        """Plan it, if this seed has one."""
        self.world, self.clock = world, world.clock
        if world.plan.upgrade:
            for node in world.folders():
                self.clock.after(START_S * self.clock.rng.random(), None, partial(world.faults.upgrade, node))
            self.clock.after(SWITCH_LOOK_S, None, self._look)

    def _look(self) -> None:
        world = self.world
        if is_on(NEW, world.truth.catalog):
            return
        if all(node.build == NEW for node in world.folders()):
            world.director.rule(Quota(nbytes=SWITCH_BYTES))
        self.clock.after(SWITCH_LOOK_S, None, self._look)
