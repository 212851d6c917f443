"""Two builds of the processes that fold the log. The new one knows a changed transition.

The new build must fold as the old one did until the job is raised to its level, and the leading registry does that once
every process runs the new build. Here the change is that the catalog forgets unavailable versions sooner. A job that is
upgraded begins at the level of releases before levels, so what changed at each level since then is switched on with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tensorhub_common.catalog import availability
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.log import levels
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, Level

OLD: Final = 1
NEW: Final = 2
SWITCH: Final = NEWEST_LEVEL + 1
"""The level of the modelled change, which the new build alone knows."""
KEPT: Final = "VERSIONS_KEPT_MAX"
KEPT_SINCE: Final = 3
"""This many unavailable versions the new transition keeps."""


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
        setattr(levels, "NEWEST_LEVEL", SWITCH)  # noqa: B010 (it is constant for everything else)
    try:
        yield
    finally:
        setattr(availability, KEPT, kept)
        setattr(levels, "NEWEST_LEVEL", newest)  # noqa: B010


def first_level(*, is_upgraded: bool) -> int:
    """Return the level at which a job begins."""
    return Level.FIRST if is_upgraded else NEWEST_LEVEL
