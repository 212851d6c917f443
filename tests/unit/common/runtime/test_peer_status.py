"""Another part of the hub is lost once and back once, however many questions meet its silence."""

import pytest

from tensorhub_common.runtime.peer_status import PeerStatus


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_loss_and_a_return_are_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    planner = PeerStatus("the planner", clock)
    planner.answers()
    for _ in range(3):
        planner.is_silent("no answer on plan within 1 s", 1.0)
        clock.now += 2.0
    assert planner.silent_s == 7.0
    planner.answers()
    planner.answers()
    assert [record.getMessage() for record in caplog.records] == [
        "the planner does not answer: no answer on plan within 1 s",
        "the planner answers again after 7.0 s; 3 attempts failed",
    ]
    assert planner.lost_count == 1


def test_the_next_loss_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    planner = PeerStatus("the planner", clock)
    for _ in range(2):
        planner.is_silent("nobody listens")
        planner.answers()
    lost, back = "the planner does not answer: nobody listens", "the planner answers again after 0.0 s"
    assert [record.getMessage() for record in caplog.records] == [lost, back, lost, back]
    assert planner.lost_count == 2
