"""Which sessions there are, and when each ends, whatever the order of calls and rewards."""

import pytest

from tensorhub_gateway.sessions.messages import Reply
from tensorhub_gateway.sessions.session import ChatAsked, Session
from tensorhub_gateway.sessions.table import SessionError, Sessions

from array import array  # isort: skip


def answered(sessions: Sessions, session: Session, now: float = 0.0) -> None:
    asked = ChatAsked.of(({"role": "user", "content": "hi"},), None)
    turn = session.begin(asked, None, None, array("i", [1]), ("", ""))
    session.make(turn, array("i", [2]), "", "", Reply(""))
    sessions.leave(session, now)


def wrong(error: pytest.ExceptionInfo[SessionError]) -> str:
    return error.value.wrong


def test_the_last_reward_ends_a_session_once_its_calls_have_ended() -> None:
    sessions = Sessions(10.0)
    session = sessions.call("s", 0.0)
    other = sessions.call("s", 0.0)
    assert other is session
    answered(sessions, session)
    sessions.reward("s", 1.0, 0.0, is_final=True)
    assert sessions.due(0.0) == []
    with pytest.raises(SessionError) as error:
        sessions.call("s", 0.0)
    assert wrong(error) == "over"
    sessions.leave(session, 1.0)
    assert sessions.due(1.0) == [(session, "reward")]


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_last_reward_is_taken_again_and_another_one_is_not(*, is_ended: bool) -> None:
    sessions = Sessions(10.0)
    answered(sessions, sessions.call("s", 0.0))
    sessions.reward("s", 1.0, 0.0, is_final=True)
    if is_ended:
        sessions.end(sessions.open["s"])
    sessions.reward("s", 1.0, 0.0, is_final=True)
    for reward, is_final in ((2.0, True), (1.0, False)):
        with pytest.raises(SessionError) as error:
            sessions.reward("s", reward, 0.0, is_final=is_final)
        assert wrong(error) == "over"


def test_a_reward_that_is_not_the_last_counts_until_another_one_comes() -> None:
    sessions = Sessions(10.0)
    answered(sessions, sessions.call("s", 0.0))
    sessions.reward("s", 1.0, 0.0, is_final=False)
    sessions.reward("s", 3.0, 5.0, is_final=False)
    assert sessions.due(14.0) == []
    ((session, end),) = sessions.due(15.0)
    assert (session.reward, end) == (3.0, "idle")


def test_a_session_is_not_idle_while_a_call_is_open() -> None:
    sessions = Sessions(10.0)
    session = sessions.call("s", 0.0)
    assert sessions.due(1000.0) == []
    sessions.leave(session, 1000.0)
    assert sessions.due(1009.0) == []
    assert sessions.due(1010.0) == [(session, "idle")]


def test_a_reward_of_what_is_not_there_is_refused() -> None:
    sessions = Sessions(10.0)
    with pytest.raises(SessionError) as error:
        sessions.reward("s", 1.0, 0.0, is_final=True)
    assert wrong(error) == "unknown"
    sessions.begin("s", 0.0)
    with pytest.raises(SessionError) as error:
        sessions.reward("s", 1.0, 0.0, is_final=True)
    assert wrong(error) == "empty"


def test_an_id_is_not_begun_anew() -> None:
    sessions = Sessions(10.0)
    sessions.end(sessions.begin("s", 0.0))
    for begin in (sessions.begin, sessions.call):
        with pytest.raises(SessionError) as error:
            begin("s", 1.0)
        assert wrong(error) == "over"
    assert sessions.is_over("s")


def test_there_are_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub_gateway.sessions.table.SESSIONS_MAX", 1)
    monkeypatch.setattr("tensorhub_gateway.sessions.table.CALLS_MAX", 2)
    sessions = Sessions(10.0)
    for _ in range(2):
        sessions.call("s", 0.0)
    for id_, what in (("s", "calls"), ("t", "full")):
        with pytest.raises(SessionError) as error:
            sessions.call(id_, 0.0)
        assert wrong(error) == what
