"""Which agents are lost: silent for a whole window in which this registry could have received their beats."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples_of import examples

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.heartbeat import Heartbeat
from tensorhub_registry.core import liveness
from tensorhub_registry.core.liveness import (
    ExpireAgent,
    Input,
    Liveness,
    LostAgentLog,
    MonitoringStarted,
    MonitoringStopped,
    UnwatchAgent,
    UnwatchJob,
    WatchAgent,
)

WINDOW_S = 3.0
STEP_S = 0.25


class Driven:
    """A liveness core whose clock goes on in steps, as its driver lets it."""

    def __init__(self, *events: Input) -> None:
        self.core = Liveness(WINDOW_S)
        self.now = 100.0
        self.expired: list[ExpireAgent] = []
        self.say(*events)

    def say(self, *events: Input) -> list[ExpireAgent]:
        before = len(self.expired)
        for event in events:
            self.expired += self.core.handle(event, self.now)
            self.core.check()
        return self.expired[before:]

    def run(self, seconds: float, *beats: Heartbeat) -> list[ExpireAgent]:
        """Let time pass, with these beats at each step."""
        before = len(self.expired)
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            self.say(*beats, Tick())
        return self.expired[before:]


def test_delays_of_a_busy_host_are_no_pause() -> None:
    driven = Driven(MonitoringStarted(7), WatchAgent("j", "a", 1))
    for _ in range(3):
        driven.now += driven.core.pause_max_s
        driven.say(Tick())
    assert len(driven.expired) == 1


def test_ticks_are_wanted_often_enough_to_see_a_pause() -> None:
    """Whoever calls at the deadline, even twice as late, is not taken for stopped."""
    driven = Driven(MonitoringStarted(7))
    deadline = driven.core.deadline()
    assert deadline is not None
    assert 0 < deadline - driven.now < driven.core.pause_max_s / 2
    driven.say(WatchAgent("j", "a", 1))
    driven.now += 0.2
    driven.say(Tick())
    deadline = driven.core.deadline()
    assert deadline is not None
    assert deadline <= 100.0 + WINDOW_S


AGENTS = st.sampled_from("ab")
EVENTS = st.one_of(
    st.builds(Heartbeat, agent=AGENTS, incarnation=st.integers(1, 2)),
    st.builds(WatchAgent, job=st.sampled_from("jk"), agent=AGENTS, incarnation=st.integers(1, 2)),
    st.builds(UnwatchAgent, job=st.sampled_from("jk"), agent=AGENTS),
    st.builds(UnwatchJob, job=st.sampled_from("jk")),
    st.builds(MonitoringStarted, term=st.integers(1, 3)),
    st.builds(MonitoringStopped),
    st.just(Tick()),
)


@given(st.lists(st.tuples(EVENTS, st.sampled_from((0.0, 0.1, 0.5, 0.9, 2.0))), max_size=80))
@settings(max_examples=examples(1.5))
def test_nobody_is_expired_who_beat_or_before_we_had_listened_for_a_window(history: list[tuple[Input, float]]) -> None:
    core = Liveness(WINDOW_S)
    now, last, since = 0.0, 0.0, None
    heard: dict[tuple[str, int], float] = {}
    live: dict[tuple[str, str], int] = {}
    for event, wait_s in history:
        now += wait_s
        if now - last > core.pause_max_s and since is not None:
            since = now
        last = now
        expired = core.handle(event, now)
        core.check()
        match event:
            case MonitoringStarted():
                since = now
            case MonitoringStopped():
                since = None
            case Heartbeat(agent=agent, incarnation=incarnation):
                heard[agent, incarnation] = now
            case WatchAgent(job, agent, incarnation):
                live[job, agent] = incarnation
            case UnwatchAgent(job, agent):
                live.pop((job, agent), None)
            case UnwatchJob(job):
                live = {key: value for key, value in live.items() if key[0] != job}
            case _:
                pass
        for lost in expired:
            assert since is not None
            assert now - since >= WINDOW_S
            assert now - heard.get((lost.agent, lost.incarnation), 0.0) >= WINDOW_S
            assert live[lost.job, lost.agent] == lost.incarnation


def expiry(agent: str, job: str) -> ExpireAgent:
    return ExpireAgent(job, agent, 1, 3)


def test_an_agent_is_lost_once_and_back_once() -> None:
    agents = LostAgentLog()
    assert agents.lost([expiry("a", "one"), expiry("b", "one"), expiry("a", "two")], 10.0) == [("a", 2), ("b", 1)]
    assert agents.lost([expiry("a", "one")], 11.0) == [], "it is said again while the log has not taken it"
    assert agents.beats("a", 14.5) == 4.5
    assert agents.beats("a", 15.0) is None
    assert agents.lost([expiry("a", "one")], 20.0) == [("a", 1)]


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "LOST_MAX", 2)
    agents = LostAgentLog()
    assert len(agents.lost([expiry(name, "one") for name in "abc"], 0.0)) == 3
    assert agents.beats("a", 1.0) is None
    assert agents.beats("c", 1.0) == 1.0


def beat(agent: str = "a", incarnation: int = 1) -> Heartbeat:
    return Heartbeat(agent=agent, incarnation=incarnation)


WATCHED = WatchAgent("j", "a", 1)


@pytest.mark.parametrize(
    ("events", "beats", "lost"),
    [
        ([WATCHED], [], ["j/a/1"]),
        ([WATCHED], [("a", 1)], []),
        ([WATCHED, WatchAgent("k", "a", 2)], [("a", 2)], ["j/a/1"]),
        ([WATCHED, WatchAgent("k", "a", 1), WatchAgent("l", "b", 1)], [("b", 1)], ["j/a/1", "k/a/1"]),
        ([WATCHED, WatchAgent("j", "a", 2)], [], ["j/a/2"]),
        ([WATCHED, UnwatchAgent("j", "a"), UnwatchAgent("j", "b")], [], []),
        ([WATCHED, WatchAgent("j", "b", 1), WatchAgent("k", "b", 1), UnwatchJob("j")], [], ["k/b/1"]),
        ([], [("stranger", 1)], []),
    ],
)
@pytest.mark.parametrize("leads_first", [False, True])
def test_who_is_lost_after_a_silent_window_and_not_before(
    events: list[Input], beats: list[tuple[str, int]], lost: list[str], *, leads_first: bool
) -> None:
    """Only while this registry leads; leadership begins a whole window, since beats before it may have been missed.

    An expiry that the log did not take is said again after a window.
    """
    driven = Driven(*([MonitoringStarted(7)] if leads_first else []), *events)
    if not leads_first:
        assert driven.run(3 * WINDOW_S) == []
        assert driven.core.deadline() is None
        driven.say(MonitoringStarted(7))
    said = [beat(*each) for each in beats]
    for _ in range(2):
        assert driven.run(WINDOW_S - STEP_S, *said) == []
        expired = driven.run(STEP_S, *said)
        assert [f"{each.job}/{each.agent}/{each.incarnation}" for each in expired] == lost
        assert all(each.term == 7 for each in expired)


def test_a_pause_of_ours_begins_a_whole_window() -> None:
    """We were stopped, and the beats of that time wait unread: what comes first on waking must not expire anybody."""
    driven = Driven(MonitoringStarted(7), WatchAgent("j", "a", 1))
    driven.run(WINDOW_S - STEP_S)
    driven.now += 60.0
    assert driven.say(Tick()) == []
    assert driven.run(WINDOW_S - STEP_S) == []
    assert len(driven.run(STEP_S)) == 1
