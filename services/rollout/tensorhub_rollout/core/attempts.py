"""The attempts that are not over, and what their runners are asked: to begin them, to stop them, to forget them. Pure.

    place ─► assign ─► confirm ─► note_progress … complete ─► close      (the log has the request's end)
                          └─► withdraw ─► note_stopped ─► end            (its request may go on elsewhere)

What a runner does not answer is asked again. What becomes of a request whose attempt is over is not decided here.

Invariants (`check`):
- An attempt that this leader makes is higher than all that it knows of its request: it has the leader's term.
- The runner of an earlier attempt forgets it only after a later one is confirmed, or the request has ended.
- What a runner has, it is told to forget, or holds it as one of these attempts.
- An instance's requests are those of its attempts that are to make tokens: either pending or executing.
"""

from collections.abc import Collection, Mapping
from typing import Final

from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import (
    TOKEN_BYTES,
    AbortRequest,
    Assign,
    AssignRequest,
    HeldAttempt,
    PublishedVersions,
    VersionRule,
    attempt_key,
    attempt_of,
)
from tensorhub_rollout.core.event_context import EventContext
from tensorhub_rollout.core.instance import Instance
from tensorhub_rollout.core.leader_events import LoadPrompt, PromptLoaded, SendAbort, SendAssign
from tensorhub_rollout.core.placement import AttemptState, AttemptTransition, Placement
from tensorhub_rollout.core.responses import Response

_ADOPTED: Final = "it ran there when this manager began to lead"
_AT_WORK: Final = frozenset({AttemptState.PREPARED, AttemptState.ASSIGNED, AttemptState.HELD})


