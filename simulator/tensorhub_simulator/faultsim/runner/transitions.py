"""Which transitions the seeds went through: of the catalog's tables, of leases and leaders, of memory and of sources.

Tables of production are looked up through a dict that counts. A shard's memory and a read's source have no table in
the code; theirs stand here, and their attribute is watched. A move that a table lacks is told too: either the code
makes a move that the table lacks, or the table here is out of date.
"""

# ruff: noqa: ANN401 (the tables have keys of several kinds)

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MemberDescriptorType, ModuleType
from typing import Any, Final, cast

from tensorhub_agent.core.shard_state import MemoryState, ShardContents
from tensorhub_agent.leases import table as leases_table
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_agent.transfer.trial import Trial, TrialState
from tensorhub_common.catalog import availability
from tensorhub_common.catalog.handlers import admin, membership, rounds
from tensorhub_registry.core import election

Move = tuple[str, str]
"""A state, and what happens to it; in the tables of this file the state after it."""

LOOKED_UP: Final[tuple[tuple[str, tuple[ModuleType, ...], str], ...]] = (
    ("shard", (availability,), "SHARD_TRANSITIONS"),
    ("version", (availability, admin), "VERSION_TRANSITIONS"),
    ("round", (rounds,), "ROUND_TRANSITIONS"),
    ("agent", (membership,), "AGENT_TRANSITIONS"),
    ("lease", (leases_table,), "LEASE_TRANSITIONS"),
    ("leader", (election,), "LEADER_TRANSITIONS"),
)
"""A table's name, and where the code that moves looks it up."""

MEMORY_TRANSITIONS: Final = (
    (MemoryState.EMPTY, MemoryState.READY),  # published
    (MemoryState.EMPTY, MemoryState.FILLING),
    (MemoryState.READY, MemoryState.FILLING),  # read anew over what stood there
    (MemoryState.READY, MemoryState.DRAINING),
    (MemoryState.READY, MemoryState.EMPTY),  # the log does not vouch for it after a rejoin
    (MemoryState.DRAINING, MemoryState.EMPTY),
    (MemoryState.DRAINING, MemoryState.READY),  # held back as the last copy, or stated anew
    (MemoryState.DRAINING, MemoryState.FILLING),  # found to be mapped by no process any more
    (MemoryState.FILLING, MemoryState.READY),
    (MemoryState.FILLING, MemoryState.EMPTY),
)

SOURCE_TRANSITIONS: Final = (
    (SourcePhase.OPENING, SourcePhase.OPEN),
    (SourcePhase.OPENING, SourcePhase.CLOSING),
    (SourcePhase.OPENING, SourcePhase.HELD),
    (SourcePhase.HELD, SourcePhase.OPENING),  # its turn has come
    (SourcePhase.HELD, SourcePhase.CLOSING),
    (SourcePhase.OPEN, SourcePhase.CLOSING),
    (SourcePhase.CLOSING, SourcePhase.CLOSED),
)

TRIAL_TRANSITIONS: Final = (
    (TrialState.RESTING, TrialState.ASKED),
    (TrialState.ASKED, TrialState.RESTING),  # no other source has the pieces, or the one that has them is gone
    (TrialState.ASKED, TrialState.TRYING),
    (TrialState.TRYING, TrialState.RESTING),
    (TrialState.TRYING, TrialState.KEPT),
    (TrialState.KEPT, TrialState.RESTING),  # one of the two is lost
)

WATCHED: Final[tuple[tuple[str, type, str, tuple[tuple[Any, Any], ...]], ...]] = (
    ("memory", ShardContents, "memory", MEMORY_TRANSITIONS),
    ("source", Source, "phase", SOURCE_TRANSITIONS),
    ("trial", Trial, "state", TRIAL_TRANSITIONS),
)
"""A name, the attribute that is watched, and what may become of it."""

UNREACHABLE: Final[Mapping[tuple[str, Move], str]] = {
    ("leader", ("leading", "won")): "a term that is led goes on without a move; another one begins from standby",
}
"""Moves that no seed can make, and why; a run that makes one of them fails, so that this list stays true."""

RARE: Final[Mapping[tuple[str, Move], str]] = {
    ("memory", ("draining", "filling")): "what somebody maps is emptied while a read waits for it: one seed in 2,000",
}
"""Moves that are right, and so seldom that a run need not make them."""


@dataclass(slots=True)
class Tally:
    """One table: its moves, and how often each was made."""

    name: str
    moves: frozenset[Move]
    made: Counter[Move] = field(default_factory=Counter)

    def missing(self) -> list[str]:
        """Name the moves that were not made and could have been."""
        needless = {move for name, move in (*UNREACHABLE, *RARE) if name == self.name}
        return _named(move for move in self.moves if not self.made[move] and move not in needless)

    def wrong(self) -> list[str]:
        """Name the moves that were made and are not in the table, or are said to be out of reach."""
        return _named(move for move in self.made if move not in self.moves or (self.name, move) in UNREACHABLE)

    def add(self, other: "Tally") -> None:
        """Count what another process has counted."""
        self.made.update(other.made)


Tallies = dict[str, Tally]


def _named(moves: Iterator[Move]) -> list[str]:
    return sorted(f"{state} {what}" for state, what in moves)


class Counting(dict[Any, Any]):
    """A transition table that notes which of its moves were looked up."""

    def __init__(self, moves: dict[Any, Any], tally: Tally) -> None:
        """Take the moves of a production table."""
        super().__init__(moves)
        self._made = tally.made

    def get(self, move: Any, default: Any = None) -> Any:
        """Look a move up as `catalog.table.move` does."""
        self._made[move] += 1
        return super().get(move, default)

    def __getitem__(self, move: Any) -> Any:
        self._made[move] += 1
        return super().__getitem__(move)


class Watched:
    """Stands in for a slot of a class, and notes how its value changes."""

    def __init__(self, slot: MemberDescriptorType, tally: Tally) -> None:
        """Take the slot itself, which keeps the values."""
        self._slot, self._made = slot, tally.made

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self._slot.__get__(owner, kind)

    def __set__(self, owner: Any, value: Any) -> None:
        try:
            before = self._slot.__get__(owner)
        except AttributeError:
            before = value
        if before != value:
            self._made[before, value] += 1
        self._slot.__set__(owner, value)


@contextmanager
def counted() -> Iterator[Tallies]:
    """Count moves while this lasts."""
    tallies: Tallies = {}
    before: list[tuple[ModuleType | type, str, Any]] = []
    try:
        for name, modules, where in LOOKED_UP:
            table = getattr(modules[0], where)
            tally = tallies[name] = Tally(name, frozenset(table))
            counting = Counting(table, tally)
            for module in modules:
                before.append((module, where, getattr(module, where)))
                setattr(module, where, counting)
        for name, owner, attribute, moves in WATCHED:
            tally = tallies[name] = Tally(name, frozenset(moves))
            slot = cast("MemberDescriptorType", vars(owner)[attribute])
            before.append((owner, attribute, slot))
            setattr(owner, attribute, Watched(slot, tally))
        yield tallies
    finally:
        for place, where, old in reversed(before):
            setattr(place, where, old)
