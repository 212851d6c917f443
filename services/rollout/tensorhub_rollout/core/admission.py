"""Which groups may begin, so that what they make has room in the job's payloads (docs/design/rollouts/log.md). Pure.

Invariant: no group begins while payloads, with the largest size of the groups that have begun and are open, have more
than their share of the room. A group that has begun finishes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES
from tensorhub_rollout.log.state import Group, RolloutState

GroupId = tuple[int, int]
"""A group, as (submission, index of the group)."""


class Admission:
    """What one leader lets begin. Without a limit it counts nothing."""

    def __init__(self, state: RolloutState, share_max: float) -> None:
        """Have no limit yet."""
        self.payload_bytes_max = 0
        """How many bytes the job's payloads may have together; 0: any number."""
        self.begun: set[GroupId] = set()
        """The groups that have begun and are open."""
        self.is_held_back = False
        """Whether no further group may begin."""
        self._state, self._share_max = state, share_max
        self._reserved_bytes = 0
        """The largest size of what is open in the groups that have begun."""

    def look(self, begun: Iterable[GroupId]) -> None:
        """Count anew: these groups have begun; one may be named several times."""
        self.begun, self._reserved_bytes, self.is_held_back = set(), 0, False
        if self.payload_bytes_max:
            for group in begun:
                self._reserve(group)
            self._judge()

    def open_requests(self) -> tuple[Counter[str], Counter[str]]:
        """Return how many requests are open by model, and how many of them have begun or have room to begin."""
        state = self._state
        open_ = Counter[str]()
        for each in state.consumers.values():
            open_[each.model] += each.open
        if not self.payload_bytes_max:
            return open_, open_
        may_run = Counter[str]()
        left = self._share_max * self.payload_bytes_max - state.payload_bytes
        for model, group in self._groups(begun=True):
            may_run[model] += group.open
            left -= _bytes_max(group)
        for model, group in self._groups(begun=False):
            if left < 0:
                break
            may_run[model] += group.open
            left -= _bytes_max(group)
        return open_, may_run

    def _groups(self, *, begun: bool) -> Iterator[tuple[str, Group]]:
        """Yield the groups that have begun, or the others, with their models."""
        state, has_begun = self._state, self.begun
        if begun:
            for seq, index in has_begun:
                # Since the last look some may be done.
                submission = state.submissions.get(seq)
                if submission is not None and index in submission.groups:
                    yield state.consumers[submission.consumer].model, submission.groups[index]
            return
        for seq, submission in state.submissions.items():
            model = state.consumers[submission.consumer].model
            for index, group in submission.groups.items():
                if (seq, index) not in has_begun:
                    yield model, group

    def admit(self, group: GroupId) -> bool:
        """Count a group as begun where there is room for it, and tell whether it has begun."""
        if not self.payload_bytes_max or group in self.begun:
            return True
        # Payloads may have grown since the last look.
        self._judge()
        if self.is_held_back:
            return False
        self._reserve(group)
        self._judge()
        return True

    def _reserve(self, at: GroupId) -> None:
        if at not in self.begun:
            self.begun.add(at)
            group = self._state.submissions[at[0]].groups[at[1]]
            self._reserved_bytes += _bytes_max(group)

    def _judge(self) -> None:
        used = self._state.payload_bytes + self._reserved_bytes
        self.is_held_back = used > self._share_max * self.payload_bytes_max


def _bytes_max(group: Group) -> int:
    """Return the largest size of what is open of a group: tokens and their log-probabilities."""
    return 2 * TOKEN_BYTES * group.tokens_max * group.open
