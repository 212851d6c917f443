"""Why a group's responses are where they are, and what they wait for, as a leader says it to users. Pure.

The leader and the policies note reasons where they place, withdraw and hold a request. What is said here is put into
words when it is asked for.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

import msgspec
from msgspec.structs import replace

from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.questions import (
    WHY_BYTES_MAX,
    WHY_CHARS_MAX,
    WHY_REQUESTS_MAX,
    AttemptWhy,
    ExpectedLength,
    RequestStateName,
    RequestWhy,
    WhyAnswer,
    WhyQuestion,
)
from tensorhub_rollout.answers.response_story import end_of
from tensorhub_rollout.core.leader import Leader
from tensorhub_rollout.core.open_requests import OpenRequest
from tensorhub_rollout.core.placement import AttemptState, PastAttempt, Placement
from tensorhub_rollout.log.state import Group, RolloutState, StoredEnd
from tensorhub_rollout.policy.arrival import Held
from tensorhub_rollout.policy.view import FleetView, InstanceView

GROUPS_NAMED_MAX: Final = 8
"""Limit of the open groups that the answer to an unknown one names."""
ENDED: Final = "it has ended; its trace has the rest"

HeldOf = Callable[[RequestId], Held | None]
"""What a policy holds a waiting request for; None: it holds none of it."""
StoryOf = Callable[[str, int], str | None]
"""How safe a model's version is that requests are for alone; None: versions are not held."""


def why_of(leader: Leader, question: WhyQuestion, held_of: HeldOf, story_of: StoryOf, now: float) -> WhyAnswer:
    """Return what is known of a group's responses. Raises `BadCommand` where there is no such group, or index."""
    state, name = leader.state, question.group
    found = [(consumer, each.ids[name]) for consumer, each in state.consumers.items() if name in each.ids]
    if not found:
        if any(name in each.done_ids for each in state.consumers.values()):
            return WhyAnswer(name, is_done=True)
        raise _unknown(state, name)
    groups = [(consumer, at, state.submissions[at[0]].groups[at[1]]) for consumer, at in found]
    size = max(group.size for _, _, group in groups)
    if question.index is not None and question.index >= size:
        raise BadCommand(f"group {name!r} has responses 0 to {size - 1}, and no {question.index}")
    views: dict[str, FleetView] = {}

    def view_of(model: str) -> FleetView:
        if model not in views:
            views[model] = leader.view(model)
        return views[model]

    wanted = [
        (consumer, RequestId(seq, group.first + index), group)
        for consumer, (seq, _), group in groups
        for index in range(group.size)
        if question.index in {None, index}
    ]
    told, nbytes = list[RequestWhy](), 0
    for consumer, of, group in wanted[:WHY_REQUESTS_MAX]:
        story = None if group.version is None else story_of(state.consumers[consumer].model, group.version)
        request = _with_hold(_request(leader, consumer, of, group, held_of, view_of, now), story)
        nbytes += len(msgspec.json.encode(request))
        if told and nbytes > WHY_BYTES_MAX:
            break
        told.append(request)
    return WhyAnswer(name, tuple(told), len(wanted) - len(told))


def _unknown(state: RolloutState, name: str) -> BadCommand:
    count = sum(len(each.ids) for each in state.consumers.values())
    known = islice((group for each in state.consumers.values() for group in each.ids), GROUPS_NAMED_MAX)
    names = ", ".join(f"{each:.40}" for each in known)
    more = f" and {count - GROUPS_NAMED_MAX} more" if count > GROUPS_NAMED_MAX else ""
    there = f"not done yet are {names}{more}" if names else "all that it had are done"
    return BadCommand(f"job {state.job!r} has no group {name!r:.200}: {there}")


def _request(
    leader: Leader,
    consumer: str,
    of: RequestId,
    group: Group,
    held_of: HeldOf,
    view_of: Callable[[str], FleetView],
    now: float,
) -> RequestWhy:
    index, stored, request = of.index - group.first, leader.state.request(of), leader.requests.get(of)
    if request is None or stored is None:
        end = None if stored is None else stored.end
        return _ended(consumer, index, end, leader.open_requests.ended.get(of), now)
    response = leader.responses.get(of)
    tokens = stored.kept if response is None else response.count
    length = leader.lengths.estimate(of, now)
    placement = request.placement
    if placement is None:
        status: RequestStateName = "waiting"
        waits_for: str | None = _what_waits(leader, of, request, held_of(of), view_of(request.model))
    else:
        status = "executing" if tokens > placement.began_at else "pending"
        waits_for = _what_runs(leader, placement, view_of(request.model))
    attempts = [_attempt(each, now, is_over=True) for each in request.past]
    if placement is not None:
        attempts.append(_attempt(PastAttempt.of(placement, tokens, now), now, is_over=False))
    expected = ExpectedLength(round(length.median, 1), round(length.quantile(0.9), 1), length.knowledge)
    return RequestWhy(consumer, index, status, tokens, waits_for, expected, tuple(attempts))


