"""What is expected of open requests, from look to look: which waits before which, and what instances have to do. Pure.

To estimate thousands of requests takes longer than a look may. So what has come is told by the view and is estimated at
once, as far as `NEW_MAX` allows it, and of all else a part at each look, what was estimated longest ago first. What has
gone is passed over, and taken out where it is met. What is told of the whole is told by a sample.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.rank_order import Rank, RankOrder
from tensorhub_rollout.policy.request_facts import Facts
from tensorhub_rollout.policy.view import FleetView, InstanceView

LOOKS_A_ROUND: Final = 128
"""After so many looks all was estimated anew, where `RENEWED_MAX` and `AT_WORK_MAX` allow it."""
AT_WORK_MAX: Final = 128
"""Limit of the requests on instances that one look estimates, but for the last instance that it looks at."""
NEW_MAX: Final = 512
"""Limit of the requests that have come and are estimated in one look, the first; the others are in the next ones."""
RENEWED_MAX: Final = 32
"""Limit of the waiting requests that one look estimates anew."""
SAMPLE_MAX: Final = 512
"""Limit of the requests that stand for all. A quantile of that many is off by less than 4 % of them, 19 times in 20."""
WALKED_MAX: Final = 65_536
"""Limit of the waiting requests that are walked through for a sample of them; of more, it is taken in their order."""
RANK_KEPT: Final = 1 / 32
"""A request keeps its rank while its length is off by no more than this share."""


class Ranked(NamedTuple):
    """A request that waits. `left`: how many tokens are to be made. `version`: the one that it is for alone."""

    rank: Rank
    left: float
    version: int | None


class AtWork(NamedTuple):
    """A request on an instance: less its length, which it is, and how many tokens are left to be made."""

    shortness: float
    request: RequestId
    left: float


class Sampled(NamedTuple):
    """One of the requests that stand for all. `runner`: the instance that it is on; empty: it waits."""

    shortness: float
    request: RequestId
    left: float
    runner: str


class Expected:
    """What is expected of the requests of one model. Each look changes it."""

    def __init__(self) -> None:
        """Know of none."""
        self.looks = 0
        """How many it was made of."""
        self.ranked: OrderedDict[RequestId, Ranked] = OrderedDict()
        """What waits, what was estimated longest ago first; and some of what has gone since then."""
        self.ordered: dict[int | None, RankOrder] = {}
        """The ranks of these, by the version that they are for alone; None: for any."""
        self.at_work: dict[str, tuple[AtWork, ...]] = {}
        """By runner, what was looked at longest ago first."""
        self.load: dict[str, float] = {}
        """By runner: how many tokens are to be made."""
        self._waiting = FleetView((), (), 0).waiting
        """What waits, by the latest look."""
        self._unranked: deque[RequestId] = deque()
        """What has come and is to be estimated."""
        self._placed: list[RequestId] = []
        """What the latest look has placed, if the leader has."""
        self._serial: int | None = None
        """Until where it is known what has come; None: it is not."""

    def look(self, view: FleetView, facts: Facts, *, is_renewed: bool = True) -> None:
        """Take what has come and, where `is_renewed`, estimate a part of what was there anew."""
        self._waiting = waiting = view.waiting
        before, self.looks = self.looks, self.looks + is_renewed
        self._look_at_instances(view, facts, before)
        ranked = self.ranked
        due = min(RENEWED_MAX, self._due(before, len(ranked)))
        for of in [*islice(ranked, due)]:
            old, found = ranked[of], _ranked(view, of, facts) if of in waiting else None
            if found is not None and _is_kept(old, found):
                ranked[of] = found._replace(rank=old.rank)
                ranked.move_to_end(of)
                continue
            self.forget(of)
            if found is not None:
                self._rank(of, found)
        for of in self._fresh(view):
            self._rank(of, _ranked(view, of, facts))

    def forget(self, of: RequestId) -> None:
        """Take out a request that has gone: it would be passed over at each look."""
        old = self.ranked.pop(of)
        ranks = self.ordered[old.version]
        ranks.remove(old.rank)
        if not ranks:
            del self.ordered[old.version]

    def place(self, of: RequestId) -> None:
        """Take out a request that is placed, since it came first, unless it still waits at the next look."""
        self.forget(of)
        self._placed.append(of)

    def is_waiting(self, of: RequestId) -> bool:
        """Tell whether a request waits, by the latest look."""
        return of in self._waiting

    def _rank(self, of: RequestId, ranked: Ranked) -> None:
        self.ranked[of] = ranked
        if ranked.version not in self.ordered:
            self.ordered[ranked.version] = RankOrder()
        self.ordered[ranked.version].add(ranked.rank)

    def _fresh(self, view: FleetView) -> list[RequestId]:
        """Return what waits and is to be ranked now."""
        waiting, ranked = view.waiting, self.ranked
        if view.waiting_since is None:
            self._serial = None
            self._unranked = deque(of for of in waiting if of not in ranked)
        else:
            told, self._serial = view.waiting_since(-1 if self._serial is None else self._serial)
            self._unranked.extend(told)
            self._unranked.extend(self._placed)
        self._placed = []
        found: dict[RequestId, None] = {}
        if len(self._unranked) > NEW_MAX:
            # Else what is urgent would wait until all that came before it is estimated.
            found = dict.fromkeys(of for of in islice(waiting, NEW_MAX) if of not in ranked)
        while self._unranked and len(found) < NEW_MAX:
            of = self._unranked.popleft()
            # It may have been told twice, and may have gone since.
            if of in waiting and of not in ranked:
                found[of] = None
        # Sorted, so that it does not depend on who tells what has come.
        return sorted(found)

    def _due(self, before: int, count: int) -> int:
        """Return how many of so many are due, so that each is once in `LOOKS_A_ROUND`."""
        return self.looks * count // LOOKS_A_ROUND - before * count // LOOKS_A_ROUND

    def _look_at_instances(self, view: FleetView, facts: Facts, before: int) -> None:
        """Estimate what is on instances, and how much that is: first of those that nothing is known of."""
        there = {each.runner: each for each in view.instances}
        at_work, load = self.at_work, self.load
        for runner in [runner for runner in load if runner not in there]:
            del load[runner]
            at_work.pop(runner, None)
        due = [runner for runner in there if runner not in at_work]
        for runner in due:
            load.setdefault(runner, 0.0)
        due += islice(at_work, self._due(before, len(there)))
        count = 0
        for runner in due:
            if count >= AT_WORK_MAX:
                break
            at_work.pop(runner, None)
            at_work[runner] = found = _at_work(there[runner], facts)
            load[runner] = sum(each.left for each in found)
            count += len(found)

    def sampled(self) -> tuple[list[Sampled], float]:
        """Return requests that stand for all, the longest first, and for how many each of them stands."""
        total = len(self._waiting) + sum(map(len, self.at_work.values()))
        step = max(1, -(-total // SAMPLE_MAX))
        each_of: Iterable[tuple[RequestId, Ranked]]
        if len(self.ranked) <= WALKED_MAX:
            each_of = islice(self.ranked.items(), 0, None, step)
        else:
            # To walk through a million takes as long as two looks may.
            ranks = (rank for each in self.ordered.values() for rank in each.every(step))
            each_of = ((rank[3], self.ranked[rank[3]]) for rank in ranks)
        found = [Sampled(each.rank[2], of, each.left, "") for of, each in each_of if of in self._waiting]
        at = 0
        for runner, requests in self.at_work.items():
            while at < len(requests):
                found.append(Sampled(*requests[at], runner))
                at += step
            at -= len(requests)
        found.sort()
        return found, total / max(1, len(found))


def _ranked(view: FleetView, of: RequestId, facts: Facts) -> Ranked:
    known = facts.of(of)
    length = known.length
    size = length.median
    return Ranked((-known.priority, not length.made, -size, of), max(1.0, size - length.made), view.pinned.get(of))


def _is_kept(old: Ranked, new: Ranked) -> bool:
    """Tell whether a request may keep its place."""
    is_alike = old.rank[:2] == new.rank[:2] and old.version == new.version
    return is_alike and abs(old.rank[2] - new.rank[2]) <= -RANK_KEPT * old.rank[2]


def _at_work(instance: InstanceView, facts: Facts) -> tuple[AtWork, ...]:
    lengths = ((of, facts.of(of).length) for each in (instance.executing, instance.pending) for of in each)
    sizes = ((of, length.median, length.made) for of, length in lengths)
    return tuple(AtWork(-size, of, max(1.0, size - made)) for of, size, made in sizes)
