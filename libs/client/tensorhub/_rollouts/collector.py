"""What has ended and was not yielded yet, in one attachment of a trainer. Pure.

Invariants:
- A request is yielded at most once, however many tasks of the trainer ask at a time.
- A group counts as whole once none of its requests is open, and all that had ended by then is here.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.questions import EndedRequest, ReadyAnswer


class Place(NamedTuple):
    """Where a question looks from."""

    after: int = 0
    """The entry behind which it looks."""
    after_request: RequestId | None = None
    """The last request of that entry which is here."""


class Collector:
    """The responses of one attachment that wait to be yielded, by group, in the order in which the first ended."""

    def __init__(self) -> None:
        self.place = Place()
        """Where the next question looks from."""
        self._waiting: dict[str, list[EndedRequest]] = {}
        self._closed: set[str] = set()
        """Groups of which nothing is open."""
        self._whole: set[str] = set()

    def take(self, place: Place, answer: ReadyAnswer) -> bool:
        """Take what the manager says has ended behind a place.

        False: another task has asked from there as well, and has taken the answer; this one changes nothing.
        """
        if place != self.place:
            return False
        for ended in answer.ended:
            self._waiting.setdefault(ended.group, []).append(ended)
            if not ended.group_open:
                self._closed.add(ended.group)
            self.place = Place(ended.ended_seq, ended.request)
        if answer.is_last:
            self._whole |= self._closed
            self._closed.clear()
        return True

    @property
    def count(self) -> int:
        """How many responses wait to be yielded."""
        return sum(map(len, self._waiting.values()))

    def pick(
        self, count_min: int, *, whole_groups: bool, groups: Collection[str] | None, all_of_them: bool
    ) -> list[EndedRequest]:
        """Return at least `count_min` responses, by groups, and keep the rest; none where there are fewer.

        `all_of_them`: return what there is. `groups`: of these alone.
        """
        names = [
            name
            for name in self._waiting
            if (groups is None or name in groups) and (not whole_groups or name in self._whole)
        ]
        picked: list[str] = []
        count = 0
        for name in names:
            if count >= count_min and not all_of_them:
                break
            picked.append(name)
            count += len(self._waiting[name])
        if not all_of_them and count < count_min:
            return []
        found = [ended for name in picked for ended in self._waiting.pop(name)]
        self._whole.difference_update(name for name in picked if name not in self._waiting)
        return found

    def put_back(self, picked: Iterable[EndedRequest]) -> None:
        """Keep what was picked, and was not yielded, before all that is here. The next answer says what is whole."""
        again: dict[str, list[EndedRequest]] = {}
        for ended in picked:
            again.setdefault(ended.group, []).append(ended)
            if not ended.group_open:
                self._closed.add(ended.group)
        for name, later in self._waiting.items():
            again.setdefault(name, []).extend(later)
        self._waiting = again

    def drop(self) -> None:
        """Forget all: the attachment is over."""
        self._waiting.clear()