def _with_hold(found: RequestWhy, story: str | None) -> RequestWhy:
    """Add how the version of an open request is kept."""
    return found if found.state == "ended" else replace(found, held=story)


def _ended(
    consumer: str, index: int, end: StoredEnd | None, past: tuple[PastAttempt, ...] | None, now: float
) -> RequestWhy:
    if end is None:
        return RequestWhy(consumer, index, "ended", 0, ENDED)
    return RequestWhy(
        consumer,
        index,
        "ended",
        end.tokens,
        "its trainer's done()" if past is not None else ENDED,
        attempts=tuple(_attempt(each, now, is_over=True) for each in past or ()),
        ended_by=end.reason,
        error=_cut(end.error),
    )


def _attempt(each: PastAttempt, now: float, *, is_over: bool) -> AttemptWhy:
    first_token_s = None if each.first_token_at is None else each.first_token_at - each.placed_at
    return AttemptWhy(
        each.runner,
        each.attempt,
        round(now - each.placed_at, 3),
        round(each.over_at - each.placed_at, 3),
        each.began_at,
        max(each.began_at, each.tokens),
        None if first_token_s is None else round(first_token_s, 3),
        end_of(each) if is_over else None,
        _cut(each.why),
        each.reason[:WHY_CHARS_MAX],
        each.withdrawn_why[:WHY_CHARS_MAX],
    )


def _cut(text: str | None) -> str | None:
    return None if text is None else text[:WHY_CHARS_MAX]


# ---------------------------------------------------------------------------------------------- on an instance


def _what_runs(leader: Leader, placement: Placement, view: FleetView) -> str | None:
    """Say what a request on an instance waits for; None: for nothing but its tokens."""
    runner = placement.runner
    match placement.state:
        case AttemptState.PREPARED:
            return "its prompt is being read"
        case AttemptState.ASSIGNED:
            return f"{runner} has not confirmed it yet"
        case AttemptState.STOPPING if placement.moves_to is not None:
            return f"{runner} stops it, and then it goes to {placement.moves_to}"
        case AttemptState.STOPPING:
            return f"{runner} stops it, and then it waits for a place"
        case AttemptState.COMPLETE:
            return "its end is being written to the log"
    instance = next((each for each in view.instances if each.runner == runner), None)
    if instance is None or placement.request not in leader.instances[runner].pending:
        return None
    if instance.queued:
        return f"a slot of {runner}, or its context is being computed there: {_taken(instance)}"
    return f"its first token from {runner}, which computes its context"


def _taken(instance: InstanceView) -> str:
    has = len(instance.pending) + len(instance.executing)
    return f"{has} requests are on its {instance.slots} slots"


# ---------------------------------------------------------------------------------------------- without a place


def _what_waits(leader: Leader, of: RequestId, request: OpenRequest, held: Held | None, view: FleetView) -> str:
    """Say what a request on no instance waits for."""
    if request.ending is not None:
        return "its end is being written to the log"
    if not leader.fleet.has_gathered:
        return "the manager has just begun to lead, and waits for all instances to say what they have"
    return next(_reasons(leader, of, held, view))


def _reasons(leader: Leader, of: RequestId, held: Held | None, view: FleetView) -> Iterator[str]:
    """Yield why a request has no place, what matters most first."""
    serving = [each for each in view.instances if each.takes_more]
    version = view.pinned.get(of)
    fitting = [each for each in serving if view.fits(of, each)]
    if version is not None and not fitting:
        loading = next((each.runner for each in view.instances if each.version_wanted == version), None)
        comes = "none is told to load it yet" if loading is None else f"{loading} is to load it"
        yield f"it is for version {version} alone, which no instance that takes requests has: {comes}"
    if leader.admission.is_held_back and not leader.open_requests.has_begun_group(of):
        yield "no further group begins, since payloads are nearly full: take batches and call done()"
    if not serving:
        yield f"no instance takes requests of model {leader.requests[of].model!r}"
    if held is not None and held.runner is not None:
        yield _of_held(held)
    fitting = [each for each in fitting if version is not None or each.may_start]
    if not fitting:
        yield "no instance has a version on which it may begin"
    if of in view.alone:
        yield "it was lost with instances before, so it is tried on one where nothing is pending, and there is none"
    if all(each.free_slots <= 0 for each in fitting):
        yield f"no instance has room: {len(fitting)} of them may run it, and all of their slots are taken"
    yield "it is placed at one of the next looks, or once fewer requests are pending"


def _of_held(held: Held) -> str:
    if held.ready_s > 0:
        comes = f"which has the next version in about {held.ready_s:.1f} s"
        return f"it waits for {held.runner}, {comes} and is then done soonest"
    return f"it waits until fewer requests are pending on {held.runner}, which is done soonest with it"
