"""Which tokens a step computes, and where: drawn attempts, caches and ends, with the invariants after each step."""

from array import array
from typing import Any, Final

from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import Sampling
from tensorhub_runner.engines.schedule import Chunk, Schedule, Sequence

STEPS_MAX: Final = 2000
CONTEXT: Final = 12


def sequence(number: int, prompt: list[int], before: int = 0, tokens_max: int = 4) -> Sequence:
    ids = array("i", prompt)
    return Sequence(
        Attempt(1, number), ids.tobytes(), len(ids), ids + array("i", [0] * before), Sampling(tokens_max, 0)
    )


class Cache:
    """What the places hold, as the model would see it: a token's keys follow from all tokens up to it."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[int, ...]] = {}

    def compute(self, chunk: Chunk) -> None:
        """Write the chunk; what was written before must be this sequence's own prefix."""
        tokens = tuple(chunk.sequence.tokens)
        for place in range(chunk.start, chunk.start + chunk.count):
            for earlier in range(place):
                assert self.kept[chunk.sequence.places[earlier]] == tokens[: earlier + 1]
            self.kept[chunk.sequence.places[place]] = tokens[: place + 1]


def run(schedule: Schedule, cache: Cache, waiting: list[Sequence], stops: set[int], slots: int) -> dict[int, int]:
    """Begin all as slots become free, make a token for each last chunk; return how often each number was computed."""
    computed = dict[int, int]()
    number = 0
    for _ in range(STEPS_MAX):
        while waiting and len(schedule) < slots:
            schedule.begin(waiting.pop(0))
        if not len(schedule):
            return computed
        chunks = schedule.plan()
        schedule.check()
        assert chunks, "a step with work makes progress"
        assert len({each.sequence.attempt for each in chunks}) == len(chunks) <= slots
        for chunk in chunks:
            cache.compute(chunk)
        for chunk in chunks:
            schedule.computed(chunk)
            made = chunk.sequence
            computed[made.attempt.n] = computed.get(made.attempt.n, 0) + chunk.count
            if chunk.is_last:
                made.tokens.append(100 + number)
                number += 1
                if made.made >= made.sampling.tokens_max or made.attempt.n in stops:
                    schedule.end(made.attempt)
        schedule.check()
    raise AssertionError("the attempts never end")


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=CONTEXT - 4)


@given(
    st.lists(st.tuples(prompts, st.integers(0, 3)), min_size=1, max_size=8),
    st.sets(st.integers(0, 7)),
    st.integers(1, 5),
    st.integers(CONTEXT, 3 * CONTEXT),
    st.integers(1, 5),
)
def test_every_attempt_ends_whatever_the_cache_is(
    given_: list[tuple[list[int], int]], stops: set[int], slots: int, cache_tokens_max: int, prefill_tokens_max: int
) -> None:
    """Nobody reads what another sequence wrote, nothing is computed twice at a time, and a step makes progress."""
    schedule = Schedule(cache_tokens_max, prefill_tokens_max)
    waiting = [sequence(number, prompt, before) for number, (prompt, before) in enumerate(given_)]
    computed = run(schedule, Cache(), waiting, stops, slots)
    assert computed.keys() == set(range(len(given_)))


def test_a_step_computes_only_so_much_of_prompts_and_a_token_of_each_other_attempt() -> None:
    schedule = Schedule(100, 4)
    for number, length in enumerate((1, 7, 6)):
        schedule.begin(sequence(number, [number] * length))

    def step() -> list[tuple[int, int, int]]:
        chunks = schedule.plan()
        for each in chunks:
            schedule.computed(each)
            if each.is_last:
                each.sequence.tokens.append(0)
        return [(each.sequence.attempt.n, each.start, each.count) for each in chunks]

    assert step() == [(0, 0, 1), (1, 0, 4)]
    assert step() == [(0, 1, 1), (1, 4, 3), (2, 0, 1)]
    assert step() == [(0, 2, 1), (1, 7, 1), (2, 1, 4)]
    assert step() == [(0, 3, 1), (1, 8, 1), (2, 5, 1)]


def test_the_last_begun_waits_when_the_cache_is_full_and_is_computed_again() -> None:
    schedule = Schedule(8, 8)
    first, second = sequence(0, [1, 1, 1], tokens_max=5), sequence(1, [2, 2], tokens_max=5)
    computed = run(schedule, Cache(), [first, second], set(), 2)
    # The last token of a response is never computed: nothing follows it.
    assert computed[0] == 3 + 4
    assert computed[1] > 2 + 4


def test_all_of_the_cache_is_used() -> None:
    """Attempts whose tokens fill the cache are computed side by side; one that has no room for all of it waits."""
    schedule = Schedule(12, 12)
    for number, length in enumerate((1, 2, 9, 1)):
        schedule.begin(sequence(number, [number] * length))
    assert [(each.sequence.attempt.n, each.count) for each in schedule.plan()] == [(0, 1), (1, 2), (2, 9)]


def test_a_groups_prompt_is_computed_once() -> None:
    schedule = Schedule(100, 3)
    group = [sequence(number, [5, 6, 7, 8, 9], tokens_max=2) for number in range(4)]
    computed = run(schedule, Cache(), [*group, sequence(4, [5, 6, 7], tokens_max=2)], set(), 8)
    assert computed == {0: 6, 1: 2, 2: 2, 3: 2, 4: 4}


def test_what_was_computed_on_other_weights_is_not_shared() -> None:
    schedule, cache = Schedule(100, 8), Cache()
    schedule.begin(sequence(0, [5, 6, 7]))
    for chunk in schedule.plan():
        cache.compute(chunk)
        schedule.computed(chunk)
    schedule.weights_changed()
    schedule.begin(sequence(1, [5, 6, 7]))
    schedule.begin(sequence(2, [5, 6, 7]))
    counts: dict[Any, int] = {each.sequence.attempt.n: each.count for each in schedule.plan()}
    # The third waits for the second, which computes the prompt anew.
    assert counts == {1: 3}
