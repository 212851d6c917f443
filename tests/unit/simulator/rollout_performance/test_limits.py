"""No run is faster than its limit, and a trainer that does nothing but train is at it."""

import msgspec
import pytest
from tests.unit.simulator.rollout_performance.test_job import own, scenario

from tensorhub_simulator.rollout_performance.config.scenario import System
from tensorhub_simulator.rollout_performance.measures.limits import limit_of
from tensorhub_simulator.rollout_performance.systems.systems import job_of


@pytest.mark.parametrize("system", ["reserved", "rlboost", "streamrl", "arrival", "oracle"])
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_no_placement_is_faster_than_the_limit(system: System, steps_ahead: int) -> None:
    each = own(steps=4, steps_ahead=steps_ahead)
    if system == "reserved":
        each = scenario()
    report = job_of(each, system).run()
    assert report.tokens_per_s <= limit_of(each, report).tokens_per_s


def test_where_training_takes_longest_the_limit_is_what_it_takes() -> None:
    each = own(steps=6, steps_ahead=1)
    slow = msgspec.structs.replace(each, trainer=msgspec.structs.replace(each.trainer, token_s=0.1, publish_s=5.0))
    report = job_of(slow, "arrival").run()
    limit = limit_of(slow, report)
    assert limit.training_s == pytest.approx(0.1 * report.tokens / 6 + 5.0)
    assert limit.tokens_per_s == pytest.approx(report.tokens / 6 / limit.training_s)
    assert report.later_tokens_per_s == pytest.approx(limit.tokens_per_s, rel=0.1)


def test_what_comes_later_leaves_the_first_step_out() -> None:
    report = job_of(own(steps=4), "arrival").run()
    tokens, seconds = sum(report.step_tokens[1:]), sum(report.step_s[1:])
    assert report.later_tokens_per_s == pytest.approx(tokens / seconds)
    assert sum(report.step_tokens) == report.tokens
    alone = job_of(own(steps=1), "arrival").run()
    assert alone.later_tokens_per_s == alone.tokens_per_s
