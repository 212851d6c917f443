"""An agent that reads leave is told once, until one of them gets bytes of it again."""

import pytest

from tensorhub_agent.sources import source_watch
from tensorhub_agent.sources.source_watch import SourceWatch


def test_a_source_is_left_once_and_is_back_once(caplog: pytest.LogCaptureFixture) -> None:
    seen = SourceWatch()
    seen.back("agent-1")
    for _ in range(3):
        seen.lost("agent-1", "it made no progress")
    seen.back("agent-2")
    seen.back("agent-1")
    seen.back("agent-1")
    assert not seen.any_lost
    lost, back = [record.getMessage() for record in caplog.records]
    assert lost == "source agent-1 is left: it made no progress"
    assert back.startswith("source agent-1 is read from again after 0.")


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_watch, "LOST_MAX", 2)
    seen = SourceWatch()
    for number in range(5):
        seen.lost(f"agent-{number}", "")
    assert len(seen._lost) == 2
