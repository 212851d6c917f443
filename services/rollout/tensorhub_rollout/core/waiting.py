"""The requests that wait for a placement, in the order in which they are to be placed. Pure.

By model; of these by priority, the highest first; of these the ones that have begun before those that have not, each in
the order of submission or return.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator
from heapq import merge
from itertools import chain, islice
from typing import Final

from tensorhub_common.protocol.rollout.entries import RequestId


class WaitingQueue:
    """Requests without an attempt. A request is in it once, and is taken out wherever it is."""

    def __init__(self) -> None:
        self._places: dict[object, tuple[str, int, bool]] = {}
        """By request."""
        self.place_of: Final = self._places.get
        """Returns the model of a request, and how it waits there; None: it does not."""
        self._queues: dict[str, dict[tuple[int, bool], dict[RequestId, int]]] = {}
        """By model, then by (less urgent, has not begun): which, and the number under which it came."""
        self._came = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, of: RequestId) -> bool:
        return of in self._places

    def put(self, of: RequestId, model: str, priority: int, *, has_begun: bool) -> None:
        """Add a request, behind those like it."""
        self.discard(of)
        self._came += 1
        self._places[of] = (model, -priority, not has_begun)
        self._queues.setdefault(model, {}).setdefault((-priority, not has_begun), {})[of] = self._came

    def discard(self, of: RequestId) -> None:
        """Take a request out, if it is in it."""
        place = self._places.pop(of, None)
        if place is None:
            return
        model, less_urgent, is_new = place
        queues, key = self._queues[model], (less_urgent, is_new)
        del queues[key][of]
        if not queues[key]:
            del queues[key]
            if not queues:
                del self._queues[model]

    def of_model(self, model: str) -> Collection[RequestId]:
        """Return the requests of a model in their order, as they are when it is asked.

        Nothing may be put or discarded while they are gone through.
        """
        return _OfModel(self, model)

    def since(self, model: str, number: int) -> tuple[list[RequestId], int]:
        """Return which requests of a model have come since such a number, and the number now; -1: all."""
        came = []
        for queue in self._queues.get(model, {}).values():
            # What a queue has is in the order in which it came; no step of this is for one request by itself.
            numbers = [*islice(reversed(queue.values()), self._came - number)]
            numbers.reverse()
            del numbers[: bisect_right(numbers, number)]
            if numbers:
                requests = [*islice(reversed(queue), len(numbers))]
                requests.reverse()
                came.append((numbers, requests))
        if len(came) == 1:
            return came[0][1], self._came
        return [of for _, of in merge(*(zip(*each, strict=True) for each in came))], self._came

    def count(self, model: str) -> int:
        """Return how many requests of a model wait."""
        return sum(map(len, self._queues.get(model, {}).values()))

    def in_order(self, model: str) -> Iterator[RequestId]:
        """Return the requests of a model in their order."""
        queues = self._queues.get(model, {})
        return chain.from_iterable([queues[key] for key in sorted(queues)])


class _OfModel(Collection[RequestId]):
    """Those of one model."""

    def __init__(self, queue: WaitingQueue, model: str) -> None:
        self._queue, self._model, self._place_of = queue, model, queue.place_of

    def __len__(self) -> int:
        return self._queue.count(self._model)

    def __contains__(self, of: object) -> bool:
        place = self._place_of(of)
        return place is not None and place[0] == self._model

    def __iter__(self) -> Iterator[RequestId]:
        return self._queue.in_order(self._model)
