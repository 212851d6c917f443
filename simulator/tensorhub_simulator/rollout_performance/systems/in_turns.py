"""Placing for comparison: each instance gets equally many requests, in turns. Pure."""

from tensorhub_rollout.policy.balancing import released
from tensorhub_rollout.policy.view import Action, FleetView, PlaceAction


def in_turns(view: FleetView) -> list[Action]:
    """Return where all waiting requests go in a job that knows nothing of lengths: to each instance equally many."""
    there = {each.runner: len(each.pending) + len(each.executing) for each in view.instances if each.takes_more}
    actions: list[Action] = [*released(view)]
    for of in view.waiting if there else ():
        runner = min(there, key=lambda each: (there[each], each))
        there[runner] += 1
        actions.append(PlaceAction(of, runner, "it is its turn"))
    return actions
