"""A bounded memo of values computed from lists, and a budget for lookups of known entries. Pure.

`BoundedMemo` stores the results computed from lists that many layouts have alike.

`LookupBudget` decides whether it pays to look for known entries, by the success of earlier lookups. Thousands of ranks
by stages and experts have most of their entries alike, so recognising known entries saves most of the work. Ranks of
FSDP have no entries alike, so looking for them adds half of the work again.

Invariant: the lists in a `BoundedMemo` have at most `PLACES_MAX` places together, or it holds one list that has more.
"""

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

PLACES_MAX: Final = 131_072
"""Limit of the places of all lists in one memo, some 8 MB. Beyond it all are dropped, and computed again on demand."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class BoundedMemo(Generic[_Key, _Value]):
    """Values by lists."""

    def __init__(self) -> None:
        """Begin with none."""
        self._known: dict[_Key, _Value] = {}
        self.places = 0
        """The places of all lists in it."""

    def get(self, key: _Key) -> _Value | None:
        """Return the value of this list, or None."""
        return self._known.get(key)

    def keep(self, key: _Key, places: int, value: _Value) -> _Value:
        """Keep the value of a list with this many places, and return it."""
        self.places += places
        if self.places > PLACES_MAX:
            self._known.clear()
            self.places = places
        self._known[key] = value
        return value


TRIALS_MAX: Final = 16_384
"""Lookups that are tried before one has succeeded: some dozens of layouts, as thousands of ranks have them."""

SAMPLE: Final = 16
"""The size of the sample that tells whether most entries of a layout are known."""

_Item = TypeVar("_Item")


class LookupBudget:
    """Each thing that was known earns a trial, each that was not costs one. Without trials a sample decides."""

    def __init__(self, trials_max: int = TRIALS_MAX) -> None:
        """Begin with all trials."""
        self._max = self._left = trials_max

    def pays(self, items: Sequence[_Item], is_known: Callable[[_Item], bool]) -> bool:
        """Tell whether to look for these."""
        if self._left >= len(items):
            return True
        sample = items[:: -(-len(items) // SAMPLE)]
        return 2 * sum(map(is_known, sample)) > len(sample)

    def count(self, known: int, unknown: int) -> None:
        """Take how it went."""
        self._left = max(0, min(self._max, self._left + known - unknown))
