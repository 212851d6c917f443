"""Placements for comparison: balanced in time by lengths that are known or expected, and the exact optimum. Pure.

An instance whose step takes `fixed + each` seconds for one request, and `each` more for each other one, ends responses
of lengths L after `fixed * max(L) + each * sum(L)`; where it has few slots, `sum(L) / slots` may be more than `max(L)`.
So a long response that is placed beside few others costs least,
and instances are to be equal in time, not in counts: the few longest ones come to have instances to themselves. This
is what TailSieve (2026) says of the offline optimum; it takes lengths from earlier responses to the same prompt. Seer
(2026) takes them from siblings that have ended. Both are in production's estimate of a length.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.balancing import released
from tensorhub_rollout.policy.view import Action, FleetView, PlaceAction
from tensorhub_simulator.rollout_performance.engine_model import EngineCosts, EngineModel

REQUESTS_MAX: Final = 10
"""The optimum of more is not looked for: placements are tried one by one."""


def balanced_in_time(view: FleetView, left_of: Callable[[RequestId], float], costs: EngineCosts) -> list[Action]:
    """Return where all waiting requests go: the longest first, each where it ends soonest.

    `left_of`: how many tokens of a request are still to be made, as far as is known.
    """
    takers = [each for each in view.instances if each.takes_more and not view.is_kept_back(each)]
    actions: list[Action] = [*released(view)]
    if not takers:
        return actions
    left = {of: left_of(of) for of in view.waiting}
    there = {each.runner: [left_of(of) for of in (*each.executing, *each.pending)] for each in takers}
    everything = [*left.values(), *(one for each in there.values() for one in each)]
    context = sum(everything) / max(1, len(everything)) / 2
    each_s = costs.each_s + costs.attention_s * context
    longest = {runner: max(found, default=0.0) for runner, found in there.items()}
    total = {runner: sum(found) for runner, found in there.items()}
    for of in sorted(left, key=lambda each: (-left[each], each)):
        tokens = left[of]

        def ends_s(runner: str, tokens: float = tokens) -> tuple[float, str]:
            steps = max(longest[runner], tokens, (total[runner] + tokens) / costs.slots)
            return costs.fixed_s * steps + each_s * (total[runner] + tokens), runner

        runner = min(total, key=ends_s)
        actions.append(PlaceAction(of, runner, f"it ends soonest there, after {ends_s(runner)[0]:.1f} s"))
        longest[runner] = max(longest[runner], tokens)
        total[runner] += tokens
    return actions


def ends_s(lengths: Sequence[int], prompt: int, costs: EngineCosts) -> float:
    """Return when an engine has made responses of these lengths that all begin at once."""
    engine = EngineModel[int](costs, 0.0)
    for number, length in enumerate(lengths):
        engine.begin(number, prompt, length, 0.0)
    while (ends := engine.next_at()) is not None:
        engine.advance(ends)
    return engine.at


def optimum_s(lengths: Sequence[int], instances: int, prompt: int, costs: EngineCosts) -> float:
    """Return the least time in which instances make responses that all begin at once and stay where they are.

    Raises ValueError for more than `REQUESTS_MAX`.
    """
    if len(lengths) > REQUESTS_MAX:
        raise ValueError(f"the optimum of {len(lengths)} responses would take too long: at most {REQUESTS_MAX}")
    known: dict[tuple[int, ...], float] = {(): 0.0}
    best = float("inf")
    for parts in _parts(sorted(lengths, reverse=True), instances):
        worst = 0.0
        for part in parts:
            if part not in known:
                known[part] = ends_s(part, prompt, costs)
            worst = max(worst, known[part])
        best = min(best, worst)
    return best


def _parts(lengths: Sequence[int], instances: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield all ways to divide lengths among equal instances."""
    if not lengths:
        yield ()
        return
    *before, last = lengths
    for parts in _parts(before, instances):
        for number in range(len(parts)):
            yield (*parts[:number], (*parts[number], last), *parts[number + 1 :])
        if len(parts) < instances:
            yield (*parts, (last,))
