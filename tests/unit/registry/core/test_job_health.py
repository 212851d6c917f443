"""What is shown of a job that can't go on."""

import pytest

from tensorhub_common.bus.errors import LogFull, LogShorter, NoAnswer
from tensorhub_common.log_follower.set_aside import SetAside
from tensorhub_common.protocol.queries import JobHealth
from tensorhub_registry.core.job_health import NOTED_S, WAITING_S_MIN, JobFailure, WaitReasons, health_of
from tensorhub_registry.core.log_entries import FoldMismatch


def test_what_passes_by_itself_is_shown_once_it_lasts() -> None:
    troubles = WaitReasons()
    troubles.note("reading", NoAnswer("no answer within 2 s"), 100.0)
    assert health_of("j", 7, None, None, troubles, 100.0).state == "well"
    found = health_of("j", 7, None, None, troubles, 100.0 + WAITING_S_MIN)
    assert (found.state, found.why, found.since, found.again_at) == ("waiting", "no answer within 2 s", 100.0, 0.0)
    assert "nodes of NATS" in found.advice
    troubles.note("reading", NoAnswer("still none"), 110.0)
    troubles.note("writing", LogFull("it is full"), 101.0)
    found = health_of("j", 7, None, None, troubles, 120.0)
    assert (found.why, found.since) == ("still none", 100.0), "what has lasted longest is shown, in its last words"
    troubles.clear("reading")
    found = health_of("j", 7, None, None, troubles, 120.0)
    assert (found.why, found.since) == ("it is full", 101.0)
    assert "disk" in found.advice
    troubles.clear("writing")
    assert health_of("j", 7, None, None, troubles, 120.0) == JobHealth(job="j", state="well", seq=7)


def test_what_is_not_met_with_again_has_passed() -> None:
    """That an agent is lost could not be written, and then it beat again: nothing is tried that could clear this."""
    troubles = WaitReasons()
    troubles.note("writing", NoAnswer("no answer"), 100.0)
    assert health_of("j", 7, None, None, troubles, 100.0 + NOTED_S - 1).state == "waiting"
    assert health_of("j", 7, None, None, troubles, 100.0 + NOTED_S).state == "well"
    troubles.note("writing", NoAnswer("no answer"), 200.0)
    assert health_of("j", 7, None, None, troubles, 203.0).since == 200.0


def test_why_a_job_is_set_aside_is_shown_before_what_it_waits_for() -> None:
    troubles = WaitReasons()
    troubles.note("reading", NoAnswer("no answer"), 100.0)
    aside = SetAside(7, 90.0, 1, 5.0, 95.0)
    found = health_of("j", 7, JobFailure.of(FoldMismatch("another fold spoke")), aside, troubles, 120.0)
    assert (found.state, found.why, found.seq) == ("set-aside", "another fold spoke", 7)
    assert (found.since, found.again_at) == (90.0, 95.0)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (FoldMismatch("x"), "one release"),
        (LogShorter("x"), "who replaced the log"),
        (KeyError("x"), "report it"),
    ],
)
def test_each_reason_has_its_own_advice(error: Exception, advice: str) -> None:
    assert advice in JobFailure.of(error).advice
    assert JobFailure.of(error, "in other words").why == "in other words"
