"""StreamRL's placement (arXiv 2504.15930, section 4.3): the longest responses on instances of their own. Pure.

The open requests with the longest predicted responses are the tail (`skew.tail_of`), and as many instances serve it as
end all soonest (`skew.divided`). Requests wait at the manager until an instance of their part has fewer than
`pending_max` pending, the longest first, each for the one with the least to do. So the division follows what is left of
a step: when short responses are done, all instances serve the tail. An instance without any work takes of both parts.

Two things are not of the paper. What has a higher priority goes first, and what has begun before what has not. A
request that is for one version alone goes where that is, whatever part it is of; an instance that keeps an older
version counts for no part.

What runs stays where it is; only an instance whose machine goes away gives its requests back. Until the steps of an
engine were measured, a step is taken to last as long for one request as for many.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from heapq import merge
from typing import Final

import msgspec

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.balancing import BalancingLimits, released
from tensorhub_rollout.policy.lengths import LengthEstimate
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.skew import REST_QUANTILE, TAIL_QUANTILE, Fleet, Part, divided, tail_of
from tensorhub_rollout.policy.view import Action, FleetView, InstanceView, PlaceAction

DIVIDED_S: Final = 1.0
"""How often a fleet is divided anew: it takes some 20 ms with 10,000 open requests."""
_UNMEASURED: Final = StepModel(1.0, 0.0, 0.0)


class Rank(msgspec.Struct, frozen=True, order=True):
    """When a waiting request is placed: lower ranks first."""

    less_urgent: int
    is_new: bool
    less_long: float
    left: float
    """How many tokens are to be made, by prediction."""

    @classmethod
    def of(cls, length: LengthEstimate, priority: int) -> "Rank":
        """Return the rank of a request."""
        size = length.median
        return cls(-priority, not length.made, -size, max(1.0, size - length.made))

    @property
    def size(self) -> float:
        """How long its response will be, in tokens."""
        return -self.less_long


class Pools(msgspec.Struct, frozen=True):
    """How the fleet is divided, and what was found then."""

    tail: frozenset[str] = frozenset()
    """Which instances serve the tail."""
    tail_requests: frozenset[RequestId] = frozenset()
    """The tail. Of what has come since, it is what is longer than all others."""
    rest_longest: float = math.inf
    """The longest predicted length, in tokens, of what is not of the tail."""
    among: frozenset[str] = frozenset()
    """The instances that were divided."""
    divided_at: float = -math.inf
    load: Mapping[str, float] = {}
    """How many tokens each instance is still to make, by prediction."""
    order: Mapping[RequestId, Rank] = {}
    """What waited, in the order in which it is to be placed."""


def dispatch(
    view: FleetView,
    estimate: Callable[[RequestId], LengthEstimate],
    steps: Mapping[str, StepModel],
    pools: Pools,
    limits: BalancingLimits,
    priority: Callable[[RequestId], int],
    now: float,
) -> tuple[tuple[Action, ...], Pools]:
    """Return what to place, and how the fleet is divided from now on. `steps`: by runner, where known.

    The fleet is divided anew every `DIVIDED_S`, and where instances have come or gone.
    """
    takers = [each for each in view.instances if each.takes_more and not view.is_kept_back(each)]
    if pools.among != {each.runner for each in takers} or now - pools.divided_at >= DIVIDED_S:
        pools = _divided(view, takers, estimate, steps, pools, priority, now)
    placed = list[PlaceAction]()
    has_room = any(each.takes_more and len(each.pending) < limits.pending_max for each in view.instances)
    if has_room and view.waiting:
        placed, load = _placed(view, estimate, priority, pools, limits)
        pools = msgspec.structs.replace(pools, load=load)
    return (*released(view), *placed), pools


def _divided(
    view: FleetView,
    takers: list[InstanceView],
    estimate: Callable[[RequestId], LengthEstimate],
    steps: Mapping[str, StepModel],
    pools: Pools,
    priority: Callable[[RequestId], int],
    now: float,
) -> Pools:
    """Return how the fleet is divided for all that is open."""
    there = (of for each in view.instances for of in (*each.executing, *each.pending))
    lengths = {of: estimate(of) for of in (*view.waiting, *there)}
    requests = [*lengths]
    size = {of: lengths[of].median for of in requests}
    tail = {requests[at] for at in tail_of([*size.values()])}
    fleet = Fleet(len(takers), min((max(1, each.slots) for each in takers), default=1), _steps_of(takers, steps))
    count = divided(
        _part([of for of in requests if of in tail], lengths, TAIL_QUANTILE),
        _part([of for of in requests if of not in tail], lengths, REST_QUANTILE),
        fleet,
    ).tail_instances
    chosen = _tail_instances(takers, pools, count, size, tail)
    rest_longest = max((size[of] for of in requests if of not in tail), default=math.inf)
    left = {of: max(1.0, size[of] - lengths[of].made) for of in requests}
    load = {each.runner: sum(left[of] for of in (*each.executing, *each.pending)) for each in view.instances}
    order = _ordered(view.waiting, lengths.__getitem__, priority)
    among = frozenset(each.runner for each in takers)
    return Pools(chosen, frozenset(tail), rest_longest, among, now, load, order)


def _ordered(
    waiting: Iterable[RequestId],
    estimate: Callable[[RequestId], LengthEstimate],
    priority: Callable[[RequestId], int],
) -> dict[RequestId, Rank]:
    """Return the ranks of requests, in their order."""
    ranks = [(of, Rank.of(estimate(of), priority(of))) for of in waiting]
    ranks.sort(key=lambda each: each[1])
    return dict(ranks)


def _steps_of(takers: list[InstanceView], steps: Mapping[str, StepModel]) -> StepModel:
    """Return the model of the instance in the middle, by its time for a full batch."""
    known = [(steps[each.runner].seconds(each.slots, 0.0), each.runner) for each in takers if each.runner in steps]
    return steps[sorted(known)[len(known) // 2][1]] if known else _UNMEASURED


def _part(requests: list[RequestId], lengths: Mapping[RequestId, LengthEstimate], share: float) -> Part:
    """Return the part that these requests are: the length that stands for them is what is left to be made."""
    if not requests:
        return Part(0, 0.0)
    left = sorted(max(1.0, lengths[of].median - lengths[of].made) for of in requests)
    at = min(len(left) - 1, int(share * len(left)))
    return Part(len(requests), left[at], statistics.fmean(lengths[of].median for of in requests))


def _tail_instances(
    takers: list[InstanceView], pools: Pools, count: int, size: Mapping[RequestId, float], tail: set[RequestId]
) -> frozenset[str]:
    """Return which instances serve the tail: first those that did, then those on which most of it is."""

    def order(each: InstanceView) -> tuple[bool, float, str]:
        on_it = sum(size[of] for of in (*each.executing, *each.pending) if of in tail)
        return each.runner not in pools.tail, -on_it, each.runner

    return frozenset(each.runner for each in sorted(takers, key=order)[:count])


def _placed(
    view: FleetView,
    estimate: Callable[[RequestId], LengthEstimate],
    priority: Callable[[RequestId], int],
    pools: Pools,
    limits: BalancingLimits,
) -> tuple[list[PlaceAction], dict[str, float]]:
    """Return what to place, and what each instance is to make with it."""
    by_name = {each.runner: each for each in view.instances if each.takes_more}
    room = {name: limits.pending_max - len(each.pending) for name, each in by_name.items()}
    load = {name: pools.load.get(name, 0.0) for name in by_name}
    every = {name for name, each in by_name.items() if not view.is_kept_back(each)}
    tail = pools.tail & every
    rest = every - tail
    idle = {name for name in every if not (by_name[name].executing or by_name[name].pending)}
    waiting = set(view.waiting)
    fresh = _ordered((of for of in view.waiting if of not in pools.order), estimate, priority)
    known = ((of, rank) for of, rank in pools.order.items() if of in waiting)
    actions: list[PlaceAction] = []
    for of, rank in merge(fresh.items(), known, key=lambda each: each[1]):
        if all(left <= 0 for left in room.values()):
            break
        is_tail = of in pools.tail_requests or (of in fresh and rank.size > pools.rest_longest)
        is_alone = of in view.alone
        if of in view.pinned:
            part = [name for name, each in by_name.items() if view.fits(of, each)]
        else:
            part = [*((tail if is_tail else rest) or every)]
        least = limits.pending_max if is_alone else 1
        # An instance without work is of use to the other part too.
        free = [name for name in part if room[name] >= least] or [
            name for name in idle if room[name] >= least and of not in view.pinned
        ]
        if not free:
            if is_alone and part:
                # Nothing else is placed where it could go, so that nothing is pending there soon.
                room[max(part, key=lambda name: (room[name], name))] = 0
            continue
        runner = min(free, key=lambda name: (load[name], name))
        which = "the tail" if is_tail else "the rest"
        actions.append(PlaceAction(of, runner, f"about {rank.size:.0f} tokens, of {which}: it has the least to do"))
        # Nothing else is placed beside one that may kill its instance.
        room[runner] = 0 if is_alone else room[runner] - 1
        load[runner] += rank.left
        idle.discard(runner)
    return actions, load
