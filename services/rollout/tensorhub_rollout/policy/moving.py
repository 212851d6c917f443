"""Which running request moves to another instance: from the one that is done last to the one that is done first. Pure.

A request moves where both instances are done sooner for it, by more than what its context takes to be computed again.
"""

from collections.abc import Set as AbstractSet
from typing import NamedTuple

import msgspec

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.finish_times import Load, Work, with_it_s
from tensorhub_rollout.policy.fleet_loads import FleetLoads
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.request_facts import Facts
from tensorhub_rollout.policy.view import FleetView, MoveAction


class MoveLimits(msgspec.Struct, frozen=True):
    """The settings of moves; times in seconds."""

    looked_at_s: float = 0.1
    """How often it is looked whether a request is to move."""
    moves_max: int = 2
    """Limit of the requests that move at one look."""
    settled_s: float = 10.0
    """A request that has moved stays for so long: lengths are guesses, and each guess might move it again."""
    gap_s_min: float = 1.0
    """A request moves only from an instance that is done so much later than another one."""
    gap_share_min: float = 0.2
    """And later by this share of its own time: how long responses will be is not known better."""
    price_factor: float = 2.0
    """And only where both are done sooner for it by this multiple of what its context takes to be computed again."""


def moves(
    view: FleetView, fleet: FleetLoads, facts: Facts, settling: AbstractSet[RequestId], limits: MoveLimits
) -> list[MoveAction]:
    """Return what moves, but for `settling`, and have `fleet` count it.

    Where some requests are due before the rest, only these count, and move: the rest is evened out by what comes yet.
    """
    staying = fleet.instances.items()
    free = [(name, each) for name, each in staying if each.takes_more and each.may_start and each.free_slots > 0]
    kept_back = view.kept_back()
    takers = [name for name, _ in free if name not in kept_back]
    if not takers:
        return []
    loads = fleet.loads()
    only_due = any(each.due_longest for each in loads.values())
    done_s = {name: _done_s(load, fleet.steps[name], only_due=only_due) for name, load in loads.items()}
    actions: list[MoveAction] = []
    while len(actions) < limits.moves_max:
        source = fleet.instances[max(zip(done_s.values(), done_s.keys(), strict=True))[1]]
        if fleet.is_old(source.runner):
            fleet.assess(source.runner, facts)
            loads[source.runner] = load = fleet.load(source.runner)
            done_s[source.runner] = _done_s(load, fleet.steps[source.runner], only_due=only_due)
            continue
        longest = _longest(loads[source.runner], only_due=only_due)
        there = [(loads[name], fleet.steps[name]) for name in takers]
        done_with_s = with_it_s(longest, there, is_due=only_due)
        target = fleet.instances[min(zip(done_with_s, takers, strict=True))[1]]
        gap_s_min = max(limits.gap_s_min, limits.gap_share_min * done_s[source.runner])
        if source is target or done_s[source.runner] - done_s[target.runner] < gap_s_min:
            break
        gone = settling | {each.request for each in actions}
        movable = [
            (of, fleet.work(known))
            for of in (*source.executing, *source.pending)
            if of not in gone and view.fits(of, target) and ((known := facts.of(of)).is_due or not only_due)
        ]
        pair = _Pair(loads[source.runner], fleet.steps[source.runner], loads[target.runner], fleet.steps[target.runner])
        move = pair.best_move(movable, limits.price_factor, only_due=only_due)
        if move is None:
            break
        before_s = done_s[source.runner]
        fleet.move(source.runner, move.rest, target.runner, move.work, is_due=only_due)
        loads[source.runner], loads[target.runner] = fleet.load(source.runner), fleet.load(target.runner)
        done_s[source.runner], done_s[target.runner] = move.source_s, move.target_s
        reason = (
            f"{source.runner} is done in {before_s:.0f} s, {before_s - move.after_s:.1f} s sooner without it; "
            f"its context takes {move.price_s:.2f} s there"
        )
        actions.append(MoveAction(move.request, source.runner, target.runner, reason))
    return actions


def _done_s(load: Load, steps: StepModel, *, only_due: bool) -> float:
    return load.due_s(steps) if only_due else load.finish_s(steps)


def _done_with_s(load: Load, work: Work, steps: StepModel, *, only_due: bool) -> float:
    return load.due_with_s(work, steps) if only_due else load.finish_with_s(work, steps)


def _longest(load: Load, *, only_due: bool) -> Work:
    """Return the longest response of an instance, by which another one is chosen; its context is left out."""
    most = load.due_longest if only_due else load.longest
    return Work(most, most * most, most, 0.0)


class _Move(NamedTuple):
    """One request that may move, and when both instances are done after it."""

    after_s: float
    price_s: float
    request: RequestId
    work: Work
    rest: Load
    """What the source has then."""
    source_s: float
    target_s: float


class _Pair(NamedTuple):
    """The instance that a request would leave, and the one that it would go to."""

    source: Load
    source_steps: StepModel
    target: Load
    target_steps: StepModel

    def best_move(self, there: list[tuple[RequestId, Work]], price_factor: float, *, only_due: bool) -> _Move | None:
        """Return the move after which both are done soonest; None: none is worth its price."""
        before_s = _done_s(self.source, self.source_steps, only_due=only_due)
        there = sorted(there, key=lambda each: (-each[1].most, each[0]))
        best: _Move | None = None
        for at, (of, work) in enumerate(there):
            others = there[1:2] if at == 0 else there[:1]
            rest = _without(
                self.source, work, others[0][1].most if others else 0.0, self.source_steps, only_due=only_due
            )
            source_s = _done_s(rest, self.source_steps, only_due=only_due)
            target_s = _done_with_s(self.target, work, self.target_steps, only_due=only_due)
            after_s, price_s = max(source_s, target_s), work.prefill_s(self.target_steps)
            if after_s >= before_s or before_s - after_s < price_factor * price_s:
                continue
            if best is None or (after_s, price_s) < best[:2]:
                best = _Move(after_s, price_s, of, work, rest, source_s, target_s)
        return best


def _without(load: Load, work: Work, longest: float, steps: StepModel, *, only_due: bool) -> Load:
    """Return a load without a request; `longest`: of the others."""
    busy_s = work.busy_s(steps)
    rest = msgspec.structs.replace(
        load, busy_s=max(0.0, load.busy_s - busy_s), context=max(0.0, load.context - work.context)
    )
    if only_due:
        rest.due_longest, rest.due_busy_s = longest, max(0.0, load.due_busy_s - busy_s)
    else:
        rest.longest, rest.rest_step_s = longest, max(0.0, load.rest_step_s - work.step_s(steps))
    return rest
