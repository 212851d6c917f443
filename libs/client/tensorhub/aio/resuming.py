"""Coming back to a shard that the hub holds ready, with values of one's own: which of the two counts.

A restarted trainer that has loaded a checkpoint gives other values than those that the hub still holds. Only its author
knows which are right, so `register(…, resume=…)` says it. Without a choice reading goes on, and what would publish or
overwrite raises.

Invariants:
- Equal values, and specs, which give none, need no choice.
- An open choice ends with a read, which replaces the memory, or with `mark_loaded`, which says that all was written.
"""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from tensorhub_common.errors import ReplicaConflict

Resume = Literal["memory", "values"]

NAMES_MAX: Final = 3
"""An error names this many tensors, and counts the rest."""


class OpenChoice(NamedTuple):
    """The hub holds `version`, and the tensors of these names were given other values."""

    version: int
    names: Sequence[str]

    def error(self, where: str) -> ReplicaConflict:
        """Return what `publish`, `unpublish` and `overwriting` raise meanwhile."""
        return ReplicaConflict(
            f"{where} was found with version {self.version}, and register was given other values for "
            f"{listed(self.names)}: register it with resume='memory' to go on from version {self.version}, or with "
            "resume='values' to replace it by the given values"
        )


def listed(names: Sequence[str], count: int | None = None) -> str:
    """Return the first names, and how many more there are; `count`: how many there are, if not all are given."""
    more = (len(names) if count is None else count) - NAMES_MAX
    shown = ", ".join(map(repr, names[:NAMES_MAX]))
    return f"{shown} and {more} more" if more > 0 else shown
