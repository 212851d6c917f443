"""A lost agent is one line in a registry's log, and so is its return, in however many jobs it was."""

import pytest

from tensorhub_registry.core import liveness
from tensorhub_registry.core.liveness import ExpireAgent, LostAgentLog


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
