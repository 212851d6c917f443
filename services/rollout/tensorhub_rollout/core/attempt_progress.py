"""The tokens of attempts, as their runners send them, until an attempt has ended and all of its tokens are here. Pure.

How an attempt ended and its last tokens come in any order: it is over once both are here. Its request then ends, begins
anew, waits again, or goes to where the attempt was withdrawn for.

Invariant: tokens count only of a request's one attempt that is not over, at the place that is held.
"""

from collections.abc import Callable, Iterable

from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import Finished, Frame, TokenRun, attempt_key
from tensorhub_rollout.core.assignments import Assignments
from tensorhub_rollout.core.attempts import Attempts
from tensorhub_rollout.core.fleet import Fleet
from tensorhub_rollout.core.frame_rows import Row, rows_to_judge
from tensorhub_rollout.core.instance import Instance
from tensorhub_rollout.core.leader_counts import DiscardReason
from tensorhub_rollout.core.leader_events import AbortAnswered, Place
from tensorhub_rollout.core.open_requests import OpenRequests
from tensorhub_rollout.core.placement import AttemptState, AttemptTransition, Placement
from tensorhub_rollout.core.responses import Response, TokensDiffer


class AttemptProgress:
    """The progress of all attempts of one leader."""

    def __init__(
        self,
        fleet: Fleet,
        attempts: Attempts,
        requests: OpenRequests,
        assignments: Assignments,
        lose: Callable[[Instance, str], None],
    ) -> None:
        """Begin. `lose` takes an instance for lost that sends what can't be, for this reason."""
        self._fleet, self._attempts, self._requests, self._assignments = fleet, attempts, requests, assignments
        self._lose = lose

    # ------------------------------------------------------------------------------------------ frames

    def take_frame(self, instance: Instance, frame: Frame) -> tuple[list[tuple[Attempt, int]], bool]:
        """Take a frame that is well formed.

        Return what to send again, as attempts with the number of tokens that are here, and whether one is unknown.
        """
        placements = self._attempts.placements
        finished = []
        for each in frame.finished:
            placement = placements.get(each.attempt)
            if placement is not None and placement.runner == instance.runner:
                # Before the tokens: with the last of them the attempt is over.
                placement.finished = each
                instance.streaming.pop(attempt_key(each.attempt), None)
                finished.append(placement)
        resend, is_unknown = self._take_rows(instance, frame)
        for placement in finished:
            if placement.attempt in placements and not self.look_whether_over(placement):
                resend.append((placement.attempt, self._requests.held(placement.request)))
        return resend, is_unknown

    def _take_rows(self, instance: Instance, frame: Frame) -> tuple[list[tuple[Attempt, int]], bool]:
        resend: list[tuple[Attempt, int]] = []
        is_unknown = False
        runs: dict[Attempt, list[TokenRun]] = {}
        for attempt, run in frame.runs:
            runs.setdefault(attempt, []).append(run)
            instance.streaming.pop(attempt_key(attempt), None)
        for row in rows_to_judge(instance, frame):
            placement = self._attempts.placements.get(row.attempt)
            if placement is None or placement.runner != instance.runner:
                is_unknown = is_unknown or row.attempt not in instance.to_forget
            elif not self._take(instance, placement, row, runs.get(row.attempt, ())):
                resend.append((row.attempt, self._requests.responses[placement.request].count))
            else:
                instance.tokens += row.count
        return resend, is_unknown

    def _take(self, instance: Instance, placement: Placement, row: Row, runs: Iterable[TokenRun]) -> bool:
        """Take a row of an attempt; False: it begins behind what is held, and none is taken."""
        if placement.state is AttemptState.ASSIGNED:
            # It could not make tokens without the whole prefix.
            self._attempts.confirm(placement)
        if placement.state is AttemptState.COMPLETE:
            return True
        response = self._requests.responses[placement.request]
        if row.start + row.count > placement.tokens_max:
            self._lose(instance, f"it made more than {placement.tokens_max} tokens of a response")
            return True
        try:
            if not response.take(row.start, row.tokens, row.logprobs):
                return False
        except TokensDiffer as why:
            self._lose(instance, str(why))
            return True
        response.attempt = placement.attempt
        self._take_runs(placement, response, runs)
        self._attempts.note_progress(placement, response)
        if placement.state is AttemptState.STOPPING or placement.finished is not None:
            self.look_whether_over(placement)
        return True

    def _take_runs(self, placement: Placement, response: Response, runs: Iterable[TokenRun]) -> None:
        is_new = False
        for run in runs:
            if run.start < response.count:
                response.add_run(run)
                is_new = True
        # They may have been under way when this leader heard of a rewind, or of newer versions.
        if is_new and placement.finished is None and (why := self._requests.why_void(placement.request)) is not None:
            self._requests.restart(placement.request, why)

    # ------------------------------------------------------------------------------------------ ends

    def abort_answered(self, event: AbortAnswered) -> None:
        """Take after how many tokens a runner has stopped attempts, and which it has forgotten."""
        instance = self._fleet.known(event.runner, event.incarnation)
        if instance is None:
            return
        for attempt in event.forgotten:
            instance.to_forget.pop(attempt, None)
        for result in event.stopped:
            placement = self._attempts.placements.get(result.attempt)
            if placement is None or placement.runner != event.runner or placement.state is not AttemptState.STOPPING:
                continue
            if result.tokens is None:
                # It never began: its assign was lost, and can't begin it any more.
                self._stopped(placement)
            else:
                self._attempts.note_stopped(placement, result.tokens)
                self.look_whether_over(placement)

    def look_whether_over(self, placement: Placement) -> bool:
        """End the attempt if all of its tokens are here; tell whether it ended."""
        if placement.state is AttemptState.COMPLETE:
            return True
        held = self._requests.held(placement.request)
        if placement.finished is not None and held >= placement.finished.tokens:
            self._finished(placement, placement.finished)
            return True
        if placement.state is not AttemptState.STOPPING or placement.stopped_at is None or held < placement.stopped_at:
            return False
        self._stopped(placement)
        return True

    def _stopped(self, placement: Placement) -> None:
        """End an attempt that was withdrawn, and place its request where it was to go."""
        placement.move(AttemptTransition.STOPPED)
        self._requests.attempt_over(placement)
        if placement.moves_to is not None:
            self._assignments.place(Place(placement.request, placement.moves_to, placement.withdrawn_why))

    def _finished(self, placement: Placement, finished: Finished) -> None:
        """End an attempt that has ended by itself at its runner."""
        of, requests = placement.request, self._requests
        if placement.state is AttemptState.ASSIGNED:
            # The answer to its assign was lost; it could not end without the whole prefix.
            self._attempts.confirm(placement)
        reason = finished.reason
        why: DiscardReason = "restart"
        if reason in {"stop", "length"} and (void := requests.why_void(of)) is not None:
            reason, why = "restart", void
        match reason:
            case "stop" | "length":
                self._attempts.complete(placement)
                requests.store_end(of)
            case "restart" | "superseded" | "failed":
                if placement.state is AttemptState.HELD:
                    placement.move(AttemptTransition.WITHDRAWN)
                placement.move(AttemptTransition.STOPPED)
                if reason == "restart":
                    requests.begin_anew(of, placement.attempt, why)
                requests.attempt_over(placement, finished.error if reason == "failed" else None)
                if reason == "restart":
                    # Its tokens are not wanted again.
                    self._attempts.forget_one(placement)
