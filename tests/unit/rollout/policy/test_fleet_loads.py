"""What instances have to do: assessed a few requests at a look, with what is placed and what is done meanwhile."""

import math

import msgspec
import pytest

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.finish_times import LEFT_MIN, Work
from tensorhub_rollout.policy.fleet_loads import COUNTED_S, AssessmentLimits, FleetLoads
from tensorhub_rollout.policy.lengths import Knowledge, LengthEstimate
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.request_facts import Facts, RequestFacts
from tensorhub_rollout.policy.view import FleetView, InstanceView

STEPS = StepModel(0.01, 0.001, 0.0)
LIMITS = AssessmentLimits(assessed_s=1.0, assessed_max=4, new_max=8)
LENGTH = 100


def of(index: int) -> RequestId:
    return RequestId(3, index)


class Fleet:
    """Loads over instances of which each request has `LENGTH` tokens to come."""

    def __init__(self, limits: AssessmentLimits = LIMITS) -> None:
        self.loads, self.asked = FleetLoads(limits), list[int]()
        self.steps: dict[str, StepModel] = {"a": STEPS, "b": STEPS}

    def _of(self, request: RequestId) -> RequestFacts:
        self.asked.append(request.index)
        return RequestFacts(LengthEstimate(math.log(LENGTH), 1e-6, 0, Knowledge.JOB))

    @property
    def facts(self) -> Facts:
        return Facts(self.steps, self._of)

    def look(self, now: float, **executing: range) -> list[int]:
        """Look, and return which requests were looked at."""
        self.asked.clear()
        there = tuple(InstanceView(name, 64, (), tuple(map(of, each))) for name, each in executing.items())
        self.loads.look(FleetView((), there, 1), self.facts, now)
        return [*self.asked]

    def finish_s(self, runner: str) -> float:
        """Return when an instance is done."""
        finish, _ = self.loads.finish_and_busy_s((runner,))
        return finish[0][0]


def expected_s(requests: int) -> float:
    return LENGTH * (STEPS.fixed_s + requests * STEPS.each_s)


def test_a_leader_that_begins_looks_at_more_and_then_at_the_oldest_first_a_few_at_a_look() -> None:
    fleet = Fleet()
    assert fleet.look(0.0, a=range(6), b=range(10, 16)) == [0, 1, 2, 3, 4, 5, 10, 11]
    assert fleet.look(0.02, a=range(6), b=range(10, 16)) == [12, 13, 14, 15]
    assert fleet.finish_s("b") == pytest.approx(expected_s(6))
    assert fleet.look(0.5, a=range(6), b=range(10, 16)) == [], "all were looked at within the last second"
    assert fleet.look(1.1, a=range(6), b=range(10, 16)) == [0, 1, 2, 3]
    assert fleet.look(1.2, a=range(6), b=range(10, 16)) == [4, 5, 10, 11]


def test_what_is_not_looked_at_again_is_done_as_it_was_predicted() -> None:
    fleet = Fleet(msgspec.structs.replace(LIMITS, assessed_s=1e9))
    fleet.look(0.0, a=range(6))
    assert fleet.finish_s("a") == pytest.approx(expected_s(6))
    fleet.look(0.5, a=range(6))
    assert fleet.finish_s("a") == pytest.approx(expected_s(6) - 0.5, rel=1e-4)
    assert fleet.loads.load("a").finish_s(STEPS) == pytest.approx(expected_s(6) - 0.5, rel=1e-4)
    # However late the next look comes: what was not looked at is not done.
    fleet.look(0.9 * expected_s(6), a=range(6))
    fleet.loads.add("a", Work(1.0, 1.0, 1.0, 0.0), is_due=False)
    assert fleet.loads.load("a").finish_s(STEPS) == pytest.approx(LEFT_MIN * expected_s(6) + STEPS.each_s, rel=1e-4)


def test_how_many_requests_instances_have_is_counted_now_and_then() -> None:
    fleet, executing = Fleet(), {of(0): None}
    view = FleetView((), (InstanceView("a", 64, (), executing),), 1)
    beside = []
    for at in range(3):
        fleet.loads.look(view, fleet.facts, 1.0 + at * COUNTED_S / 2)
        beside.append(fleet.loads.beside)
        executing[of(1 + at)] = None
    assert beside == [1, 1, 3]


def test_what_is_placed_while_an_instance_is_assessed_counts_once() -> None:
    fleet = Fleet()
    for now in (0.0, 0.02):
        fleet.look(now, a=range(12))
    assert fleet.look(1.5, a=range(12)) == [0, 1, 2, 3]
    fleet.loads.add("a", Work(LENGTH, LENGTH**2, LENGTH, 0.0), is_due=False)
    fleet.look(1.51, a=range(13))
    fleet.look(1.52, a=range(13))
    found_s = fleet.finish_s("a")
    assert found_s == pytest.approx(expected_s(13)), "12 from the view, one that was placed since"


def test_a_request_that_goes_while_its_instance_is_assessed_is_not_asked_for() -> None:
    fleet = Fleet()
    assert fleet.look(0.0, a=range(12)) == [*range(8)]
    assert fleet.look(0.02, a=range(9)) == [8]


def test_an_instance_that_goes_while_it_is_assessed_is_forgotten() -> None:
    fleet = Fleet()
    fleet.look(0.0, a=range(12), b=range(20, 22))
    assert fleet.look(0.02, b=range(20, 22)) == [20, 21]
    assert [*fleet.loads.loads()] == ["b"]


def test_once_steps_are_measured_all_is_assessed_anew() -> None:
    fleet = Fleet()
    fleet.steps = {}
    fleet.look(0.0, a=range(6))
    assert not fleet.loads.is_measured
    fleet.steps = {"a": STEPS}
    assert fleet.look(0.02, a=range(6)) == [*range(6)]
    assert fleet.finish_s("a") == pytest.approx(expected_s(6))


def test_an_instance_may_be_assessed_whole_once_its_assessment_is_old() -> None:
    fleet = Fleet()
    for now in (0.0, 0.02):
        fleet.look(now, a=range(12), b=range(20, 22))
    assert not fleet.loads.is_old("a")
    # Of a four requests are looked at, and the whole of it before the other eight.
    fleet.look(1.5, a=range(5), b=range(20, 22))
    assert fleet.loads.is_old("a")
    fleet.loads.assess("a", fleet.facts)
    assert fleet.finish_s("a") == pytest.approx(expected_s(5))
    assert not fleet.loads.is_old("a")
    assert fleet.look(1.6, a=range(5), b=range(20, 22)) == [20, 21]


def test_nothing_is_known_of_what_the_last_instance_had_once_its_machine_goes_away() -> None:
    fleet = Fleet()
    fleet.look(0.0, a=range(6))
    assert fleet.loads.loads().keys() == {"a"}
    going = InstanceView("a", 64, (), tuple(map(of, range(6))), is_leaving=True)
    fleet.loads.look(FleetView((), (going,), 1), fleet.facts, 0.5)
    assert fleet.loads.loads() == {}
    assert fleet.loads.contexts() == {}
