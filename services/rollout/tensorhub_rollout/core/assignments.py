"""How a request comes to an instance: placed as a policy says, its prefix and prompt read, its runner asked. Pure.

    Place ─► LoadPrefix ─► PrefixLoaded ─► LoadPrompt ─► PromptLoaded ─► SendAssign ─► AssignAnswered
             (where the log has its tokens, and this leader has none)

What no rule allows is not done, and costs nothing: the request waits again. A policy judges what it saw, and the leader
what is so now.
"""

import msgspec

from tensorhub_common.protocol.rollout.entries import RequestEnded
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, VersionRule
from tensorhub_rollout.core.attempts import Attempts
from tensorhub_rollout.core.event_context import EventContext
from tensorhub_rollout.core.fleet import Fleet
from tensorhub_rollout.core.leader_counts import LeaderCounts
from tensorhub_rollout.core.leader_events import (
    AssignAnswered,
    LoadingFailed,
    LoadPrefix,
    LoadPrompt,
    Place,
    PrefixLoaded,
    PromptLoaded,
)
from tensorhub_rollout.core.model_versions import Models
from tensorhub_rollout.core.open_requests import OpenRequests
from tensorhub_rollout.core.placement import AttemptState, AttemptTransition, Placement
from tensorhub_rollout.core.responses import Response
from tensorhub_rollout.log.state import RolloutState


class Assignments:
    """The attempts of one leader, until their runners have them."""

    def __init__(
        self,
        state: RolloutState,
        context: EventContext,
        fleet: Fleet,
        models: Models,
        attempts: Attempts,
        requests: OpenRequests,
        counts: LeaderCounts,
        *,
        restarts_max: int,
    ) -> None:
        """Begin with none. The bound is that of `LeaderLimits`."""
        self._state, self._context, self._fleet, self._models = state, context, fleet, models
        self._attempts, self._requests, self._counts = attempts, requests, counts
        self._restarts_max = restarts_max

    def place(self, event: Place) -> None:
        """Begin an attempt, where the request still waits and the instance takes it."""
        of, requests = event.request, self._requests
        request, instance = requests.by_id.get(of), self._fleet.instances.get(event.runner)
        if not self._fleet.has_gathered or request is None or not request.is_waiting:
            return
        if instance is None or not instance.takes_more or instance.model != request.model:
            return
        if requests.is_reserved(instance) or (of in requests.alone and instance.pending):
            return
        if not requests.admission.admit(requests.group_id_of(of)):
            return
        self._counts.attempts += 1
        response = requests.responses.get(of)
        began_at = self._state.kept_of(of) if response is None else response.count
        tokens_max = self._state.group_of(of).tokens_max
        requests.placed(self._attempts.place(of, instance, began_at, tokens_max, event.reason))
        if response is None and began_at:
            self._context.effects.append(LoadPrefix(of))
            return
        requests.responses.setdefault(of, Response())
        self._context.effects.append(LoadPrompt(of))

    def prefix_loaded(self, event: PrefixLoaded) -> None:
        """Take the tokens that the log has, unless the trainer has gone back behind them."""
        of = event.request
        request = self._requests.by_id.get(of)
        if request is None or request.placement is None or of in self._requests.responses:
            return
        stored = self._state.request(of)
        attempt = None if stored is None else stored.attempt
        versions = self._models[request.model].published
        if any(versions.is_retired(run.version) for run in event.runs):
            request.placement.began_at = 0
            self._counts.discarded["rewind"] += len(event.tokens) // TOKEN_BYTES
            response = Response(attempt=attempt, dropped=attempt)
        else:
            response = Response(bytearray(event.tokens), bytearray(event.logprobs), list(event.runs), attempt)
        self._requests.responses[of] = response
        self._context.effects.append(LoadPrompt(of))

    def prompt_loaded(self, placement: Placement, event: PromptLoaded) -> None:
        """Ask the runner to begin, unless the response is complete, counts for nothing, or may not run there."""
        of = event.request
        request = self._requests.by_id[of]
        request.age_max, request.newest = event.age_max, event.newest
        if placement.state is AttemptState.PREPARED:
            placement.move(AttemptTransition.LOADED)
            self._begin_or_refuse(placement, event)
        if placement.state is AttemptState.ASSIGNED:
            rule = event.rule
            if request.restarts >= self._restarts_max and rule.on_update == "restart":
                rule = msgspec.structs.replace(rule, on_update="continue")
            versions = self._models[self._fleet.instances[placement.runner].model].published
            self._attempts.assign(placement, self._requests.responses[of], event, rule, versions)
        elif placement.state is AttemptState.HELD and placement.finished is None and self._requests.is_too_old(of):
            self._requests.restart(of, "age")

    def _begin_or_refuse(self, placement: Placement, event: PromptLoaded) -> None:
        of = event.request
        request, response = self._requests.by_id[of], self._requests.responses[of]
        # Tokens that do not count end nothing. How old they may be is known only here.
        void = request.void or self._requests.why_void(of)
        reason = None if void else event.sampling.ended_by(response.tokens)
        if reason is not None:
            # Its runner was lost before it could say so.
            request.ending = RequestEnded(of, response.attempt, reason, response.count)
        if reason is not None or void or not self._is_allowed(placement, event.rule):
            request.void = void
            placement.move(AttemptTransition.REFUSED)
            self._requests.attempt_over(placement)
            if reason is not None:
                self._requests.store_end(of)

    def _is_allowed(self, placement: Placement, rule: VersionRule) -> bool:
        instance = self._fleet.instances[placement.runner]
        return instance.version is not None and rule.allows(instance.version, self._models[instance.model].published)

    def loading_failed(self, event: LoadingFailed) -> None:
        """End a request of which the log has lost something."""
        request = self._requests.by_id.get(event.request)
        if request is None or request.placement is None or request.placement.state is not AttemptState.PREPARED:
            return
        request.placement.move(AttemptTransition.CLOSED)
        self._attempts.drop(request.placement)
        request.placement = None
        self._requests.end_as(RequestEnded(event.request, None, "failed", 0, event.error))

    def answered(self, event: AssignAnswered) -> None:
        """Take which attempts a runner has, and which it does not take."""
        if not self._fleet.known(event.runner, event.incarnation):
            return
        for result in event.results:
            placement = self._attempts.placements.get(result.attempt)
            if placement is None or placement.runner != event.runner or placement.state is not AttemptState.ASSIGNED:
                continue
            if result.refused is not None:
                placement.move(AttemptTransition.REFUSED)
                self._requests.attempt_over(placement)
            elif result.held >= placement.began_at:
                self._attempts.confirm(placement)
            else:
                placement.confirmed = max(placement.confirmed, result.held)
                self._context.effects.append(LoadPrompt(placement.request))
