"""Whether to look for what is known: as long as it has paid, or where a sample says so."""

from tensorhub_planner.compiler.memo import SAMPLE, LookupBudget


def nothing(_: int) -> bool:
    return False


def test_trials_are_used_up_and_earned() -> None:
    trials = LookupBudget(10)
    assert trials.pays(range(10), nothing)
    assert not trials.pays(range(11), nothing)
    trials.count(known=0, unknown=8)
    assert trials.pays(range(2), nothing)
    assert not trials.pays(range(3), nothing)
    trials.count(known=5, unknown=1)
    assert trials.pays(range(6), nothing)
    assert not trials.pays(range(7), nothing)
    trials.count(known=1_000, unknown=0)
    assert not trials.pays(range(11), nothing), "no more than it began with"
    trials.count(known=0, unknown=1_000)
    trials.count(known=1, unknown=0)
    assert trials.pays(range(1), nothing), "and no debts"


def test_without_trials_a_sample_of_all_decides() -> None:
    trials = LookupBudget(0)
    assert trials.pays((), nothing)
    for size in (1, 5, SAMPLE, SAMPLE + 1, 1_000):
        assert trials.pays(range(size), lambda _: True)
        assert not trials.pays(range(size), nothing)
    looked: list[int] = []

    def look(each: int) -> bool:
        looked.append(each)
        return False

    assert not trials.pays(range(1_000), look)
    assert len(looked) <= SAMPLE
    assert looked[-1] > 900, "the sample is of all"
    assert trials.pays(range(100), lambda each: each >= 40)
    assert not trials.pays(range(100), lambda each: each >= 60)
