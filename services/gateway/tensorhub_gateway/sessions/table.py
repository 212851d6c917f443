"""The sessions of one gateway: which are open, which have ended, and when one ends. Pure.

Invariants:
- An id stands for one session, and is not begun anew while it is remembered.
- A session ends once: by its last reward and the end of its calls, by being idle, or with the gateway.
"""

from collections import OrderedDict
from typing import Any, Final, Literal

from tensorhub_gateway.sessions.session import CALLS_MAX, SESSION_TOKENS_MAX, Session

SESSIONS_MAX: Final = 8192
"""Limit of the sessions that are open, or wait for the trainer to take them."""
ENDED_MAX: Final = 65_536
"""Limit of the sessions that have ended and are remembered, the latest."""

End = Literal["reward", "idle", "closed"]
Wrong = Literal["unknown", "over", "full", "calls", "tokens", "empty", "differs"]


class SessionError(Exception):
    """A session can't do what is asked. `wrong` says which of the reasons it is."""

    def __init__(self, wrong: Wrong, message: str) -> None:
        super().__init__(message)
        self.wrong, self.message = wrong, message


class Sessions:
    """All sessions of one gateway. Times are of its user's clock, in seconds."""

    def __init__(self, idle_s: float) -> None:
        self.open: dict[str, Session] = {}
        self._idle_s = idle_s
        self._ended: OrderedDict[str, float | None] = OrderedDict()
        """Sessions that have ended, with their last rewards."""

    def begin(self, id_: str, now: float, metadata: Any = None) -> Session:  # noqa: ANN401 (anything that JSON has)
        """Open a session. Raises `SessionError` where it is there already, or where there are too many."""
        if id_ in self.open:
            raise SessionError("differs", f"session {id_!r} is open: take another id")
        self._check_not_over(id_)
        if len(self.open) >= SESSIONS_MAX:
            raise SessionError(
                "full", f"{SESSIONS_MAX} sessions are open: post the rewards of those that are over, or begin fewer"
            )
        session = self.open[id_] = Session(id_, now, metadata)
        return session

    def call(self, id_: str, now: float) -> Session:
        """Return the session of a call that comes, which is open from now on until `leave`. Raises `SessionError`."""
        self._check_not_over(id_)
        session = self.open.get(id_) or self.begin(id_, now)
        if session.is_final:
            raise SessionError("over", f"session {id_!r} has its last reward: begin another one")
        if len(session.turns) + session.open >= CALLS_MAX:
            raise SessionError("calls", f"session {id_!r} has {CALLS_MAX} calls: begin another one")
        if session.tokens >= SESSION_TOKENS_MAX:
            raise SessionError("tokens", f"session {id_!r} has {session.tokens} tokens: begin another one")
        session.open += 1
        session.touched_at = now
        return session

    @staticmethod
    def leave(session: Session, now: float) -> None:
        """Note that a call of the session has ended."""
        session.open -= 1
        session.touched_at = now

    def reward(self, id_: str, reward: float, now: float, *, is_final: bool) -> None:
        """Take a reward; the last one of those that aren't final counts. Raises `SessionError`."""
        if id_ in self._ended:
            self._check_same(id_, self._ended[id_], reward, is_final=is_final)
            return
        session = self.open.get(id_)
        if session is None:
            raise SessionError("unknown", f"there is no session {id_!r}: its first call begins it")
        if session.is_final:
            self._check_same(id_, session.reward, reward, is_final=is_final)
            return
        if is_final and not session.turns and not session.open:
            raise SessionError("empty", f"session {id_!r} has no call: there is nothing to reward")
        session.reward, session.is_final, session.touched_at = reward, is_final, now

    def due(self, now: float) -> list[tuple[Session, End]]:
        """Return the sessions that end now, each with why."""
        found: list[tuple[Session, End]] = []
        for each in self.open.values():
            if each.open:
                continue
            if each.is_final:
                found.append((each, "reward"))
            elif now - each.touched_at >= self._idle_s:
                found.append((each, "idle"))
        return found

    def end(self, session: Session) -> None:
        """Note that a session has ended: its id is remembered for a while."""
        del self.open[session.id]
        self._ended[session.id] = session.reward
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def is_over(self, id_: str) -> bool:
        """Tell whether a session has ended, as far as is remembered."""
        return id_ in self._ended

    def _check_not_over(self, id_: str) -> None:
        if id_ in self._ended:
            raise SessionError("over", f"session {id_!r} is over: begin another one")

    @staticmethod
    def _check_same(id_: str, known: float | None, reward: float, *, is_final: bool) -> None:
        """A reward that is posted again is answered as the first time."""
        if known != reward or not is_final:
            raise SessionError("over", f"session {id_!r} is over with the reward {known}: no other one is taken")
