"""What the code released for RLBoost does: groups in turns, its own T_seed, and groups that go on from the shortest."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.view import FleetView, InstanceView, PlaceAction, ReleaseAction
from tensorhub_simulator.rollout_performance.comparison.cases import cases
from tensorhub_simulator.rollout_performance.config.decoding import decode
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, ScenarioError
from tensorhub_simulator.rollout_performance.job.log import MODEL
from tensorhub_simulator.rollout_performance.models.step_progress import StepProgress
from tensorhub_simulator.rollout_performance.systems.polyrl import (
    PLACED_MAX,
    GroupTurns,
    PolyrlRun,
    PolyrlTrainer,
    SeedingTime,
    WholeGroups,
)
from tensorhub_simulator.rollout_performance.systems.systems import DRIVES, job_of

WAITING = tuple(RequestId(1, number) for number in range(14))
OTHER = RequestId(9, 0)


def instance(
    name: str,
    *,
    pending: tuple[RequestId, ...] = (),
    executing: tuple[RequestId, ...] = (),
    version: int = 3,
    takes_more: bool = True,
    is_leaving: bool = False,
) -> InstanceView:
    return InstanceView(name, 8, pending, executing, takes_more, is_leaving, version)


def placed(turns: GroupTurns, view: FleetView, now: float) -> list[tuple[int, str]]:
    return [(each.request.index, each.runner) for each in turns.actions(view, now) if isinstance(each, PlaceAction)]


def test_four_groups_a_second_go_in_turns_to_the_newest_version_where_nothing_waits() -> None:
    turns = GroupTurns(2)
    fleet = (instance("busy", pending=(OTHER,)), instance("old", version=2), instance("r0"), instance("r1"))
    view = FleetView(WAITING, fleet, 1, newest=3)
    first = placed(turns, view, 5.0)
    assert first == [(0, "r0"), (1, "r0"), (2, "r1"), (3, "r1"), (4, "r0"), (5, "r0"), (6, "r1"), (7, "r1")]
    rest = FleetView(WAITING[8:], fleet, 1, newest=3)
    assert placed(turns, rest, 5.9) == []
    assert placed(turns, rest, 6.0) == [(8, "r0"), (9, "r0"), (10, "r1"), (11, "r1"), (12, "r0"), (13, "r0")]


def test_what_waits_on_an_instance_is_known_until_it_is_asked_again() -> None:
    turns = GroupTurns(2)
    before = FleetView(WAITING[:2], (instance("r0"),), 1, newest=3)
    assert placed(turns, before, 0.0) == [(0, "r0"), (1, "r0")]
    after = FleetView(WAITING[2:4], (instance("r0", pending=WAITING[:2]),), 1, newest=3)
    assert placed(turns, after, 0.5) == [(2, "r0"), (3, "r0")], "it was not asked since"
    assert placed(turns, after, 1.0) == []


def test_one_that_comes_later_goes_where_its_group_is_and_instances_that_leave_give_all_back() -> None:
    turns = GroupTurns(2)
    fleet = (
        instance("r0"),
        instance("r1", executing=(WAITING[0],)),
        instance("r2", takes_more=False, is_leaving=True, executing=(OTHER,)),
    )
    found = turns.actions(FleetView((WAITING[1],), fleet, 1, newest=3), 0.0)
    assert [each for each in found if isinstance(each, ReleaseAction)] == [
        ReleaseAction(OTHER, "r2", "its machine goes away soon")
    ]
    assert [each.runner for each in found if isinstance(each, PlaceAction)] == ["r1"]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from([2, 3])), max_size=5), st.integers(1, 5))
def test_a_group_goes_to_one_instance_and_no_second_has_more_than_four(
    fleet: list[tuple[int, bool, int]], size: int
) -> None:
    turns = GroupTurns(size)
    instances = tuple(
        instance(f"r{n}", pending=(RequestId(2, n),) if pending else (), takes_more=takes, version=version)
        for n, (pending, takes, version) in enumerate(fleet)
    )
    found = placed(turns, FleetView(WAITING, instances, 1, newest=3), 0.0)
    groups = {(index // size, runner) for index, runner in found}
    assert len({group for group, _ in groups}) == len(groups) <= PLACED_MAX
    allowed = {each.runner for each in instances if each.takes_more and each.version == 3 and not each.pending}
    assert {runner for _, runner in groups} <= allowed
    assert len(groups) == (min(PLACED_MAX, -(-len(WAITING) // size)) if allowed else 0)


def test_t_seed_follows_the_waits_in_whole_seconds_and_not_below_five() -> None:
    time = SeedingTime(150, 3)
    time.step_ended(264.9, 0.5, 200.9, 6, 100.0)
    assert time.seed_s == 150 - 64 // 3
    time.step_ended(200.0, 31.0, 200.0, 6, 100.0)
    assert time.seed_s == 129 + 31 // 3
    for _ in range(5):
        time.step_ended(1000.0, 0.0, 100.0, 6, 100.0)
    assert time.seed_s == 5


def test_what_is_remembered_is_the_t_seed_with_which_throughput_last_grew() -> None:
    """With six instances T_seed is 129 when throughput grows, and no longer with 139; with four the table has 70."""
    time = SeedingTime(150, 3)
    time.step_ended(264.0, 0.0, 200.0, 6, 100.0)
    time.step_ended(200.0, 30.0, 200.0, 6, 100.0)
    assert (time.seed_s, time.remembered.get(6)) == (139, None)
    time.step_ended(200.0, 0.0, 200.0, 6, 90.0)
    assert (time.seed_s, time.remembered[6]) == (139, 129)
    time.step_ended(200.0, 0.0, 170.0, 4, 90.0)
    assert time.seed_s == 70
    time.step_ended(200.0, 30.0, 200.0, 4, 80.0)
    time.step_ended(200.0, 30.0, 200.0, 4, 90.0)
    assert time.seed_s == 90
    time.step_ended(200.0, 0.0, 170.0, 6, 90.0)
    assert (time.seed_s, time.remembered[4]) == (129, 0.8 * 70 + 0.2 * 80)


SMALL = """
name: small
seed: 3
engine: {fixed_s: 1, each_s: 0, attention_s: 0, prefill_tokens_per_s: 100000, slots: 8}
lengths: {prompt: 8, median: 20, between: 0.6, within: 0.4, longest: 300}
trainer:
  {steps: 1, groups: 1, group_size: 2, micro_batch: 2, token_s: 0.001, publish_s: 0.5, engines: 1, seed_first_s: 20}
