"""The open requests of a job: which of them wait, which begin anew, and which end without another attempt. Pure.

A request waits until it is placed. When its attempt is over it waits again and goes on from the tokens that are here,
unless these do not count any more: then it begins anew. It ends when an attempt has made all of its tokens, when too
many attempts made none, or when the one version that it is for is gone. Its end is written, and it is open until the
log has that.

Invariants (`check`):
- The requests here are those that are open in the log.
- A request has at most one attempt that is not over.
- A request waits exactly where it has no attempt and no end that is to be written.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tensorhub_common.protocol.rollout.entries import Attempt, ManagerEndReason, RequestEnded, RequestId
from tensorhub_rollout.core.admission import Admission, GroupId
from tensorhub_rollout.core.attempts import Attempts
from tensorhub_rollout.core.event_context import EventContext
from tensorhub_rollout.core.fleet import Fleet
from tensorhub_rollout.core.instance import Instance
from tensorhub_rollout.core.leader_counts import DiscardReason, LeaderCounts
from tensorhub_rollout.core.leader_events import StoreEnd
from tensorhub_rollout.core.model_versions import Models
from tensorhub_rollout.core.pinned_requests import PinnedRequests, why_gone
from tensorhub_rollout.core.placement import AttemptState, PastAttempt, Placement
from tensorhub_rollout.core.responses import Response
from tensorhub_rollout.core.waiting import WaitingQueue
from tensorhub_rollout.log.state import RolloutState
from tensorhub_rollout.log.transitions import RequestState

PAST_ATTEMPTS_MAX: Final = 16
"""Limit of the attempts that are over and are told of a response, the latest."""
ENDED_MAX: Final = 4096
"""Limit of the requests that have ended and are not done of which the attempts are remembered, the latest."""

_WHY_ANEW: Final[dict[DiscardReason, str]] = {
    "restart": "new weights have come, and it begins anew then",
    "age": "more newer versions are published than max_age allows behind its oldest token",
    "rewind": "the trainer has gone back behind a version that made some of its tokens",
}
_AT_RUNNER: Final = frozenset({AttemptState.ASSIGNED, AttemptState.HELD, AttemptState.STOPPING})
"""The runner may have begun with it."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """What the leader knows of an open request beside its tokens."""

    model: str
    step: int
    """How many of the model's newest versions the leader had seen when it came."""
    placement: Placement | None = None
    """Its one attempt that is not over."""
    fruitless: int = 0
    """Attempts one after the other that were lost or failed, and made no token, while no other was tried there."""
    lost_together: int = 0
    """Attempts one after the other that were lost without a token together with others: which of them did it?"""
    restarts: int = 0
    age_max: int | None = None
    """How many newer versions may be published when it is delivered; None: any number, or not read yet."""
    newest: int | None = None
    """The newest version when it was submitted; None: not known, or not read yet."""
    void: DiscardReason | None = None
    """Why its tokens count for nothing once its attempt is stopped; None: they count."""
    ending: RequestEnded | None = None
    """How it ends without another attempt: it was tried too often, or its tokens are all here."""
    past: list[PastAttempt] = field(default_factory=list)
    """Its attempts that are over, the latest; nothing is decided by them."""

    def note_past(self, past: PastAttempt) -> None:
        """Remember an attempt that is over."""
        self.past.append(past)
        if len(self.past) > PAST_ATTEMPTS_MAX:
            del self.past[0]

    def attempts(self, tokens: int, now: float) -> tuple[PastAttempt, ...]:
        """Return its attempts as if it had ended now with so many tokens: that ends the one that is not over."""
        last = () if self.placement is None else (PastAttempt.of(self.placement, tokens, now),)
        return (*self.past, *last)

    @property
    def is_waiting(self) -> bool:
        """Whether it may be placed."""
        return self.placement is None and self.ending is None


