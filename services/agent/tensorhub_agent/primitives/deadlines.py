"""The next moment at which each of many things wants to be looked at. Pure.

An agent has a thousand shards and as many leases, and after every event somebody asks which of them is due next. To
ask each one costs as much as there are of them, each time: a thousand readers at once took all of a core for minutes.

Invariants:
- `earliest` and `due` go by the moment that was noted last; what was noted before it counts no more.
- The heap holds at most one valid entry for each name.
"""

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Final, Generic, TypeVar

NEVER: Final = float("inf")

Name = TypeVar("Name", bound=Hashable)


class DeadlineHeap(Generic[Name]):
    """Deadlines by name. `note` and `due` cost the logarithm of how many there are."""

    def __init__(self) -> None:
        """Begin with none."""
        self._when: dict[Name, float] = {}
        self._order: dict[Name, int] = {}
        """In which order the names came: those that are due together are due in it."""
        self._heap: list[tuple[float, int, Name]] = []
        self._numbers = count()

    def note(self, name: Name, when: float | None) -> None:
        """Say when a name wants to be looked at from now on; None: it does not."""
        if when is None:
            self._when.pop(name, None)
            return
        if self._when.get(name) == when:
            return
        self._when[name] = when
        if name not in self._order:
            self._order[name] = next(self._numbers)
        heapq.heappush(self._heap, (when, self._order[name], name))
        if len(self._heap) > 2 * len(self._when) + 64:
            self._heap = [(each, self._order[noted], noted) for noted, each in self._when.items()]
            heapq.heapify(self._heap)

    def forget(self, name: Name) -> None:
        """The name is gone."""
        self._when.pop(name, None)
        self._order.pop(name, None)

    def of(self, name: Name) -> float | None:
        """Return a name's deadline."""
        return self._when.get(name)

    def earliest(self) -> float | None:
        """Return the first deadline."""
        heap = self._heap
        while heap and not self._is_valid(heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> list[Name]:
        """Return the names whose deadline has come, in the order in which they came; their owner notes them anew."""
        found: dict[Name, int] = {}
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            if self._is_valid(entry):
                found[entry[2]] = entry[1]
                del self._when[entry[2]]
        return sorted(found, key=found.__getitem__)

    def _is_valid(self, entry: tuple[float, int, Name]) -> bool:
        when, number, name = entry
        return self._when.get(name) == when and self._order.get(name) == number
