"""What runners report that they hold: a new leader learns by it what runs. Pure.

An attempt of an earlier leader is adopted where nothing later is known of its request. One that a later attempt has
overtaken keeps its tokens until that is confirmed, and is forgotten where all that it has is elsewhere.
"""

from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import HeldAttempt, Report
from tensorhub_rollout.core.attempt_progress import AttemptProgress
from tensorhub_rollout.core.attempts import Attempts
from tensorhub_rollout.core.event_context import EventContext
from tensorhub_rollout.core.instance import Instance
from tensorhub_rollout.core.leader_events import LoadPrompt
from tensorhub_rollout.core.open_requests import OpenRequest, OpenRequests
from tensorhub_rollout.core.placement import AttemptState, Placement
from tensorhub_rollout.core.responses import Response
from tensorhub_rollout.log.state import RolloutState


class Reports:
    """The reports to one leader."""

    def __init__(
        self,
        state: RolloutState,
        context: EventContext,
        attempts: Attempts,
        requests: OpenRequests,
        progress: AttemptProgress,
    ) -> None:
        self._state, self._context = state, context
        self._attempts, self._requests, self._progress = attempts, requests, progress

    def take(self, instance: Instance, report: Report) -> tuple[list[Attempt], list[tuple[Attempt, int]]]:
        """Take what an instance holds; return what it may forget, and from which token on it is to send each other."""
        forget, resend = [], []
        for held in report.held:
            request = self._requests.by_id.get(held.request)
            if request is None or held.attempt in instance.to_forget or self._is_outdated(request, held):
                forget.append(held.attempt)
            elif (placement := self._placement_of(instance, request, held)) is not None:
                resend.append((held.attempt, self._requests.held(held.request)))
                self._progress.look_whether_over(placement)
        self._attempts.forget_unreported(instance, {each.attempt for each in report.held})
        return forget, resend

    def _is_outdated(self, request: OpenRequest, held: HeldAttempt) -> bool:
        """Tell whether a later attempt has all that this one has."""
        placement, highest = request.placement, self._highest(held)
        if highest is not None and held.attempt < highest:
            return True
        if placement is None or held.attempt >= placement.attempt:
            return False
        return placement.state not in {AttemptState.PREPARED, AttemptState.ASSIGNED}

    def _highest(self, held: HeldAttempt) -> Attempt | None:
        """Return the highest attempt of a request of which tokens are here or in the log."""
        stored, response = self._state.request(held.request), self._requests.responses.get(held.request)
        known = [each.attempt for each in (stored, response) if each is not None and each.attempt is not None]
        return max(known, default=None)

    def _placement_of(self, instance: Instance, request: OpenRequest, held: HeldAttempt) -> Placement | None:
        """Return the placement of an attempt, adopting it where nothing later is known; None: it stays as it is."""
        placement = request.placement
        if placement is not None and placement.attempt == held.attempt:
            if placement.state is AttemptState.ASSIGNED:
                self._attempts.confirm(placement)
            return placement
        response = self._requests.responses.get(held.request)
        is_here = response is not None and response.attempt == held.attempt and response.count >= held.tokens
        is_earlier = placement is not None and placement.attempt > held.attempt
        if is_earlier or request.ending is not None or (held.state == "stopped" and is_here):
            self._attempts.keep(held.request, held.attempt, instance.runner)
            return None
        return self._adopt(instance, request, held)

    def _adopt(self, instance: Instance, request: OpenRequest, held: HeldAttempt) -> Placement:
        if request.placement is not None:
            self._attempts.close(request.placement)
        response = self._requests.responses.get(held.request)
        if response is None or response.attempt != held.attempt:
            stored = self._state.request(held.request)
            known = None if stored is None or stored.attempt == held.attempt else stored.attempt
            response = self._requests.responses[held.request] = Response(attempt=held.attempt, dropped=known)
        tokens_max = self._state.group_of(held.request).tokens_max
        placement = self._attempts.adopt(instance, held, response.count, tokens_max)
        self._requests.placed(placement)
        # How old it may be is known only then.
        self._context.effects.append(LoadPrompt(held.request))
        return placement
