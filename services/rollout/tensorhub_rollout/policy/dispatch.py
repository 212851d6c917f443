"""StreamRL's placement (arXiv 2504.15930, section 4.3): the longest responses on instances of their own. Pure.

The open requests with the longest predicted responses are the tail (`skew.tail_of`), and as many instances serve it as
end all soonest (`skew.divided`). Requests wait at the manager until an instance of their part has fewer than
`pending_max` pending, the longest first, each for the one with the least to do. So the division follows what is left of
a step: when short responses are done, all instances serve the tail.

Two things are not of the paper. What has a higher priority goes first, and what has begun before what has not. A
request that is for one version alone goes where that is, whatever part it is of; an instance that keeps an older
version counts for no part.

What runs stays where it is; only an instance whose machine goes away gives its requests back. Until the steps of an
engine were measured, a step is taken to last as long for one request as for many.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from itertools import chain
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


class Pools(msgspec.Struct, frozen=True):
    """How the fleet is divided, and what was found then."""

    tail: frozenset[str] = frozenset()
    """Which instances serve the tail."""
    shortest: float = math.inf
    """The predicted length, in tokens, from which a response is of the tail."""
    among: frozenset[str] = frozenset()
    """The instances that were divided."""
    divided_at: float = -math.inf
    load: Mapping[str, float] = {}
    """How many tokens each instance was to make, by prediction."""
    order: Mapping[RequestId, float] = {}
    """What waited, in the order in which it is to be placed, with the predicted lengths."""


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

    The fleet is divided anew every `DIVIDED_S`, and where instances have come or gone. Between two divisions, what has
    come since goes before what waited then.
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
    fleet = Fleet(len(takers), min((each.slots for each in takers), default=1), _steps_of(takers, steps))
    count = divided(
        _part([of for of in requests if of in tail], lengths, TAIL_QUANTILE),
        _part([of for of in requests if of not in tail], lengths, REST_QUANTILE),
        fleet,
    ).tail_instances
    chosen = _tail_instances(takers, pools, count, size, tail)
    shortest = min((size[of] for of in tail), default=math.inf)
    load = {each.runner: sum(size[of] for of in (*each.executing, *each.pending)) for each in view.instances}
    order = _ordered([*view.waiting], lengths, priority)
    return Pools(chosen, shortest, frozenset(each.runner for each in takers), now, load, order)


def _ordered(
    waiting: list[RequestId], lengths: Mapping[RequestId, LengthEstimate], priority: Callable[[RequestId], int]
) -> dict[RequestId, float]:
    """Return the predicted lengths of requests, in the order in which they are to be placed."""
    size = {of: lengths[of].median for of in waiting}
    waiting.sort(key=lambda of: (-priority(of), not lengths[of].made, -size[of]))
    return {of: size[of] for of in waiting}


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
    waiting = set(view.waiting)
    fresh = [of for of in view.waiting if of not in pools.order]
    fresh_order = _ordered(fresh, {of: estimate(of) for of in fresh}, priority)
    actions: list[PlaceAction] = []
    for of, size in chain(fresh_order.items(), pools.order.items()):
        if of not in waiting:
            continue
        if all(left <= 0 for left in room.values()):
            break
        is_tail, is_alone = size >= pools.shortest, of in view.alone
        part = by_name.keys() if of in view.pinned else (tail if is_tail else rest) or every
        least = limits.pending_max if is_alone else 1
        free = [name for name in part if room[name] >= least and view.fits(of, by_name[name])]
        if not free:
            if is_alone and part:
                # Nothing else is placed where it could go, so that nothing is pending there soon.
                room[max(part, key=lambda name: (room[name], name))] = 0
            continue
        runner = min(free, key=lambda name: (load[name], name))
        which = "the tail" if is_tail else "the rest"
        actions.append(PlaceAction(of, runner, f"about {size:.0f} tokens, of {which}: it has the least to do"))
        # Nothing else is placed beside one that may kill its instance.
        room[runner] = 0 if is_alone else room[runner] - 1
        load[runner] += size
    return actions, load
