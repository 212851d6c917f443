"""Laminar: an instance takes new weights once its batch has ended, and what is left of batches shares few instances."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.view import FleetView, InstanceView, MoveAction, PlaceAction, WantAction
from tensorhub_simulator.rollout_performance.comparison.cases import cases, run
from tensorhub_simulator.rollout_performance.config.decoding import decode
from tensorhub_simulator.rollout_performance.config.scenario import Scenario, ScenarioError
from tensorhub_simulator.rollout_performance.systems.laminar import REPACK_S, Load, Repacking, best_fit
from tensorhub_simulator.rollout_performance.systems.systems import job_of

WAITING = tuple(RequestId(1, number) for number in range(10))


def some(count: int, submission: int) -> tuple[RequestId, ...]:
    return tuple(RequestId(submission, number) for number in range(count))


def load(name: str, context: int, count: int = 1) -> Load:
    return Load(name, some(count, int(name[1:])), context)


def test_the_emptiest_goes_to_where_it_fills_most_and_what_got_something_stays() -> None:
    """a3 has 30, a2 40, a1 50, a0 90 of 100: a3 fits best beside a1 (80), and a2 nowhere (a1 has 80 by then)."""
    loads = [load("a0", 90), load("a1", 50), load("a2", 40), load("a3", 30)]
    assert best_fit(loads, 100, 8) == [(loads[3], "a1")]
    assert best_fit(loads, 1000, 8) == [(loads[3], "a0"), (loads[2], "a0"), (loads[1], "a0")]


def test_neither_memory_nor_the_batch_size_is_exceeded() -> None:
    loads = [load("a0", 50, 3), load("a1", 50, 3), load("a2", 10, 2)]
    assert best_fit(loads, 100, 5) == [(loads[2], "a1")]
    assert best_fit(loads, 59, 8) == []
    assert best_fit(loads, 1000, 4) == []
    assert best_fit(loads[:1], 1000, 4) == []


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 6)), max_size=8), st.integers(60, 200), st.integers(6, 20))
def test_what_is_freed_gives_all_to_one_that_stays_and_no_limit_is_exceeded(
    sizes: list[tuple[int, int]], kv_tokens: int, requests_max: int
) -> None:
    loads = [load(f"a{number}", context, count) for number, (context, count) in enumerate(sizes)]
    moved = best_fit(loads, kv_tokens, requests_max)
    freed, targets = {source.runner for source, _ in moved}, {target for _, target in moved}
    assert len(freed) == len(moved)
    assert not freed & targets
    for target in targets:
        there = [each for each in loads if each.runner == target]
        there += [source for source, to in moved if to == target]
        assert sum(each.context for each in there) <= kv_tokens
        assert sum(len(each.requests) for each in there) <= requests_max
    left = [each for each in loads if each.runner not in freed | targets]
    assert all(
        one.context + other.context > kv_tokens or len(one.requests) + len(other.requests) > requests_max
        for one in left
        for other in left
        if one is not other
    ), "two that fit were left apart"


def instance(name: str, executing: tuple[RequestId, ...] = (), version: int = 1) -> InstanceView:
    return InstanceView(name, 8, (), executing, version=version)


def test_a_batch_is_filled_and_an_instance_whose_relay_has_a_newer_version_gets_nothing_until_it_has_it() -> None:
    repacking = Repacking(4, 8, math.inf)

    def told(view: FleetView, relays: dict[str, int]) -> list[object]:
        found = repacking.actions(view, relays, lambda _: 10, 0.0)
        return [
            (each.request.index, each.runner) if isinstance(each, PlaceAction) else each.runner
            for each in found
            if isinstance(each, PlaceAction | WantAction)
        ]

    first = told(FleetView(WAITING[:6], (instance("r0"), instance("r1")), 1, newest=1), {})
    assert first == [(0, "r0"), (1, "r0"), (2, "r0"), (3, "r0"), (4, "r1"), (5, "r1")]
    busy = instance("r0", WAITING[:1]), instance("r1", WAITING[4:6])
    assert told(FleetView(WAITING[6:], busy, 1, newest=1), {}) == [(6, "r1"), (7, "r1")], "r0 had its four"
    relays = {"r0": 2, "r1": 2}
    assert told(FleetView(WAITING[8:], busy, 1, newest=2), relays) == []
    ended = instance("r0"), instance("r1", WAITING[4:6])
    assert told(FleetView(WAITING[8:], ended, 1, newest=2), relays) == ["r0"]
    assert told(FleetView(WAITING[8:], ended, 1, newest=2), relays) == [], "it is told once"
    newer = instance("r0", version=2), instance("r1", WAITING[4:6])
    assert told(FleetView(WAITING[8:], newer, 1, newest=2), relays) == [(8, "r0"), (9, "r0")]


def test_what_is_left_is_packed_each_five_seconds_by_version_once_caches_empty() -> None:
    """r0 and r1 are of one version, r2 of another. They have twice as much when they are first looked at."""
    repacking = Repacking(4, 8, 1000.0)
    context = 20

    def moves(now: float, newest: int = 2) -> list[tuple[str, str]]:
        fleet = instance("r0", some(2, 4)), instance("r1", some(1, 5)), instance("r2", some(1, 6), version=2)
        view = FleetView((), fleet, 1, newest=newest)
        found = repacking.actions(view, {}, lambda _: context, now)
        return [(each.source, each.target) for each in found if isinstance(each, MoveAction)]

    assert moves(0.0) == []
    context = 10
    assert moves(REPACK_S - 0.1) == []
    assert moves(REPACK_S - 0.1, newest=3) == [("r1", "r0")], "a version was published"
    assert moves(2 * REPACK_S, newest=3) == [("r1", "r0")]
    context = 30
    assert moves(3 * REPACK_S, newest=3) == [], "they have more than ever"


STREAM = """
name: stream
seed: 3
engine: {fixed_s: 0.05, each_s: 0.001, attention_s: 0, prefill_tokens_per_s: 4000, slots: 16}
lengths: {prompt: 8, median: 60, between: 0.6, within: 0.4, longest: 300}
trainer:
  {steps: 10, groups: 4, group_size: 4, micro_batch: 4, token_s: 0.0005, publish_s: 0.1, engines: 1, seeds: false,
   streams: true, steps_ahead: 2, repack: {parts: 1, requests: 8}}
