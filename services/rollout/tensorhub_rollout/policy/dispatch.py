"""StreamRL's placement (arXiv 2504.15930, section 4.3): the longest responses on instances of their own. Pure.

The open requests with the longest predicted responses are the tail (`skew.TAIL_SHARE`), and as many instances serve it
as end all soonest (`skew.divided`). Requests wait at the manager until an instance of their part has fewer than
`pending_max` pending, the longest first, each for the one with the least to do. So the division follows what is left of
a step: when short responses are done, all instances serve the tail. An instance without any work takes of both parts.

Two things are not of the paper. What has a higher priority goes first, and what has begun before what has not. A
request that is for one version alone goes where that is, whatever part it is of; an instance that keeps an older
version counts for no part.

What runs stays where it is; only an instance whose machine goes away gives its requests back. Until the steps of an
engine were measured, a step is taken to last as long for one request as for many. With more open requests than
`ranking.SAMPLE_MAX`, a sample of them says what is long.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, merge
from typing import Final, Literal

import msgspec

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.balancing import BalancingLimits, released
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.rank_order import Rank, RankOrder
from tensorhub_rollout.policy.ranking import Expected, Sampled
from tensorhub_rollout.policy.request_facts import Facts
from tensorhub_rollout.policy.skew import REST_QUANTILE, TAIL_QUANTILE, TAIL_SHARE, Fleet, Part, divided
from tensorhub_rollout.policy.view import Action, FleetView, InstanceView, PlaceAction

DIVIDED_S: Final = 1.0
"""How often a fleet is divided anew."""
PLACED_MAX: Final = 512
"""Limit of the requests that one look places, so that it is short in a fleet of any size."""
GONE_MAX: Final = 4096
"""Limit of the requests that have gone and that one look passes over; the next one goes on."""
_UNMEASURED: Final = StepModel(1.0, 0.0, 0.0)

Side = Literal["tail", "rest"] | int
"""What a request is of: one of the parts, or those that are for this version alone."""


class Pools(msgspec.Struct, frozen=True):
    """How the fleet is divided, and what is expected of requests."""

    tail: frozenset[str] = frozenset()
    """Which instances serve the tail."""
    tail_least: tuple[float, RequestId] = (-math.inf, RequestId(0, 0))
    """The last request of the tail: less its length, and which. As long ones submitted later are not of it."""
    among: frozenset[str] = frozenset()
    """The instances that were divided."""
    divided_at: float = -math.inf
    expected: Expected = msgspec.field(default_factory=Expected)
    """Each look changes it."""

    @property
    def load(self) -> Mapping[str, float]:
        """How many tokens each instance is still to make, by prediction."""
        return self.expected.load


def dispatch(
    view: FleetView,
    facts: Facts,
    pools: Pools,
    limits: BalancingLimits,
    now: float,
) -> tuple[tuple[Action, ...], Pools]:
    """Return what to place, and how the fleet is divided from now on.

    The fleet is divided anew every `DIVIDED_S`, and where instances have come or gone.
    """
    kept_back = view.kept_back()
    takers = [each for each in view.instances if each.takes_more and each.runner not in kept_back]
    is_due = pools.among != {each.runner for each in takers} or now - pools.divided_at >= DIVIDED_S
    # A look that divides does not renew what is expected, so that none takes long.
    expected = pools.expected
    expected.look(view, facts, is_renewed=not is_due)
    if is_due:
        pools = _divided(takers, expected, facts.steps, pools, now)
    placed = _placed(view, expected, pools, _Room(view, expected.load, pools.tail, limits))
    return (*released(view), *placed), pools


def _divided(
    takers: list[InstanceView], expected: Expected, steps: Mapping[str, StepModel], pools: Pools, now: float
) -> Pools:
    """Return how the fleet is divided for all that is open."""
    sample, each_is = expected.sampled()
    size = math.ceil(TAIL_SHARE * len(sample))
    tail, rest = sample[:size], sample[size:]
    fleet = Fleet(len(takers), min((max(1, each.slots) for each in takers), default=1), _steps_of(takers, steps))
    count = divided(_part(tail, each_is, TAIL_QUANTILE), _part(rest, each_is, REST_QUANTILE), fleet).tail_instances
    least = tail[-1][:2] if tail else Pools().tail_least
    among = frozenset(each.runner for each in takers)
    return Pools(_tail_instances(takers, pools, count, tail), least, among, now, expected)


def _steps_of(takers: list[InstanceView], steps: Mapping[str, StepModel]) -> StepModel:
    """Return the model of the instance in the middle, by its time for a full batch."""
    known = [(steps[each.runner].seconds(each.slots, 0.0), each.runner) for each in takers if each.runner in steps]
    return steps[sorted(known)[len(known) // 2][1]] if known else _UNMEASURED


def _part(sample: Sequence[Sampled], each_is: float, share: float) -> Part:
    """Return the part that these stand for: the length that stands for all is what is left to be made."""
    if not sample:
        return Part(0, 0.0)
    left = sorted(each.left for each in sample)
    at = min(len(left) - 1, int(share * len(left)))
    return Part(round(each_is * len(sample)), left[at], -statistics.fmean(each.shortness for each in sample))


def _tail_instances(takers: list[InstanceView], pools: Pools, count: int, tail: Sequence[Sampled]) -> frozenset[str]:
    """Return which instances serve the tail: first those that did, then those on which most of it is."""
    on_it: dict[str, float] = {}
    for each in tail:
        on_it[each.runner] = on_it.get(each.runner, 0.0) + each.shortness

    def order(each: InstanceView) -> tuple[bool, float, str]:
        return each.runner not in pools.tail, on_it.get(each.runner, 0.0), each.runner

    return frozenset(each.runner for each in sorted(takers, key=order)[:count])


def _placed(view: FleetView, expected: Expected, pools: Pools, room: "_Room") -> list[PlaceAction]:
    """Return what to place, count it in `room`, and take it out of what is expected."""
    actions: list[PlaceAction] = []
    gone: list[RequestId] = []
    full: set[Side] = set()
    for rank, side in _in_order(expected, pools.tail_least, full):
        if len(actions) >= PLACED_MAX or len(gone) >= GONE_MAX:
            break
        of = rank[3]
        if side in full:
            continue
        if not expected.is_waiting(of):
            gone.append(of)
            continue
        is_alone = of in view.alone
        runner = room.found_alone(side) if is_alone else room.found(side)
        if runner is None:
            if not is_alone:
                full.add(side)
            continue
        is_tail = (rank[2], of) <= pools.tail_least
        which = "the tail" if is_tail else "the rest"
        actions.append(PlaceAction(of, runner, f"about {-rank[2]:.0f} tokens, of {which}: it has the least to do"))
        room.take(runner, expected.ranked[of].left, is_alone=is_alone)
    for of in gone:
        expected.forget(of)
    for each in actions:
        expected.place(each.request)
    return actions


def _in_order(expected: Expected, tail_least: tuple[float, RequestId], full: set[Side]) -> Iterator[tuple[Rank, Side]]:
    """Yield requests in the order in which they are to be placed; none of what has become `full` meanwhile."""
    streams: list[Iterator[tuple[Rank, Side]]] = []
    for version, ranks in expected.ordered.items():
        streams.append(_of_any(ranks, tail_least, full) if version is None else _of_version(ranks, version, full))
    return merge(*streams)


def _of_any(ranks: RankOrder, tail_least: tuple[float, RequestId], full: set[Side]) -> Iterator[tuple[Rank, Side]]:
    """Yield those of both parts. Of what is equally urgent the tail comes first, so that either is left out at once."""
    left = iter(ranks)
    while (rank := next(left, None)) is not None:
        side: Side = "tail" if rank[2:] <= tail_least else "rest"
        if side not in full:
            yield rank, side
        elif side == "tail":
            left = ranks.behind((*rank[:2], *tail_least))
        else:
            left = ranks.behind((*rank[:2], math.inf, rank[3]))


def _of_version(ranks: RankOrder, version: int, full: set[Side]) -> Iterator[tuple[Rank, Side]]:
    for rank in ranks:
        if version in full:
            return
        yield rank, version


class _Room:
    """Where there is room, and who has the least to do, as requests are placed."""

    def __init__(self, view: FleetView, load: dict[str, float], tail: frozenset[str], limits: BalancingLimits) -> None:
        self._pending_max = limits.pending_max
        self._instances: dict[str, InstanceView] = {}
        self._room: dict[str, int] = {}
        self._load = load
        """What each has to do, with what is placed."""
        every, kept_back = set[str](), view.kept_back()
        self._idle: set[str] = set()
        for each in view.instances:
            if not each.takes_more:
                continue
            name, pending = each.runner, len(each.pending)
            self._instances[name] = each
            self._room[name] = limits.pending_max - pending
            if name not in kept_back:
                every.add(name)
                if not (pending or each.executing):
                    self._idle.add(name)
        self._tail, rest = every & tail, every - tail
        self._names: dict[Side, set[str]] = {"tail": self._tail or rest, "rest": rest or self._tail}
        self._every = every
        self._heaps: dict[Side | Literal["idle"], list[tuple[float, str]]] = {"idle": self._heap(self._idle)}

    def found(self, side: Side) -> str | None:
        """Return where a request goes; None: there is no room."""
        runner = self._least(side)
        # An instance without work is of use to the other part too.
        return self._least("idle") if runner is None and isinstance(side, str) else runner

    def found_alone(self, side: Side) -> str | None:
        """Return where nothing is pending; None: nowhere, and nothing else is placed where that may be soon."""
        names = self._of(side)
        free = [name for name in names if self._room[name] >= self._pending_max]
        if not free and isinstance(side, str):
            free = [name for name in self._idle if self._room[name] >= self._pending_max]
        if free:
            return min(free, key=lambda name: (self._load[name], name))
        if names:
            self._room[max(names, key=lambda name: (self._room[name], name))] = 0
        return None

    def take(self, runner: str, left: float, *, is_alone: bool) -> None:
        """Count a request that is placed; nothing else is placed beside one that may kill its instance."""
        self._room[runner] = 0 if is_alone else self._room[runner] - 1
        self._load[runner] += left
        self._idle.discard(runner)
        if self._room[runner] <= 0:
            return
        sides: list[Side] = ["tail" if runner in self._tail else "rest"] if runner in self._every else []
        version = self._instances[runner].version
        if version is not None:
            sides.append(version)
        for side in sides:
            if side in self._heaps:
                heappush(self._heaps[side], (self._load[runner], runner))

    def _least(self, side: Side | Literal["idle"]) -> str | None:
        """Return the instance with the least to do; what stands in a heap with another load has changed since."""
        if side not in self._heaps and side != "idle":
            self._heaps[side] = self._heap(self._of(side))
        heap = self._heaps[side]
        while heap:
            load, name = heap[0]
            if self._room[name] > 0 and load == self._load[name]:
                return name
            heappop(heap)
        return None

    def _of(self, side: Side) -> set[str]:
        """Return the instances that a request may go to."""
        if side not in self._names:
            self._names[side] = {name for name, each in self._instances.items() if each.version == side}
        return self._names[side]

    def _heap(self, names: set[str]) -> list[tuple[float, str]]:
        found = [(self._load[name], name) for name in names if self._room[name] > 0]
        heapify(found)
        return found
