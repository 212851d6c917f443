"""What has ended and was not yielded yet, in one attachment of a trainer. Pure.

Invariants:
- A request is yielded at most once, however many tasks of the trainer ask at a time.
- A group counts as whole once none of its requests is open, and all that had ended by then is here.
- What is claimed for sessions is yielded only as a part of its session.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from tensorhub._rollouts.trajectories import EndedSession
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.questions import EndedRequest, ReadyAnswer

Ready = EndedRequest | EndedSession


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
        self._claimed: set[str] = set()
        """Groups of calls of sessions that have not been taken yet."""
        self._sessions: list[EndedSession] = []
        """Sessions that have ended, in that order."""

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
        alone = sum(len(each) for name, each in self._waiting.items() if name not in self._claimed)
        return alone + sum(len(each.trajectories) for each in self._sessions)

    def pick(
        self, count_min: int, *, whole_groups: bool, groups: Collection[str] | None, all_of_them: bool
    ) -> list[Ready]:
        """Return at least `count_min` responses, by groups, and keep the rest; none where there are fewer.

        `all_of_them`: return what there is. `groups`: of these groups and sessions alone.
        """
        names = [
            name
            for name in self._waiting
            if name not in self._claimed
            and (groups is None or name in groups)
            and (not whole_groups or name in self._whole)
        ]
        picked: list[str] = []
        ended: list[EndedSession] = []
        count = 0
        for name in names:
            if count >= count_min and not all_of_them:
                break
            picked.append(name)
            count += len(self._waiting[name])
        for session in self._sessions:
            if count >= count_min and not all_of_them:
                break
            if groups is None or session.session in groups:
                ended.append(session)
                count += len(session.trajectories)
        if not all_of_them and count < count_min:
            return []
        found: list[Ready] = [each for name in picked for each in self._waiting.pop(name)]
        self._whole.difference_update(name for name in picked if name not in self._waiting)
        self._sessions = [each for each in self._sessions if each not in ended]
        return found + ended

    def put_back(self, picked: Iterable[Ready]) -> None:
        """Keep what was picked, and was not yielded, before all that is here. The next answer says what is whole."""
        again: dict[str, list[EndedRequest]] = {}
        sessions: list[EndedSession] = []
        for each in picked:
            if isinstance(each, EndedSession):
                sessions.append(each)
                continue
            again.setdefault(each.group, []).append(each)
            if not each.group_open:
                self._closed.add(each.group)
        for name, later in self._waiting.items():
            again.setdefault(name, []).extend(later)
        self._waiting = again
        self._sessions = sessions + self._sessions

    def claim(self, groups: Iterable[str]) -> None:
        """Keep these groups for the sessions of a gateway, before any of their requests has ended."""
        self._claimed.update(groups)

    def pick_claimed(self) -> list[EndedRequest]:
        """Return what has ended of the groups that were claimed, each of which has one request."""
        names = [name for name in self._waiting if name in self._claimed]
        found = [each for name in names for each in self._waiting.pop(name)]
        self._whole.difference_update(names)
        self._closed.difference_update(names)
        self._claimed.difference_update(names)
        return found

    def deliver(self, session: EndedSession) -> None:
        """Take a session that has ended, to be yielded."""
        self._sessions.append(session)

    def release(self) -> None:
        """Yield what was claimed by itself: no gateway takes it any more."""
        self._claimed.clear()

    def drop(self) -> None:
        """Forget all: the attachment is over."""
        self._waiting.clear()
        self._sessions.clear()