spot: {changes: [[0, 4]], boot_s: 0, load_s: 0.5}
price: {reserved: 4, spot: 1}
"""


def stream(old: str = "", new: str = "") -> Scenario:
    return decode(STREAM.replace(old, new).encode(), "stream")


@pytest.mark.parametrize("steps", ["streams: true, steps_ahead: 2", "steps_ahead: 1"])
def test_each_response_is_of_one_version_and_nothing_is_computed_anew_for_an_update(steps: str) -> None:
    scenario = stream("streams: true, steps_ahead: 2", steps)
    found, other = job_of(scenario, "laminar").run(), job_of(scenario, "arrival").run()
    assert found.responses == other.responses == 10 * 4 * 4
    assert found.ages.mixed == 0.0 < other.ages.mixed
    assert 0.0 < found.ages.tokens <= found.ages.oldest


@pytest.mark.long
def test_packing_what_is_left_is_worth_something_where_responses_take_long() -> None:
    """With no more than one request for each that gets others' nothing moves."""
    slow = STREAM.replace("fixed_s: 0.05", "fixed_s: 0.5")
    packed, alone = (
        job_of(decode(slow.replace("requests: 8", f"requests: {count}").encode(), "slow"), "laminar").run()
        for count in (8, 1)
    )
    assert packed.tokens_per_s > 1.05 * alone.tokens_per_s


def test_an_instance_whose_machine_goes_as_its_batch_ends_takes_no_version_and_its_responses_are_made_elsewhere() -> (
    None
):
    """The leader finds it lost half a second later, and looks meanwhile."""
    found = job_of(stream("[[0, 4]]", "[[0, 4], [5.5, 2]]"), "laminar").run()
    assert found.responses == 10 * 4 * 4
    assert found.lost


def test_a_trainer_without_any_step_ahead_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"with older weights: set trainer\.seeds to false"):
        list(cases(stream("streams: true, steps_ahead: 2", "steps_ahead: 0"), ["laminar"], 1, _same, alone=True))
    case = next(cases(stream(), ["laminar"], 1, _same, alone=True))
    assert run(case).system == "laminar"


def test_parts_and_requests_have_limits() -> None:
    for old, new, said in (
        ("parts: 1", "parts: 0", "trainer.repack.parts is 0, and must be from 0.01 to 8"),
        ("requests: 8", "requests: -1", "trainer.repack.requests is -1, and must be from 1 to 4096"),
        ("requests: 8", "requests: 0", "trainer.repack.requests is 0, and must be from 1 to 4096"),
    ):
        with pytest.raises(ScenarioError, match=said):
            stream(old, new)


def _same(scenario: Scenario) -> Scenario:
    return scenario
