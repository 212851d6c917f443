"""Which transitions of the production tables the seeds went through."""

# ruff: noqa: ANN401 (the tables have keys of several kinds)

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from tensorhub_agent import serving
from tensorhub_common.catalog import availability, membership, rounds

PLACES: Final[tuple[tuple[str, ModuleType, str], ...]] = (
    ("shard", availability, "SHARD_MOVES"),
    ("version", availability, "VERSION_MOVES"),
    ("round", rounds, "ROUND_MOVES"),
    ("agent", membership, "AGENT_MOVES"),
    ("lease", serving, "LEASE_MOVES"),
)
"""A table's name, and where the code that moves looks it up."""


class Counting(dict[Any, Any]):
    """A transition table that notes which of its moves were looked up."""

    def __init__(self, moves: dict[Any, Any]) -> None:
        """Take the moves of a production table."""
        super().__init__(moves)
        self.made: Counter[Any] = Counter()

    def get(self, move: Any, default: Any = None) -> Any:
        """Look a move up as `catalog.table.move` does."""
        self.made[move] += 1
        return super().get(move, default)

    def __getitem__(self, move: Any) -> Any:
        self.made[move] += 1
        return super().__getitem__(move)

    def missing(self) -> list[str]:
        """Name the moves that nobody made."""
        return [f"{state} {what}" for state, what in self if not self.made[state, what]]


@contextmanager
def counted() -> Iterator[dict[str, Counting]]:
    """Count moves while this lasts."""
    tables = {name: Counting(getattr(module, where)) for name, module, where in PLACES}
    before = [(module, where, getattr(module, where)) for _, module, where in PLACES]
    try:
        for name, module, where in PLACES:
            setattr(module, where, tables[name])
        yield tables
    finally:
        for module, where, moves in before:
            setattr(module, where, moves)
