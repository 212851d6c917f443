"""When a job that was set aside is tried again, and what is said of it."""

import pytest

from tensorhub_common.bus.errors import LogFull, LogShorter, NoAnswer
from tensorhub_common.log_follower.set_aside import AGAIN_S_MAX, AGAIN_S_MIN, SetAside, set_aside
from tensorhub_common.protocol.queries import JobHealth
from tensorhub_registry.core.job_health import NOTED_S, WAITING_S_MIN, JobFailure, WaitReasons, health_of
from tensorhub_registry.core.log_entries import FoldMismatch


def test_a_job_that_fails_at_each_try_is_tried_ever_more_rarely() -> None:
    """However far it folds: each try adds to its log that a registry leads."""
    aside = set_aside(None, 7, 0.0)
    waits = [aside.wait_s]
    for number in range(11):
        aside = set_aside(aside, 8 + number, aside.again_at + 1.0)
        waits.append(aside.wait_s)
        assert aside.since == 0.0
    assert waits[:4] == [AGAIN_S_MIN, 2 * AGAIN_S_MIN, 4 * AGAIN_S_MIN, 8 * AGAIN_S_MIN]
    assert waits[-4:] == [AGAIN_S_MAX] * 4


def test_one_that_went_on_for_as_long_as_it_was_left_alone_begins_anew() -> None:
    aside = set_aside(set_aside(None, 7, 0.0), 7, AGAIN_S_MIN + 1)
    assert aside.failures == 2
    later = aside.again_at + aside.wait_s
    assert set_aside(aside, 8, later - 0.1).failures == 3
    assert set_aside(aside, 8, later) == SetAside(8, later, 1, later + AGAIN_S_MIN)


def test_one_that_got_less_far_remembers_where_it_failed() -> None:
    """Its log can't be read at all now."""
    aside = set_aside(set_aside(None, 7, 0.0), 0, AGAIN_S_MIN)
    assert (aside.seq, aside.since, aside.failures) == (7, 0.0, 2)


@pytest.mark.parametrize("failures", [64, 100_000])
def test_no_number_of_failures_is_too_many(failures: int) -> None:
    assert set_aside(SetAside(7, 0.0, failures, 0.0), 7, 0.0).wait_s == AGAIN_S_MAX


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
    aside = set_aside(None, 7, 90.0)
    found = health_of("j", 7, JobFailure.of(FoldMismatch("another fold spoke")), aside, troubles, 120.0)
    assert (found.state, found.why, found.seq) == ("set-aside", "another fold spoke", 7)
    assert (found.since, found.again_at) == (90.0, 90.0 + AGAIN_S_MIN)


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
