"""What one manager has counted of a job's rollouts in all of its terms.

A thread of the metrics page reads it while the event loop goes on.
"""

from collections import Counter

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.core.leader import Leader
from tensorhub_rollout.core.leader_counts import DiscardReason
from tensorhub_rollout.log.outcomes import Cancelled, Ended, Outcome
from tensorhub_rollout.log.state import RolloutState


class RolloutCounts:
    """The counts of one job: `fold` each outcome of this manager's terms, and `end` each leader."""

    def __init__(self) -> None:
        self.responses: Counter[str] = Counter()
        """Responses that ended, by how."""
        self.response_tokens = 0
        """Tokens of these."""
        self._attempts = self._lost = self._tokens = 0
        """Of leaders before the present one."""
        self._discarded: Counter[DiscardReason] = Counter()

    def fold(self, state: RolloutState, outcome: Outcome) -> None:
        """Count what an entry ended."""
        if isinstance(outcome, Ended | Cancelled):
            for of in outcome.requests:
                self._count(state, of)

    def _count(self, state: RolloutState, of: RequestId) -> None:
        request = state.request(of)
        if request is not None and request.end is not None:
            self.responses[request.end.reason] += 1
            self.response_tokens += request.end.tokens

    def end(self, leader: Leader) -> None:
        """Keep the counts of a leader that stands down."""
        self._attempts, self._lost = self.attempts(leader), self.instances_lost(leader)
        self._tokens, self._discarded = self.tokens(leader), self.discarded(leader)

    def attempts(self, leader: Leader | None) -> int:
        """Return how many placements there were."""
        return self._attempts + (0 if leader is None else leader.counts.attempts)

    def instances_lost(self, leader: Leader | None) -> int:
        """Return how many instances were taken for lost."""
        return self._lost + (0 if leader is None else leader.counts.instances_lost)

    def tokens(self, leader: Leader | None) -> int:
        """Return how many tokens came from instances."""
        if leader is None:
            return self._tokens
        present = sum(each.tokens for each in list(leader.instances.values()))
        return self._tokens + leader.counts.tokens_of_lost + present

    def discarded(self, leader: Leader | None) -> Counter[DiscardReason]:
        """Return how many tokens are made again, by why."""
        return self._discarded if leader is None else self._discarded + leader.counts.discarded
