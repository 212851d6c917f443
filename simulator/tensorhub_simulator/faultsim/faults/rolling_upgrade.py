"""A rolling upgrade: the folds are begun anew one by one with a build that knows a changed transition.

The new build must fold as the old one did until the job is raised to its level, and the leading registry does that once
all run the new build. Here the change is that the catalog forgets unavailable versions sooner. A job that is upgraded
begins at the level of releases before levels, so what changed at each level since then is switched on with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from tensorhub_common.catalog import availability
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.log import levels
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, Level

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.world import World

OLD: Final = 1
NEW: Final = 2
SWITCH: Final = NEWEST_LEVEL + 1
"""The level of the modelled change, which the new build alone knows."""
KEPT: Final = "VERSIONS_KEPT_MAX"
KEPT_SINCE: Final = 3
"""So many unavailable versions the new transition keeps."""
SWITCH_LOOK_S: Final = 0.5
START_S: Final = 3.0


def is_on(build: int, catalog: Catalog) -> bool:
    """Tell whether a build folds with the changed transition."""
    return build >= NEW and catalog.level >= SWITCH


@contextmanager
def built(build: int, catalog: Catalog) -> Iterator[None]:
    """Fold and read snapshots as a build does while this lasts."""
    kept, newest = getattr(availability, KEPT), levels.NEWEST_LEVEL
    if is_on(build, catalog):
        setattr(availability, KEPT, KEPT_SINCE)
    if build >= NEW:
        setattr(levels, "NEWEST_LEVEL", SWITCH)  # noqa: B010 (it is constant for everybody else)
    try:
        yield
    finally:
        setattr(availability, KEPT, kept)
        setattr(levels, "NEWEST_LEVEL", newest)  # noqa: B010


class Upgrade:
    """Has everybody begun anew with the new build, each at its time, and has the job raised at the end."""

    def __init__(self, world: "World") -> None:
        """Plan it, if this seed has one."""
        self.world, self.clock = world, world.clock
        self.level = 0
        """To which the leading registry is to raise the job."""
        if world.plan.upgrade:
            for node in world.folders():
                self.clock.after(
                    START_S * world.streams.of(world.job, "fault", "upgrade", node.name).random(),
                    None,
                    partial(world.faults.upgrade, node),
                )
            self.clock.after(SWITCH_LOOK_S, None, self._look)

    def _look(self) -> None:
        if all(node.build == NEW for node in self.world.folders()):
            self.level = SWITCH
        else:
            self.clock.after(SWITCH_LOOK_S, None, self._look)


def first_level(*, is_upgraded: bool) -> int:
    """Return the level at which a job begins."""
    return Level.FIRST if is_upgraded else NEWEST_LEVEL
