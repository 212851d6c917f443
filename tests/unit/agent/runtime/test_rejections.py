"""Refusals are counted, and the log does not grow with those who try again; troubles are told until they are over."""

import pytest

from tensorhub_agent.runtime.rejections import TELL_EVERY_S, RejectionCounter, RejectionKind
from tensorhub_agent.runtime.troubles import TOLD_S, TroubleKind, TroubleTracker


def test_each_is_counted_and_one_in_a_while_is_told(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    refused = RejectionCounter(lambda: now)
    for _ in range(1000):
        refused.note(RejectionKind.TICKET, "a ticket")
    refused.note(RejectionKind.USER, "a user")
    assert (refused.counts["ticket"], refused.counts["user"], refused.counts["range"]) == (1000, 1, 0)
    assert caplog.messages == ["refused: a ticket", "refused: a user"]
    now = TELL_EVERY_S
    refused.note(RejectionKind.TICKET, "another")
    assert caplog.messages[-1] == "refused: another (and 999 more such since the last line)"


def test_a_trouble_is_told_until_it_is_over_or_long_ago() -> None:
    now = [1000.0]
    troubles = TroubleTracker(lambda: now[0])
    troubles.note(TroubleKind.MEMORY, "first")
    now[0] += 1
    troubles.note(TroubleKind.MEMORY, "second")
    troubles.note(TroubleKind.COPY, "third")
    assert [(each.kind, each.why, each.since) for each in troubles.told()] == [
        ("no-memory", "second", 1000.0),
        ("no-copy", "third", 1001.0),
    ]
    troubles.over(TroubleKind.COPY)
    troubles.over(TroubleKind.STATE)
    now[0] += TOLD_S - 1
    assert [each.kind for each in troubles.told()] == ["no-memory"]
    now[0] += 1
    assert troubles.told() == ()
    troubles.note(TroubleKind.MEMORY, "again")
    assert troubles.told()[0].since == now[0]
