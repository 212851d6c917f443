"""When the planner is asked, and what its silence and its refusals lead to."""

from tensorhub_agent.transfer.exclusions import Exclusions
from tensorhub_agent.transfer.plan_requests import NO_ANSWER, PLAN_AGAIN_S, PLAN_AGAIN_S_MAX, PLAN_S_MAX, PlanRequests
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.protocol.plans import Refusal, SourceId

LOST_S = 1.0
NOBODY = Refusal(error=VersionUnavailable.__name__, reason="nobody has it")
SILENCE = Refusal(error=NO_ANSWER, reason="no planner answered")
SOURCE = SourceId("agent", 1, "trainer", 0)


def test_a_plan_is_wanted_at_once_and_only_one_question_is_open() -> None:
    asking = PlanRequests(5.0)
    assert (asking.at, asking.deadline()) == (5.0, 5.0)
    assert asking.want(5.0)
    asking.asked(5.0)
    assert (asking.count, asking.waiting) == (1, True)
    assert not asking.want(6.0)


def test_an_answer_is_overdue_at_its_bound() -> None:
    asking = PlanRequests(5.0)
    assert not asking.is_silent(100.0), "nothing was asked"
    asking.asked(7.0)
    assert asking.deadline() == 7.0 + PLAN_S_MAX
    assert not asking.is_silent(7.0 + PLAN_S_MAX - 0.01)
    assert asking.is_silent(7.0 + PLAN_S_MAX)


def test_what_is_wanted_again_waits_for_its_time() -> None:
    asking = PlanRequests(0.0)
    asking.asked(0.0)
    asking.waiting = False
    assert asking.refused(NOBODY, Exclusions(), LOST_S, 1.0)
    assert asking.deadline() == 1.0 + PLAN_AGAIN_S
    assert not asking.want(1.0)
    assert asking.want(1.0 + PLAN_AGAIN_S)


def test_what_is_not_wanted_yet_is_wanted_from_now_on() -> None:
    asking = PlanRequests(0.0)
    asking.asked(0.0)
    asking.waiting = False
    assert asking.deadline() is None
    assert asking.want(3.0)
    assert asking.at == 3.0


def test_silence_is_asked_again_for_ever_and_says_nothing_of_sources() -> None:
    asking, trust = PlanRequests(0.0), Exclusions()
    trust.exclude_for_now(SOURCE)
    for second in range(100):
        assert asking.refused(SILENCE, trust, LOST_S, float(second))
        assert asking.at == second + PLAN_AGAIN_S
    assert trust.left_out() == (SOURCE,)


def test_suspects_are_forgiven_and_asked_for_at_once() -> None:
    asking, trust = PlanRequests(0.0), Exclusions()
    trust.exclude_for_now(SOURCE)
    assert asking.refused(NOBODY, trust, 0.0, 4.0)
    assert (asking.at, trust.left_out()) == (4.0, ())


def test_it_ends_when_there_was_nobody_for_so_long() -> None:
    asking = PlanRequests(0.0)
    assert asking.refused(NOBODY, Exclusions(), LOST_S, 10.0)
    assert asking.refused(NOBODY, Exclusions(), LOST_S, 10.9)
    assert not asking.refused(NOBODY, Exclusions(), LOST_S, 11.0)


def test_a_plan_in_between_begins_the_time_anew() -> None:
    asking = PlanRequests(0.0)
    assert asking.refused(NOBODY, Exclusions(), LOST_S, 10.0)
    asking.planned()
    assert asking.refused(NOBODY, Exclusions(), LOST_S, 11.0)
    assert asking.refused(NOBODY, Exclusions(), LOST_S, 11.9)
    assert not asking.refused(NOBODY, Exclusions(), LOST_S, 12.0)


HELD = Refusal(error=VersionUnavailable.__name__, reason="its holder failed this read", is_held=True)
GONE = Refusal(error=VersionUnavailable.__name__, reason="nobody has it", is_held=False)


def test_while_the_log_counts_a_holder_it_is_asked_again_for_ever_with_growing_pauses() -> None:
    asking, trust, pauses = PlanRequests(0.0), Exclusions(), list[float]()
    for second in range(1000):
        trust.fail(SOURCE)
        assert asking.refused(HELD, trust, 0.0, float(second))
        assert trust.left_out() == (), "the holder that failed is asked again"
        assert asking.at is not None
        pauses.append(round(asking.at - second, 3))
    assert pauses[:5] == [0.1, 0.2, 0.4, 0.8, PLAN_AGAIN_S_MAX]
    assert set(pauses[5:]) == {PLAN_AGAIN_S_MAX}


def test_pauses_are_short_again_once_bytes_have_come() -> None:
    asking, trust = PlanRequests(0.0), Exclusions()
    for _ in range(5):
        asking.refused(HELD, trust, 0.0, 1.0)
    asking.progressed()
    asking.refused(HELD, trust, 0.0, 1.0)
    assert asking.at == 1.0 + PLAN_AGAIN_S


def test_once_the_log_counts_none_it_ends_at_once() -> None:
    asking, trust = PlanRequests(0.0), Exclusions()
    trust.exclude_for_now(SOURCE)
    assert not asking.refused(GONE, trust, LOST_S, 1.0)


def test_a_holder_whose_bytes_were_wrong_is_not_waited_for() -> None:
    asking, trust = PlanRequests(0.0), Exclusions()
    trust.exclude_for_good(SOURCE)
    assert not asking.refused(HELD, trust, LOST_S, 1.0)
    assert trust.left_out() == (SOURCE,)
    trust.fail(SourceId("agent", 1, "another", 0))
    assert asking.refused(HELD, trust, LOST_S, 1.0), "another one may come back"
    assert trust.left_out() == (SOURCE,)


def test_a_question_that_is_kept_back_has_its_time_from_when_it_goes_out() -> None:
    asking = PlanRequests(0.0)
    asking.asked(1.0)
    asking.kept_back()
    assert asking.deadline() is None
    assert not asking.is_silent(1e6)
    asking.goes_out(50.0)
    assert asking.deadline() == 50.0 + PLAN_S_MAX
    assert asking.is_silent(50.0 + PLAN_S_MAX)
