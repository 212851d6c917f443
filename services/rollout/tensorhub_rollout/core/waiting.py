"""The requests that wait for a placement, in the order in which they are to be placed. Pure.

By model; of these by priority, the highest first; of these the ones that have begun before those that have not, each in
the order of submission or return.
"""

from collections.abc import Iterator
from itertools import chain

from tensorhub_common.protocol.rollout.entries import RequestId


class WaitingQueue:
    """Requests without an attempt. A request is in it once, and is taken out wherever it is."""

    def __init__(self) -> None:
        self._places: dict[RequestId, tuple[str, int, bool]] = {}
        self._queues: dict[str, dict[tuple[int, bool], dict[RequestId, None]]] = {}
        """By model, then by (less urgent, has not begun)."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, of: RequestId) -> bool:
        return of in self._places

    def put(self, of: RequestId, model: str, priority: int, *, has_begun: bool) -> None:
        """Add a request, behind those like it."""
        self.discard(of)
        self._places[of] = (model, -priority, not has_begun)
        self._queues.setdefault(model, {}).setdefault((-priority, not has_begun), {})[of] = None

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

    def of_model(self, model: str) -> Iterator[RequestId]:
        """Return the requests of a model in their order. Nothing may be put or discarded meanwhile."""
        queues = self._queues.get(model, {})
        return chain.from_iterable([queues[key] for key in sorted(queues)])
