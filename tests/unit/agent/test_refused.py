"""Refusals are counted, and the log does not grow with those who try again."""

import pytest

from tensorhub_agent.runtime.rejections import TELL_EVERY_S, RejectionCounter, RejectionKind


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
