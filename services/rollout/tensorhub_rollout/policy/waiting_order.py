"""The waiting requests of a model in the order in which a policy places them. Pure.

To compare thousands of requests with those of the look before takes longer than a look may. So what has come is told by
the view, what has gone is passed over where it stands and is taken out once it is first, and what has come is ranked
`count_max` at a look: others wait behind all that are ranked.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.view import FleetView

GONE_SHARE_MAX: Final = 0.25
"""Once more than this share of those that stand in order has gone, these are taken out."""
GONE_MIN: Final = 64
"""And not where it is so few."""

Rank = tuple[int, bool, float, RequestId]
"""When a waiting request is placed, lower ones first: less urgent, can wait, less its length in tokens, which."""


class WaitingOrder:
    """What waits, in the order of its ranks. A rank is kept until its request comes to wait again, or the step ends."""

    def __init__(self) -> None:
        """Know of none."""
        self._order: list[Rank] = []
        """Some have gone since."""
        self._ranks: dict[RequestId, Rank] = {}
        self._unranked: dict[RequestId, None] = {}
        """Those that are to be ranked, or ranked anew."""
        self._serial: int | None = None
        """Until where it is known what has come; None: it is not."""
        self._step = 0

    def __len__(self) -> int:
        return len(self._order)

    def update(self, view: FleetView, rank: Callable[[RequestId], Rank], count_max: int) -> bool:
        """Take what has come and what has gone, and return whether any has come into the order."""
        self._unranked.update(self._came(view))
        if view.step != self._step:
            # What was submitted ahead is due now.
            self._step = view.step
            self._unranked.update(dict.fromkeys(self._ranks))
        to_rank = [*islice(self._unranked, count_max)]
        for of in to_rank:
            del self._unranked[of]
            if of in self._ranks:
                self._discard(of)
            if of in view.waiting:
                self._ranks[of] = found = rank(of)
                insort(self._order, found)
        self._forget(view)
        return bool(to_rank)

    def of(self, view: FleetView) -> Iterator[RequestId]:
        """Return what waits and is ranked, in its order."""
        return (rank[3] for rank in self._order if rank[3] in view.waiting)

    def _came(self, view: FleetView) -> dict[RequestId, None]:
        if view.waiting_since is None:
            self._serial = None
            came = dict.fromkeys(of for of in view.waiting if of not in self._ranks)
        else:
            is_all = self._serial is None
            told, self._serial = view.waiting_since(-1 if self._serial is None else self._serial)
            came = dict.fromkeys(of for of in told if not (is_all and of in self._ranks))
        return came

    def _discard(self, of: RequestId) -> None:
        del self._order[bisect_left(self._order, self._ranks.pop(of))]

    def _forget(self, view: FleetView) -> None:
        """Take out what has gone: that at the front, and the rest where it is much."""
        waiting, order = view.waiting, self._order
        first = next((at for at, rank in enumerate(order) if rank[3] in waiting), len(order))
        for rank in order[:first]:
            del self._ranks[rank[3]]
        del order[:first]
        gone = len(order) + len(self._unranked) - len(waiting)
        if gone > max(GONE_MIN, GONE_SHARE_MAX * len(order)):
            self._order = [rank for rank in order if rank[3] in waiting]
            self._ranks = {rank[3]: rank for rank in self._order}
            self._unranked = {of: None for of in self._unranked if of in waiting}