spot: {changes: [[0, 1]], boot_s: 1, load_s: 1}
price: {reserved: 4, spot: 1}
"""


def job(old: str = "", new: str = "") -> Scenario:
    return decode(SMALL.replace(old, new).encode(), "small")


class TwoLengths(PolyrlTrainer):
    """A group of a response of 10 tokens and one of 30."""

    def _length_of(self, step: StepProgress) -> int:
        return (10, 30)[step.submitted]


def two_lengths(scenario: Scenario) -> PolyrlRun:
    return PolyrlRun(scenario, replace(DRIVES["polyrl"], loop=TwoLengths))


def test_a_group_that_its_trainer_gives_away_goes_on_from_its_shortest_response() -> None:
    """A token takes a second. After 20 seconds the long one has 19 or 20, and goes on behind its tenth."""
    report = two_lengths(job()).run()
    assert (report.tokens, report.responses) == (40, 2)
    assert report.made - report.tokens in (9, 10)
    assert report.seeded_s == pytest.approx(21, abs=0.3)
    whole_s = report.tails[0].all_s
    assert whole_s == pytest.approx(21 + 20, abs=1.5)


def test_an_instance_that_makes_tokens_again_is_not_taken_for_one_where_something_waits() -> None:
    """It makes ten of them for ten seconds and more, from the 23rd second on."""
    run = two_lengths(job())
    seen: list[tuple[int, int]] = []

    def look() -> None:
        (instance,) = run._leader.view(MODEL).instances
        seen.append((len(instance.pending), len(instance.executing)))

    run._agenda.at(27.0, look)
    run.run()
    assert seen == [(0, 1)]


def test_the_trainer_s_engines_have_their_whole_time_and_groups_are_trained_whole() -> None:
    long = job("seed_first_s: 20", "seed_first_s: 60")
    report = two_lengths(long).run()
    assert (report.made, report.tokens) == (40, 40)
    assert report.tails[0].all_s < 35
    assert report.seconds == pytest.approx(61 + 40 * 0.001 + 0.5, abs=0.3)
    step = WholeGroups(long.trainer)
    step.open = {*WAITING[:4]}
    for number, at in ((0, 1.0), (2, 2.0), (3, 3.0)):
        step.ended(WAITING[number], 7, at)
    assert [of.index for of, _ in step.ready] == [2, 3]


def test_it_trains_what_others_train_with_machines_that_come_and_go() -> None:
    small = job("changes: [[0, 1]]", "changes: [[0, 2], [15, 1], [20, 3], [40, 1]]")
    many = decode(
        SMALL.replace("steps: 1, groups: 1", "steps: 3, groups: 4")
        .replace("changes: [[0, 1]]", "changes: [[0, 2], [15, 1], [20, 3], [40, 1]]")
        .encode(),
        "many",
    )
    for each in (small, many):
        found, other = job_of(each, "polyrl").run(), job_of(each, "rlboost").run()
        assert (found.tokens, found.responses) == (other.tokens, other.responses)


def test_a_trainer_that_only_trains_is_refused() -> None:
    own = job("engines: 1", "engines: 1, seeds: false")
    with pytest.raises(ScenarioError, match="polyrl is of a trainer whose GPUs generate first and then train"):
        list(cases(own, ["rlboost", "polyrl"], 1, lambda each: each, alone=True))
