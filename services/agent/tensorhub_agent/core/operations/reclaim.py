"""Finds memory of one shard that no process maps, so that it may be written. Pure.

Who maps a shard's memory (install="mapped") holds a lock on it until the mapping is gone. The kernel doesn't tell of
that end, so it is asked again and again while somebody waits. A shard that is to be emptied and has spare memory need
not wait for those who map its own: the bytes are copied into the spare memory, which is the shard's from then on.
Where a reader has to be waited for, it is told, and lets go of the memory if it can.

Always true: `is_found` is said only of memory of which a probe, made after the last lease had ended, has found no lock;
nothing is copied into spare memory that somebody maps.
"""

from enum import StrEnum
from typing import Final

from tensorhub_agent.core.effects import CopyToSpare, Duplicated, EffectOutcome, Probed, ProbeMapping
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState

PROBE_AGAIN_S: Final = 0.02
"""So often it is asked whether mapped memory is free. It costs three system calls."""


class MemoryChoice(StrEnum):
    """Which memory is wanted."""

    OWN = "own"
    SPARE = "spare"
    EITHER = "either"
    """The shard's own; or the spare one, with the same bytes."""


class MemoryReclaim:
    """One search. Once `is_found`, the wanted memory may be written, if no lease was granted since."""

    def __init__(self, core: ShardCore, where: MemoryChoice) -> None:
        """Begin when `seek` is called."""
        self._core = core
        self._where = where if core.spec.staged or where is MemoryChoice.OWN else MemoryChoice.OWN
        self._asked = False
        self._copying = False
        self._at: float | None = None
        self.is_blocked = False
        """Somebody was found to map the memory, and it was not free since."""

    @property
    def is_found(self) -> bool:
        """Whether no process maps the wanted memory."""
        contents = self._core.contents
        return not self._copying and not (contents.spare_lent if self._where is MemoryChoice.SPARE else contents.lent)

    @property
    def is_copying(self) -> bool:
        """Whether the spare memory is being written."""
        return self._copying

    def seek(self) -> None:
        """Ask, unless that is under way."""
        if not self.is_found and not self._asked and not self._copying and self._at is None:
            self._ask(spare=self._where is MemoryChoice.SPARE)

    def _ask(self, *, spare: bool) -> None:
        self._asked = True
        # Of two memories the older one is asked for: those who map the other one show what is newest.
        asks_back = self.is_blocked and (spare or self._where is not MemoryChoice.EITHER)
        self._core.emit(ProbeMapping(self._core.key, spare, asks_back))

    def on_outcome(self, outcome: EffectOutcome, now: float) -> None:
        """Take what a probe has found, or that the copy is done."""
        core = self._core
        if isinstance(outcome, Duplicated) and self._copying:
            self._copying = False
            core.set_memory(MemoryState.DRAINING, swap=True)
        elif isinstance(outcome, Probed) and self._asked:
            self._asked = False
            core.note_lent(outcome.lent, spare=outcome.spare)
            self._follow(outcome, now)

    def _follow(self, outcome: Probed, now: float) -> None:
        if self.is_found:
            self.is_blocked = False
        elif self._where is MemoryChoice.EITHER and not outcome.spare and self._core.contents.spare_lent:
            self._ask(spare=True)
        elif self._where is MemoryChoice.EITHER and not self._core.contents.spare_lent:
            self._copying, self.is_blocked = True, False
            # What a failed read had left there is overwritten.
            self._core.drop_kept()
            self._core.emit(CopyToSpare(self._core.key))
        else:
            self.is_blocked = True
            self._at = now + PROBE_AGAIN_S

    def tick(self, now: float) -> None:
        """Ask again when it is time."""
        if self._at is not None and now >= self._at:
            self._at = None
            self.seek()

    def deadline(self) -> float | None:
        """Say when `tick` is wanted."""
        return self._at
