"""What is expected of the lengths of a leader's open requests, from its fold and the tokens that it holds. Pure.

Groups of equal digest (prompt, sampling, version and size) are one prompt to the length model. What is expected of a
group is kept for `KEPT_S`, or until one of it ends: each look of a policy asks for all, which may be thousands.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.log.state import Group, RolloutState
from tensorhub_rollout.policy.lengths import GroupEstimate, LengthEstimate, LengthLimits, LengthModel
from tensorhub_rollout.policy.prompt_lengths import PromptLengths

KEPT_S: Final = 2.0
"""What is expected of a group is used for so long, though its responses have grown."""
GROUPS_MAX: Final = 65_536
"""Limit of the groups of which it is kept; at the limit all is forgotten, and estimated anew."""
LENGTH_LIMITS: Final = LengthLimits()


class _Expected(NamedTuple):
    """What is expected of a group and of one of it without tokens, and until when that counts."""

    until: float
    group: GroupEstimate
    fresh: LengthEstimate


class ResponseLengths:
    """The lengths of one job's responses, as one leader learns them."""

    def __init__(self, state: RolloutState, held: Callable[[RequestId], int]) -> None:
        """Learn from what has ended and is not done. `held` returns how many tokens of a request are here."""
        self._state, self._held = state, held
        self._model, self._prompts = LengthModel(LENGTH_LIMITS), PromptLengths(LENGTH_LIMITS)
        self._expected: dict[tuple[int, int], _Expected] = {}
        """By submission and group."""
        for of, _, request in state.requests():
            if request.end is not None:
                self.ended(of)

    def ended(self, of: RequestId) -> None:
        """Learn from a request that has ended, where that tells of its length."""
        request = self._state.request(of)
        if request is None or request.end is None:
            return
        group = self._state.submissions[of.submission].groups[request.group]
        tokens, is_first = request.end.tokens, of.index == group.first
        match request.end.reason:
            case "stop":
                self._model.finished(group.digest, tokens)
                if is_first:
                    self._prompts.finished(group.prompt_tokens, tokens)
            case "length":
                self._model.cut_off(group.digest, tokens)
                if is_first:
                    self._prompts.cut_off(group.prompt_tokens, tokens)
            case _:
                return
        self._expected.pop((of.submission, request.group), None)

    def estimate(self, of: RequestId, now: float) -> LengthEstimate:
        """Return how long the response of an open request will be."""
        submission = self._state.submissions[of.submission]
        number = submission.requests[of.index].group
        return self.estimate_one((of.submission, number), submission.groups[number], self._held(of), now)

    def estimate_one(self, which: tuple[int, int], group: Group, made: int, now: float) -> LengthEstimate:
        """Return how long the response of a request with `made` tokens will be. `which`: submission and group."""
        kept = self._expected.get(which)
        if kept is not None and now < kept.until:
            expected = kept
        else:
            expected = self._of_group(which[0], group, now + KEPT_S)
            if len(self._expected) >= GROUPS_MAX:
                self._expected.clear()
            self._expected[which] = expected
        return expected.group.of(made, group.tokens_max) if made else expected.fresh

    def _of_group(self, seq: int, group: Group, until: float) -> _Expected:
        members = (RequestId(seq, index) for index in range(group.first, group.first + group.size))
        running = [count for of in members if (count := self._held(of))]
        _, within = self._model.variances()
        prior = self._prompts.prior(group.prompt_tokens, within)
        found = self._model.estimate_group(group.digest, running, prior)
        return _Expected(until, found, found.of(0, group.tokens_max))
