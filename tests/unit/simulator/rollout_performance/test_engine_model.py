"""The modelled engine: times by hand, and no token that a whole step has not made."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_simulator.rollout_performance.config.engine_costs import EngineCosts
from tensorhub_simulator.rollout_performance.models.engine_model import EngineModel

COSTS = EngineCosts(fixed_s=0.5, each_s=0.25, attention_s=0.0, prefill_tokens_per_s=10.0, slots=4)


def test_a_prompt_is_computed_first_and_each_step_makes_a_token_of_each_request() -> None:
    """20 tokens take 2 s; then two requests take 1 s a step until the shorter one ends, and the other 0.75 s."""
    engine = EngineModel[str](COSTS, 0.0)
    engine.begin("short", 20, 2, 0.0)
    engine.begin("long", 0, 4, 0.0)
    assert engine.advance(1.9) is None
    assert engine.next_at() == pytest.approx(4.0)
    assert engine.advance(2.9) is None
    both = engine.advance(3.0)
    assert both is not None
    assert (both.tokens, sorted(both.requests), both.ended, both.step_s) == (1, ["long", "short"], frozenset(), 1.0)
    last = engine.advance(100.0)
    assert last is not None
    assert (last.tokens, last.ended) == (1, frozenset({"short"}))
    alone = engine.advance(100.0)
    assert alone is not None
    assert (alone.tokens, alone.requests, alone.ended, alone.step_s) == (2, ("long",), frozenset({"long"}), 0.75)
    assert engine.at == pytest.approx(5.5)
    assert (engine.advance(200.0), engine.next_at()) == (None, None)


def test_a_context_makes_each_step_longer_than_the_one_before() -> None:
    """Five steps at 1 s, and a tenth for each of 10, 11, 12, 13 and 14 tokens."""
    engine = EngineModel[str](EngineCosts(1.0, 0.0, 0.1, 1e9, 4), 0.0)
    engine.begin("a", 10, 5, 0.0)
    assert engine.next_at() == pytest.approx(11.0, abs=1e-6)
    found = engine.advance(4.2)
    assert found is not None
    assert found.tokens == 2
    assert found.step_s == pytest.approx(2.0)
    assert engine.advance(6.2) is None
    assert engine.next_at() == pytest.approx(11.0, abs=1e-6)


def test_without_memory_for_the_next_step_the_latest_request_is_computed_again_later() -> None:
    """Two of 10 tokens have room for 25. After two steps of 1 s the later one goes; 8 s later it has room for its 12.

    It is computed again in 1.2 s, and makes its last eight tokens alone, at 0.75 s each.
    """
    engine = EngineModel[str](msgspec.structs.replace(COSTS, kv_tokens=25), 0.0)
    engine.begin("first", 10, 10, 0.0)
    engine.begin("later", 10, 10, 0.0)
    both = engine.advance(100.0)
    assert both is not None
    assert (both.tokens, both.requests) == (2, ("first", "later"))
    assert engine.at == pytest.approx(4.0)
    alone = engine.advance(100.0)
    assert alone is not None
    assert (alone.tokens, alone.requests, engine.preempted) == (8, ("first",), 1)
    assert engine.at == pytest.approx(4.0 + 8 * 0.75)
    last = engine.advance(100.0)
    assert last is not None
    assert (last.tokens, last.requests) == (8, ("later",))
    assert engine.at == pytest.approx(10.0 + 1.2 + 8 * 0.75)
    assert not engine.has_work


def test_what_has_no_memory_waits_behind_what_was_preempted_and_may_be_stopped() -> None:
    engine = EngineModel[str](msgspec.structs.replace(COSTS, kv_tokens=25), 0.0)
    for name, context in (("first", 10), ("later", 10), ("third", 12)):
        engine.begin(name, context, 10, 0.0)
    assert [*engine.waiting] == ["third"]
    engine.advance(100.0)
    engine.advance(100.0)
    assert ([*engine.running], [*engine.waiting]) == (["later"], ["third"])
    engine.stop("third")
    engine.stop("later")
    assert not engine.has_work
    assert engine.next_at() is None


def test_what_has_all_of_its_tokens_ends_at_once() -> None:
    engine = EngineModel[str](COSTS, 0.0)
    engine.begin("a", 0, 0, 7.0)
    found = engine.advance(7.0)
    assert found is not None
    assert (found.tokens, found.ended) == (0, frozenset({"a"}))


def test_a_paused_engine_makes_nothing() -> None:
    engine = EngineModel[str](COSTS, 0.0)
    engine.begin("a", 0, 9, 0.0)
    engine.pause(5.0)
    assert engine.advance(5.7) is None
    found = engine.advance(5.75)
    assert found is not None
    assert found.tokens == 1


@given(
    requests=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40)), min_size=1, max_size=4),
    looks=st.lists(st.floats(0.01, 20.0), max_size=12),
    attention_s=st.sampled_from([0.0, 0.001, 0.1]),
    kv_tokens=st.sampled_from([None, 91, 150]),
)
def test_looks_in_between_change_neither_tokens_nor_the_end(
    requests: list[tuple[int, int]], looks: list[float], attention_s: float, kv_tokens: int | None
) -> None:
    """However often the engine is looked at, and whatever has no memory: each request gets its tokens."""
    costs = msgspec.structs.replace(COSTS, attention_s=attention_s, kv_tokens=kv_tokens)
    ends = []
    for times in ([], looks):
        engine = EngineModel[int](costs, 0.0)
        for number, (context, left) in enumerate(requests):
            engine.begin(number, context, left, 0.0)
        made = dict.fromkeys(range(len(requests)), 0)
        now = 0.0
        for look in [*times, 10_000.0]:
            now += look
            while (found := engine.advance(now)) is not None:
                assert engine.at <= now + 1e-6
                assert kv_tokens is None or engine.contexts <= kv_tokens
                for each in found.requests:
                    made[each] += found.tokens
        assert made == {number: left for number, (_, left) in enumerate(requests)}
        assert not engine.has_work
        ends.append(engine.at)
    assert ends[0] == pytest.approx(ends[1], abs=1e-4)
