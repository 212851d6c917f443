"""When each instance takes a newer version: when few cached tokens are lost by that, or its rule asks for it. Pure.

An engine drops the keys and values of all that runs when its weights change (`on_update="continue"`), and computes them
again. Where requests may still begin on the version that an instance has, it can therefore stay on it, and leave out
versions in between. It goes on once what runs on it is small beside what mostly runs there, or once requests may not
begin on its version any more. Instances go on at times of their own, so the fleet is never all at once without a cache.

Nothing is moved to others that stay: what moves is computed again there, as it would be here.
"""

from collections.abc import Mapping

import msgspec

from tensorhub_rollout.policy.view import FleetView


class RollingLimits(msgspec.Struct, frozen=True):
    """The settings of rolling activation."""

    is_on: bool = True
    small_share: float = 0.5
    """An instance goes on where what it would compute again is at most this share of its mean."""
    mean_s: float = 30.0
    """The mean is of about this time."""


class RollingState(msgspec.Struct, frozen=True):
    """What was seen, by runner."""

    means: Mapping[str, float] = {}
    """The mean of the tokens that would have to be computed again."""
    left: Mapping[str, int] = {}
    """The version that it is to go on from: it may be loading the next one already."""
    at: float | None = None


def stay(
    view: FleetView, contexts: Mapping[str, float], state: RollingState, limits: RollingLimits, now: float
) -> tuple[dict[str, int], RollingState]:
    """Return which version each instance is to keep that is not to take a newer one; and the state after it.

    `contexts`: how many tokens of what each instance has would be computed again.
    """
    if not limits.is_on or not view.drops_cache:
        return {}, RollingState()
    passed_s = 0.0 if state.at is None else now - state.at
    weight = min(1.0, passed_s / limits.mean_s)
    means: dict[str, float] = {}
    left: dict[str, int] = {}
    found: dict[str, int] = {}
    means_before, newest = state.means, view.newest
    for each in view.instances:
        runner, version = each.runner, each.version
        context = contexts.get(runner, 0.0)
        before = means_before.get(runner, context)
        means[runner] = mean = before + weight * (context - before)
        if version is None or each.is_leaving:
            continue
        if version == newest:
            # Told before the next one is published: else it would have begun to load that.
            if each.may_stay:
                found[runner] = version
        elif each.may_stay and state.left.get(runner) != version and context > limits.small_share * mean:
            found[runner] = version
        else:
            left[runner] = version
    return found, RollingState(means, left, now)