class OpenRequests:
    """All open requests of one job."""

    def __init__(
        self,
        state: RolloutState,
        context: EventContext,
        fleet: Fleet,
        models: Models,
        attempts: Attempts,
        counts: LeaderCounts,
        *,
        attempts_max: int,
        lost_together_max: int,
        admission_share_max: float,
    ) -> None:
        """Take what is open in the log. The bounds are those of `LeaderLimits`."""
        self.by_id: dict[RequestId, OpenRequest] = {}
        self.responses: dict[RequestId, Response] = {}
        """Tokens, as far as this leader has them."""
        self.ended: dict[RequestId, tuple[PastAttempt, ...]] = {}
        """The attempts of the latest requests that have ended and are not done; nothing is decided by them."""
        self.waiting = WaitingQueue()
        self.pinned = PinnedRequests()
        self.alone: set[RequestId] = set()
        """Requests that are tried alone: each may be what kills the instances that begin with it."""
        self.admission = Admission(state, admission_share_max)
        self._state, self._context, self._fleet, self._models = state, context, fleet, models
        self._attempts, self._counts = attempts, counts
        self._attempts_max, self._lost_together_max = attempts_max, lost_together_max
        for of, _, request in state.requests():
            if request.state is RequestState.OPEN:
                self.open(of)

    # ------------------------------------------------------------------------------------------ the log

    def open(self, of: RequestId) -> None:
        """Take a request that is open in the log."""
        model = self._state.model_of(of)
        # What was there before this leader counts as of the first step that it sees: due from the next one on.
        self.by_id[of] = OpenRequest(model, max(1, self._models[model].steps))
        self.pinned.open(of, model, self._state.group_of(of).version)
        self._wait(of)

    def close(self, of: RequestId) -> None:
        """The log has the request's end: the runners of its attempts forget them."""
        request = self.by_id.pop(of)
        if self._state.request(of) is not None:
            self.ended[of] = request.attempts(self.held(of), self._context.now)
            if len(self.ended) > ENDED_MAX:
                del self.ended[next(iter(self.ended))]
        self.pinned.close(of, request.model)
        self.alone.discard(of)
        self.waiting.discard(of)
        self.responses.pop(of, None)
        self._attempts.forget_earlier(of)
        if request.placement is not None:
            self._attempts.close(request.placement)

    def done(self, of: RequestId) -> None:
        """The log has forgotten the request."""
        self.ended.pop(of, None)

    # ------------------------------------------------------------------------------------------ questions

    def held(self, of: RequestId) -> int:
        """Return how many tokens of a request are here."""
        response = self.responses.get(of)
        return 0 if response is None else response.count

    def is_reserved(self, instance: Instance) -> bool:
        """Tell whether an instance is trying a request alone."""
        return bool(self.alone) and not self.alone.isdisjoint(instance.pending)

    # ------------------------------------------------------------------------------------------ waiting and attempts

    def _wait(self, of: RequestId) -> None:
        """Have a request wait for a placement, or end where no instance can ever take it."""
        model, response = self.by_id[of].model, self.responses.get(of)
        has_begun = bool(self._state.kept_of(of) if response is None else response.count)
        self.waiting.put(of, model, self._state.group_of(of).priority, has_begun=has_begun)
        if of in self.pinned.versions:
            self.end_unreachable(model, (of,))

    def placed(self, placement: Placement) -> None:
        """A request has an attempt."""
        self.by_id[placement.request].placement = placement
        self.waiting.discard(placement.request)

    def attempt_over(self, placement: Placement, failure: str | None = None, *, is_blamed: bool = True) -> None:
        """An attempt is over and its request waits again; after too many failures without a new token it ends.

        A failure for which the request is not blamed is told, and does not count.
        """
        of = placement.request
        self._attempts.end(placement)
        request = self.by_id[of]
        request.note_past(PastAttempt.of(placement, self.held(of), self._context.now, failure))
        request.placement = None
        if request.void is not None:
            self.begin_anew(of, placement.attempt, request.void)
        held = self.held(of)
        if held > placement.began_at:
            request.fruitless = request.lost_together = 0
            self.alone.discard(of)
        elif failure is not None and is_blamed:
            request.fruitless += 1
        if request.fruitless >= self._attempts_max:
            error = f"{request.fruitless} attempts one after the other made no token; the last one: {failure}"
            self.end_as(RequestEnded(of, placement.attempt, "failed", held, error))
        elif request.is_waiting:
            self._wait(of)

    def blamed(self, lost: list[Placement]) -> list[Placement]:
        """Return the attempt that may have cost the instance, if it is one alone.

        Of several, one may have done it, and the others would fail for it: next time each is tried alone.
        """
        tried = [each for each in lost if each.state in _AT_RUNNER and self.held(each.request) == each.began_at]
        if len(tried) <= 1:
            return tried
        for each in tried:
            request = self.by_id[each.request]
            request.lost_together += 1
            if request.lost_together >= self._lost_together_max:
                self.alone.add(each.request)
        return []

    # ------------------------------------------------------------------------------------------ beginning anew

    def why_void(self, of: RequestId) -> DiscardReason | None:
        """Say why the tokens of a request do not count; None: they do."""
        if self._has_retired(of):
            return "rewind"
        return "age" if self.is_too_old(of) else None

    def is_too_old(self, of: RequestId) -> bool:
        """Tell whether a response is to begin anew because its oldest token is too old; that happens once.

        One that is for a version alone would begin anew on the same one, so it does not.
        """
        request, runs = self.by_id[of], self.responses[of].runs
        if request.age_max is None or request.restarts or of in self.pinned.versions or not runs:
            return False
        oldest = min(run.version for run in runs)
        return self._models[request.model].published.newer_than(oldest) > request.age_max

    def _has_retired(self, of: RequestId) -> bool:
        """Tell whether a response has tokens of a version that the trainer has gone back behind."""
        versions = self._models[self.by_id[of].model].published
        return bool(versions.retired) and any(versions.is_retired(run.version) for run in self.responses[of].runs)

    def restart_too_old(self, model: str) -> None:
        """Begin responses anew that have become too old: what they would still make would be dropped at their end."""
        for of in [*self.responses]:
            if self.by_id[of].model == model and self.is_too_old(of):
                self.restart(of, "age")

    def restart_retired(self, model: str) -> None:
        """Begin responses anew that have tokens of versions which the trainer has gone back behind."""
        if not self._models[model].published.retired:
            return
        for of in [*self.responses]:
            if self.by_id[of].model == model and self._has_retired(of):
                self.restart(of, "rewind")

    def restart(self, of: RequestId, why: DiscardReason) -> None:
        """Begin a response anew once its attempt has stopped, unless it has ended."""
        request = self.by_id[of]
        placement = request.placement
        if request.ending is not None or (placement is not None and placement.state is AttemptState.COMPLETE):
            return
        if placement is None:
            self.begin_anew(of, self.responses[of].attempt, why)
        else:
            request.void = why
            self._attempts.withdraw(placement, None, _WHY_ANEW[why])

    def begin_anew(self, of: RequestId, attempt: Attempt | None, why: DiscardReason) -> None:
        """Drop the tokens of a request: they are made again by a later attempt."""
        request = self.by_id[of]
        request.void = None
        request.restarts += why != "rewind"
        self._counts.discarded[why] += self.held(of)
        self.responses[of] = Response(attempt=attempt, dropped=attempt)

    # ------------------------------------------------------------------------------------------ ending

    def store_end(self, of: RequestId) -> None:
        """Have the end of a request written; where it was written already, the log takes the first."""
        request = self.by_id.get(of)
        if request is None:
            return
        response, ended = self.responses.setdefault(of, Response()), request.ending
        placement = request.placement
        if placement is not None and placement.state is AttemptState.COMPLETE and placement.finished is not None:
            reason: ManagerEndReason = "stop" if placement.finished.reason == "stop" else "length"
            ended = RequestEnded(of, placement.attempt, reason, response.count)
        if ended is not None:
            self._context.effects.append(
                StoreEnd(ended, bytes(response.tokens), bytes(response.logprobs), tuple(response.runs))
            )

    def end_as(self, ended: RequestEnded) -> None:
        """End a request without another attempt."""
        self.by_id[ended.request].ending = ended
        self.store_end(ended.request)

    def end_unreachable(self, model: str, among: Iterable[RequestId] | None = None) -> None:
        """End what waits for a version alone that is gone.

        `among`: of these pinned requests alone. A submission of thousands is judged one by one.
        """
        pinned, hub = self.pinned.versions, self._models[model].seen
        if not pinned or not self._fleet.has_gathered:
            return
        instances = self._fleet.of_model(model)
        there = hub.available if hub.hold is None else hub.available | hub.hold.coming
        # By version, and not by request: what the hub has changes with each instance that changes its version.
        judged = {
            version: why_gone(version, hub.versions, there, instances)
            for version in self.pinned.demand(model)
            if version is not None
        }
        if not any(judged.values()):
            return
        for of in [*(pinned if among is None else among)]:
            error = judged.get(pinned[of])
            if error is None or of not in self.waiting or self.by_id[of].model != model:
                continue
            self.waiting.discard(of)
            response = self.responses.get(of)
            count = 0 if response is None else response.count
            attempt = None if response is None else response.attempt
            self.end_as(RequestEnded(of, attempt, "failed", count, error))

    # ------------------------------------------------------------------------------------------ room

    def group_id_of(self, of: RequestId) -> GroupId:
        """Return the group of a request."""
        return of.submission, self._state.submissions[of.submission].requests[of.index].group

    def has_begun_group(self, of: RequestId) -> bool:
        """Tell whether the group of a request counts as begun, where payloads have a limit."""
        return self.group_id_of(of) in self.admission.begun

    def look_at_room(self) -> None:
        """Let no further group begin where payloads are nearly full; a group that has begun finishes."""
        counted = self.by_id if self.admission.payload_bytes_max else ()
        self.admission.look(self.group_id_of(of) for of in counted if self._has_begun(of))

    def is_full(self) -> bool:
        """Tell whether payloads let no group begin, and each that has begun has ended: only `done` makes room then."""
        if self.admission.is_held_back:
            # Since the last look something may have been done.
            self.look_at_room()
        # Before all runners have reported, a group that has begun may look as if it had not.
        return self._fleet.has_gathered and self.admission.is_held_back and not self.admission.begun

    def _has_begun(self, of: RequestId) -> bool:
        """Tell whether a request's group has begun, as far as this request and those that have ended tell."""
        group = self._state.group_of(of)
        if 0 < group.open < group.size or self.by_id[of].placement is not None:
            return True
        return bool(self.held(of) or self._state.kept_of(of))

    # ------------------------------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        open_ = {of for of, _, request in self._state.requests() if request.state is RequestState.OPEN}
        assert self.by_id.keys() == open_
        assert self.responses.keys() <= open_
        assert {of for of in open_ if of in self.waiting} == {of for of in open_ if self.by_id[of].is_waiting}
        assert len(self.waiting) == sum(each.is_waiting for each in self.by_id.values())
        self.pinned.check(open_)
        live = {each.placement.attempt for each in self.by_id.values() if each.placement is not None}
        assert live == self._attempts.placements.keys()