class Attempts:
    """All attempts of one job that are not over."""

    def __init__(
        self,
        log: str,
        term: int,
        context: EventContext,
        instances: Mapping[str, Instance],
        *,
        resend_s: float,
        assign_tokens_max: int,
        prefix_tokens_min: int,
    ) -> None:
        """Know none yet. `instances`: by runner. The bounds are those of `LeaderLimits`."""
        self.placements: dict[Attempt, Placement] = {}
        self._log, self._term = log, term
        self._context, self._instances = context, instances
        self._resend_s = resend_s
        self._assign_tokens_max, self._prefix_tokens_min = assign_tokens_max, prefix_tokens_min
        self._n = 0
        self._asked: dict[Attempt, Placement] = {}
        """Those that were asked to begin or to stop, and did not answer since."""
        self._earlier: dict[RequestId, dict[Attempt, str]] = {}
        """Earlier attempts with their runners, which keep their tokens until a later one is confirmed."""

    # ------------------------------------------------------------------------------------------ beginning

    def place(self, of: RequestId, instance: Instance, began_at: int, tokens_max: int, reason: str) -> Placement:
        """Begin an attempt of a request on an instance, behind the tokens that are held."""
        self._n += 1
        attempt = Attempt(self._term, self._n)
        placement = Placement(
            of, attempt, instance.runner, began_at, tokens_max, placed_at=self._context.now, reason=reason
        )
        self.placements[attempt] = placement
        instance.attempts.add(attempt)
        instance.pending.add(of)
        return placement

    def adopt(self, instance: Instance, held: HeldAttempt, began_at: int, tokens_max: int) -> Placement:
        """Take an attempt of an earlier leader that an instance holds."""
        placement = Placement(
            held.request,
            held.attempt,
            instance.runner,
            began_at,
            tokens_max,
            placed_at=self._context.now,
            reason=_ADOPTED,
        )
        placement.move(AttemptTransition.ADOPTED)
        self.placements[held.attempt] = placement
        self._earlier.get(held.request, {}).pop(held.attempt, None)
        instance.attempts.add(held.attempt)
        if held.state == "stopped":
            placement.move(AttemptTransition.WITHDRAWN)
            placement.stopped_at = held.tokens
        else:
            instance.pending.add(held.request)
        return placement

    def assign(
        self,
        placement: Placement,
        response: Response,
        said: PromptLoaded,
        rule: VersionRule,
        versions: PublishedVersions,
    ) -> None:
        """Ask the runner to begin. It gets the part of the prefix behind what it has confirmed."""
        room = max(self._prefix_tokens_min, self._assign_tokens_max - len(said.prompt) // TOKEN_BYTES)
        first = TOKEN_BYTES * placement.confirmed
        last = min(TOKEN_BYTES * (placement.confirmed + room), TOKEN_BYTES * placement.began_at)
        assign = Assign(
            placement.request,
            placement.attempt,
            said.prompt,
            said.sampling,
            rule,
            placement.began_at,
            placement.confirmed,
            bytes(response.tokens[first:last]),
            bytes(response.logprobs[first:last]),
            tuple(response.runs),
        )
        self._note_asked(placement)
        incarnation = self._instances[placement.runner].incarnation
        request = AssignRequest(self._log, self._term, incarnation, versions, (assign,))
        self._context.effects.append(SendAssign(placement.runner, request))

    def confirm(self, placement: Placement) -> None:
        """Note that the runner has the whole prefix: those of earlier attempts may forget theirs."""
        placement.move(AttemptTransition.CONFIRMED)
        self._note_answered(placement)
        self.forget_earlier(placement.request)

    def note_progress(self, placement: Placement, response: Response) -> None:
        """Note that an attempt executes once it has made a token."""
        instance = self._instances[placement.runner]
        if placement.request in instance.pending and response.count > placement.began_at:
            instance.pending.discard(placement.request)
            instance.executing.add(placement.request)
            placement.first_token_at = self._context.now
        if placement.request in instance.executing and placement.finished is None:
            instance.streaming[attempt_key(placement.attempt)] = (response, placement.tokens_max)

    # ------------------------------------------------------------------------------------------ ending

    def withdraw(self, placement: Placement, target: str | None, reason: str) -> None:
        """Ask the runner to stop, where it may have begun and is not to stop already. `target`: where it goes then."""
        if placement.state not in {AttemptState.ASSIGNED, AttemptState.HELD}:
            return
        placement.moves_to, placement.withdrawn_why = target, reason
        placement.move(AttemptTransition.WITHDRAWN)
        self._instances[placement.runner].note_idle(placement.request, placement.attempt)
        self._ask_to_stop(placement)

    def note_stopped(self, placement: Placement, tokens: int) -> None:
        """Note after how many tokens the runner has stopped it. It is asked again until all of them are here."""
        placement.stopped_at = tokens
        self._note_asked(placement)

    def complete(self, placement: Placement) -> None:
        """Note that all tokens of the response are here. The runner keeps them until the log has the end."""
        placement.move(AttemptTransition.COMPLETED)
        placement.completed_at = self._context.now
        self._note_idle(placement)
        self._note_answered(placement)

    def end(self, placement: Placement) -> None:
        """Take an attempt out that is over. Its runner keeps its tokens until a later one is confirmed."""
        self.drop(placement)
        self.keep(placement.request, placement.attempt, placement.runner)

    def close(self, placement: Placement) -> None:
        """Take an attempt out whose tokens no later one needs: its runner forgets it."""
        placement.move(AttemptTransition.CLOSED)
        self.drop(placement)
        self._forget(placement.runner, placement.attempt)

    def drop(self, placement: Placement) -> None:
        """Take an attempt out of which its runner has nothing."""
        del self.placements[placement.attempt]
        self._note_answered(placement)
        instance = self._instances.get(placement.runner)
        if instance is not None and placement.attempt in instance.attempts:
            instance.attempts.discard(placement.attempt)
            self._note_idle(placement)

    def _note_idle(self, placement: Placement) -> None:
        instance = self._instances.get(placement.runner)
        if instance is not None:
            instance.note_idle(placement.request, placement.attempt)

    # ------------------------------------------------------------------------------------------ forgetting

    def keep(self, of: RequestId, attempt: Attempt, runner: str) -> None:
        """Note that a runner keeps an attempt that is over."""
        self._earlier.setdefault(of, {})[attempt] = runner

    def forget_earlier(self, of: RequestId) -> None:
        """Let the runners forget all attempts of a request that are over."""
        for attempt, runner in self._earlier.pop(of, {}).items():
            self._forget(runner, attempt)

    def forget_unreported(self, instance: Instance, reported: Collection[Attempt]) -> None:
        """What a runner was to forget and does not report never came, or is gone."""
        for attempt in [*instance.to_forget]:
            if attempt not in reported:
                del instance.to_forget[attempt]

    def forget_one(self, placement: Placement) -> None:
        """Let the runner forget one attempt that is over, before a later one is confirmed."""
        self._earlier.get(placement.request, {}).pop(placement.attempt, None)
        self._forget(placement.runner, placement.attempt)

    def _forget(self, runner: str, attempt: Attempt) -> None:
        instance = self._instances.get(runner)
        if instance is not None:
            instance.to_forget[attempt] = None

    # ------------------------------------------------------------------------------------------ asking

    def ask_again(self) -> None:
        """Ask again what runners have not answered, and what they may forget."""
        for placement in [*self._asked.values()]:
            if placement.asked_at is not None and self._context.now - placement.asked_at >= self._resend_s:
                self._note_asked(placement)
                if placement.state is AttemptState.ASSIGNED:
                    self._context.effects.append(LoadPrompt(placement.request))
                elif placement.state is AttemptState.STOPPING:
                    self._ask_to_stop(placement)
        for instance in self._instances.values():
            self._ask_to_forget(instance)

    def _ask_to_stop(self, placement: Placement) -> None:
        self._note_asked(placement)
        incarnation = self._instances[placement.runner].incarnation
        stop = AbortRequest(self._log, self._term, incarnation, stop=(placement.attempt,))
        self._context.effects.append(SendAbort(placement.runner, stop))

    def _ask_to_forget(self, instance: Instance) -> None:
        now = self._context.now
        if not instance.to_forget:
            instance.asked_to_forget_at = None
        elif instance.asked_to_forget_at is None or now - instance.asked_to_forget_at >= self._resend_s:
            instance.asked_to_forget_at = now
            forget = AbortRequest(self._log, self._term, instance.incarnation, forget=tuple(instance.to_forget))
            self._context.effects.append(SendAbort(instance.runner, forget))

    def _note_asked(self, placement: Placement) -> None:
        placement.asked_at = self._context.now
        self._asked[placement.attempt] = placement

    def _note_answered(self, placement: Placement) -> None:
        placement.asked_at = None
        self._asked.pop(placement.attempt, None)

    # ------------------------------------------------------------------------------------------ invariants

    def check(self, requests: Collection[RequestId], responses: Mapping[RequestId, Response]) -> None:
        """Raise AssertionError where an invariant does not hold. `requests`: those that are open."""
        assert self._asked == {each.attempt: each for each in self.placements.values() if each.asked_at is not None}
        assert self._earlier.keys() <= {*requests}
        for attempt, placement in self.placements.items():
            assert placement.attempt == attempt
            assert placement.state is not AttemptState.OVER
            instance = self._instances.get(placement.runner)
            assert placement.state is AttemptState.COMPLETE or (instance is not None and attempt in instance.attempts)
        for instance in self._instances.values():
            self._check_instance(instance, responses)

    def _check_instance(self, instance: Instance, responses: Mapping[RequestId, Response]) -> None:
        assert instance.attempts <= self.placements.keys()
        assert not instance.attempts & instance.to_forget.keys()
        at_work = [self.placements[each] for each in instance.attempts]
        wanted = {each.request for each in at_work if each.state in _AT_WORK}
        assert {*instance.pending, *instance.executing} == wanted
        assert not {*instance.pending} & {*instance.executing}
        for key, (response, _) in instance.streaming.items():
            placement = self.placements[attempt_of(key)]
            assert placement.request in instance.executing
            assert placement.finished is None
            assert response is responses[placement.request]
            assert response.attempt == placement.attempt
