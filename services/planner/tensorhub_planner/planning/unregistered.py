"""Which tensors of a version no shard of a replica has registered. Pure.

A shard may leave a tensor out, since a sibling may have it, as in pipeline stages. A tensor that all of them leave out
was most likely forgotten, so it is reported.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Final

import msgspec

from tensorhub_common.layout.layout import Layout
from tensorhub_common.programs.program import UNREAD_MAX
from tensorhub_planner.compiler.layout_index import LayoutIndex


class Unregistered(msgspec.Struct, frozen=True):
    """The first `UNREAD_MAX` names, in the order of the sources, and how many there are."""

    names: tuple[str, ...]
    count: int


NOTHING: Final = Unregistered((), 0)


def global_names(layout: Layout) -> tuple[str, ...]:
    """Return the global tensors of which a layout has something, and "" where it has padding."""
    own = [entry.name for entry in layout.tensors if not entry.parts]
    return (*own, *(part.name for entry in layout.tensors for part in entry.parts))


def unregistered(registered: Iterable[tuple[str, ...]], index: LayoutIndex) -> Unregistered:
    """Return which of the sources' tensors are in none of these."""
    some: set[str] = set().union(*registered)
    missing = [name for name in index.tensors if name not in some]
    return Unregistered(tuple(islice(missing, UNREAD_MAX)), len(missing)) if missing else NOTHING
