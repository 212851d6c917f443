"""Placing for comparison: balanced in time, by lengths that are known or expected. Pure.

An instance whose step takes `fixed + each` seconds for one request, and `each` more for each other one, ends responses
of lengths L after `fixed * max(L) + each * sum(L)`; where it has few slots, `sum(L) / slots` may be more than `max(L)`.
So a long response that is placed beside few others costs least,
and instances are to be equal in time, not in counts: the few longest ones come to have instances to themselves. This
is what TailSieve (2026) says of the offline optimum; it takes lengths from earlier responses to the same prompt. Seer
(2026) takes them from siblings that have ended. Both are in production's estimate of a length.
"""

from collections.abc import Callable

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.balancing import released
from tensorhub_rollout.policy.view import Action, FleetView, PlaceAction
from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts


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
