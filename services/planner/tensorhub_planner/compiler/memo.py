"""What was worked out of lists that many layouts have alike. Pure.

Always true: at most `PLACES_MAX` places of all lists that are remembered, or those of one that has more.
"""

from typing import Final, Generic, TypeVar

PLACES_MAX: Final = 131_072
"""So many places of lists that are unlike are remembered by each who remembers some; then all are forgotten, and worked
out again when they are wanted: some 8 MB."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Remembered(Generic[_Key, _Value]):
    """Values by lists."""

    def __init__(self) -> None:
        """Begin with none."""
        self._known: dict[_Key, _Value] = {}
        self.places = 0
        """So many are remembered."""

    def get(self, key: _Key) -> _Value | None:
        """Return what was worked out of this, or None."""
        return self._known.get(key)

    def keep(self, key: _Key, places: int, value: _Value) -> _Value:
        """Remember what was worked out of a list that has so many places, and return it."""
        self.places += places
        if self.places > PLACES_MAX:
            self._known.clear()
            self.places = places
        self._known[key] = value
        return value
