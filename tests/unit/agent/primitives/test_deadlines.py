"""The moments at which many things want to be looked at."""

import random

from tensorhub_agent.primitives.deadlines import DeadlineHeap


def test_the_last_word_on_a_name_counts() -> None:
    deadlines: DeadlineHeap[str] = DeadlineHeap()
    deadlines.note("a", 5.0)
    deadlines.note("b", 3.0)
    deadlines.note("b", 7.0)
    assert deadlines.earliest() == 5.0
    assert deadlines.due(6.0) == ["a"]
    assert deadlines.earliest() == 7.0
    deadlines.note("b", None)
    assert deadlines.earliest() is None
    assert deadlines.due(100.0) == []


def test_what_is_due_together_comes_in_the_order_of_coming() -> None:
    deadlines: DeadlineHeap[str] = DeadlineHeap()
    for name in ("c", "a", "b"):
        deadlines.note(name, 2.0)
    deadlines.note("c", 1.0)
    assert deadlines.due(2.0) == ["c", "a", "b"]


def test_a_name_that_is_gone_and_comes_back_stands_behind() -> None:
    deadlines: DeadlineHeap[str] = DeadlineHeap()
    deadlines.note("a", 1.0)
    deadlines.note("b", 1.0)
    deadlines.forget("a")
    deadlines.note("a", 1.0)
    assert deadlines.due(1.0) == ["b", "a"]


def test_it_says_what_asking_each_would() -> None:
    chance, deadlines, plain = random.Random(4), DeadlineHeap[int](), dict[int, float]()
    for _ in range(5000):
        name, when = chance.randrange(40), chance.choice([None, chance.randrange(100), chance.randrange(100)])
        deadlines.note(name, when)
        plain.pop(name, None)
        if when is not None:
            plain[name] = when
        assert deadlines.earliest() == min(plain.values(), default=None)
        if not chance.randrange(50):
            now = chance.randrange(30)
            due = {name for name, when in plain.items() if when <= now}
            assert set(deadlines.due(now)) == due
            plain = {name: when for name, when in plain.items() if name not in due}
