"""When the planner is asked, and what its silence and its refusals lead to."""

from tensorhub_agent.asking import NO_ANSWER, PLAN_AGAIN_S, PLAN_S_MAX, Asking
from tensorhub_agent.trust import Trust
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.wire.transfer import Refusal, SourceId

LOST_S = 1.0
NOBODY = Refusal(error=VersionUnavailable.__name__, reason="nobody has it")
SILENCE = Refusal(error=NO_ANSWER, reason="no planner answered")
SOURCE = SourceId("agent", 1, "trainer", 0)


def test_a_plan_is_wanted_at_once_and_only_one_question_is_open() -> None:
    asking = Asking(5.0)
    assert (asking.at, asking.deadline()) == (5.0, 5.0)
    assert asking.want(5.0)
    asking.asked(5.0)
    assert (asking.count, asking.waiting) == (1, True)
    assert not asking.want(6.0)


def test_an_answer_is_overdue_at_its_bound() -> None:
    asking = Asking(5.0)
    assert not asking.is_silent(100.0), "nothing was asked"
    asking.asked(7.0)
    assert asking.deadline() == 7.0 + PLAN_S_MAX
    assert not asking.is_silent(7.0 + PLAN_S_MAX - 0.01)
    assert asking.is_silent(7.0 + PLAN_S_MAX)


def test_what_is_wanted_again_waits_for_its_time() -> None:
    asking = Asking(0.0)
    asking.asked(0.0)
    asking.waiting = False
    assert asking.refused(NOBODY, Trust(), LOST_S, 1.0)
    assert asking.deadline() == 1.0 + PLAN_AGAIN_S
    assert not asking.want(1.0)
    assert asking.want(1.0 + PLAN_AGAIN_S)


def test_what_is_not_wanted_yet_is_wanted_from_now_on() -> None:
    asking = Asking(0.0)
    asking.asked(0.0)
    asking.waiting = False
    assert asking.deadline() is None
    assert asking.want(3.0)
    assert asking.at == 3.0


def test_silence_is_asked_again_for_ever_and_says_nothing_of_sources() -> None:
    asking, trust = Asking(0.0), Trust()
    trust.suspect(SOURCE)
    for second in range(100):
        assert asking.refused(SILENCE, trust, LOST_S, float(second))
        assert asking.at == second + PLAN_AGAIN_S
    assert trust.left_out() == (SOURCE,)


def test_suspects_are_forgiven_and_asked_for_at_once() -> None:
    asking, trust = Asking(0.0), Trust()
    trust.suspect(SOURCE)
    assert asking.refused(NOBODY, trust, 0.0, 4.0)
    assert (asking.at, trust.left_out()) == (4.0, ())


def test_it_ends_when_there_was_nobody_for_so_long() -> None:
    asking = Asking(0.0)
    assert asking.refused(NOBODY, Trust(), LOST_S, 10.0)
    assert asking.refused(NOBODY, Trust(), LOST_S, 10.9)
    assert not asking.refused(NOBODY, Trust(), LOST_S, 11.0)


def test_a_plan_in_between_begins_the_time_anew() -> None:
    asking = Asking(0.0)
    assert asking.refused(NOBODY, Trust(), LOST_S, 10.0)
    asking.planned()
    assert asking.refused(NOBODY, Trust(), LOST_S, 11.0)
    assert asking.refused(NOBODY, Trust(), LOST_S, 11.9)
    assert not asking.refused(NOBODY, Trust(), LOST_S, 12.0)
