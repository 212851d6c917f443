"""The waiting requests of a model in the order in which a policy places them. Pure.

To compare thousands of requests with those of the look before takes longer than a look may. So what has come is told by
the view, what has gone is passed over where it stands and is taken out once it was met or a few at a look, and what
has come is ranked `count_max` at a look: others wait behind all that are ranked, and what is urgent does not.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.rank_order import Rank, RankOrder
from tensorhub_rollout.policy.view import FleetView

GONE_SHARE_MAX: Final = 0.25
"""Once more than this share of what is known has gone, it is looked for."""
GONE_MIN: Final = 64
"""And not where it is so few."""
GONE_MAX: Final = 4096
"""Limit of the requests that have gone and that one look passes over; the next one goes on."""
SWEPT_MAX: Final = 512
"""Limit of the ranked requests that one look looks at for what has gone."""


class WaitingOrder:
    """What waits, in the order of its ranks.

    A rank is kept until its request comes to wait again, the step ends, or it is its turn to be ranked anew.
    """

    def __init__(self) -> None:
        """Know of none."""
        self._order = RankOrder()
        """Some have gone since."""
        self._ranks: dict[RequestId, Rank] = {}
        self._unranked: deque[RequestId] = deque()
        """Those that are to be ranked, or ranked anew; some may be there twice, and some have gone since."""
        self._early: set[RequestId] = set()
        """Those that were ranked out of turn, and are passed over in their turn."""
        self._met: list[RequestId] = []
        """Some that had gone and stood in the order."""
        self._swept: deque[RequestId] = deque()
        """Those that are yet to be looked at, for what has gone and for what has another rank by now."""
        self._serial: int | None = None
        """Until where it is known what has come; None: it is not."""
        self._step = 0

    def __len__(self) -> int:
        return len(self._order)

    def update(self, view: FleetView, rank: Callable[[RequestId], Rank], count_max: int) -> bool:
        """Take what has come and what has gone, and return whether any has come into the order."""
        self._unranked.extend(self._came(view))
        if view.step != self._step:
            # What was submitted ahead is due now.
            self._step = view.step
            self._unranked.extend(self._ranks)
        waiting, count = view.waiting, 0
        for of in self._to_rank(view, count_max):
            count += 1
            if of in self._ranks:
                self._discard(of)
            if of in waiting:
                self._ranks[of] = found = rank(of)
                self._order.add(found)
        self._forget(view)
        return count > 0

    def rank_anew(self, view: FleetView, rank: Callable[[RequestId], Rank], count_max: int) -> None:
        """Rank some anew of those that are ranked, the next ones each time."""
        for of in self._next(count_max):
            self._discard(of)
            if of in view.waiting:
                self._ranks[of] = found = rank(of)
                self._order.add(found)

    def of(self, view: FleetView) -> Iterator[RequestId]:
        """Return what waits and is ranked, in its order; what has gone and is met is taken out at the next update."""
        waiting = view.waiting
        for rank in self._order:
            if rank[3] in waiting:
                yield rank[3]
                continue
            self._met.append(rank[3])
            if len(self._met) >= GONE_MAX:
                return

    def _to_rank(self, view: FleetView, count_max: int) -> list[RequestId]:
        """Return what is ranked at this look: where more have come, first what is the first to be placed."""
        unranked, early = self._unranked, self._early
        found: list[RequestId] = []
        if len(unranked) > count_max:
            # Else what is urgent would wait until all that came before it is ranked.
            found += (of for of in islice(view.waiting, count_max) if of not in self._ranks)
            early.update(found)
        while unranked and len(found) < count_max:
            of = unranked.popleft()
            if of in early:
                early.discard(of)
            else:
                found.append(of)
        return found

    def _came(self, view: FleetView) -> Iterable[RequestId]:
        if view.waiting_since is None:
            self._serial = None
            unranked = {*self._unranked}
            return [of for of in view.waiting if of not in self._ranks and of not in unranked]
        if self._serial is not None:
            told, self._serial = view.waiting_since(self._serial)
            return told
        told, self._serial = view.waiting_since(-1)
        # Those that were found without being told are there already.
        unranked = {*self._unranked}
        return [of for of in told if of not in self._ranks and of not in unranked]

    def _discard(self, of: RequestId) -> None:
        self._order.remove(self._ranks.pop(of))

    def _forget(self, view: FleetView) -> None:
        """Take out what has gone: what was met, and the rest where it is much."""
        waiting = view.waiting
        for of in self._met:
            if of in self._ranks and of not in waiting:
                self._discard(of)
        self._met.clear()
        gone = len(self._order) + len(self._unranked) - len(waiting)
        if gone <= max(GONE_MIN, GONE_SHARE_MAX * len(waiting)):
            return
        if len(self._unranked) > len(waiting):
            self._unranked = deque(dict.fromkeys(of for of in self._unranked if of in waiting))
            self._early.intersection_update(self._unranked)
        for of in self._next(SWEPT_MAX):
            if of not in waiting:
                self._discard(of)

    def _next(self, count: int) -> Iterator[RequestId]:
        """Return this number of those that are ranked, the next ones each time."""
        if count and not self._swept:
            self._swept.extend(self._ranks)
        for _ in range(min(count, len(self._swept))):
            of = self._swept.popleft()
            if of in self._ranks:
                yield of
