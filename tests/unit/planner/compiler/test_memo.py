"""What is remembered of lists has a bound, and what is not known is looked for as long as that pays."""

import pytest

from tensorhub_planner.compiler import memo
from tensorhub_planner.compiler.memo import BoundedMemo, LookupBudget


def test_so_many_places_are_remembered_or_one_longer_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "PLACES_MAX", 4)
    known, lists = BoundedMemo[str, str](), ["a", "bbb", "cc", "dd", "eeeee", "f"]
    kept = []
    for each in lists:
        assert known.keep(each, len(each), each.upper()) == each.upper()
        kept.append([other for other in lists if known.get(other) == other.upper()])
        assert known.places == len("".join(kept[-1]))
    assert kept == [["a"], ["a", "bbb"], ["cc"], ["cc", "dd"], ["eeeee"], ["f"]]


def test_trials_are_used_up_and_earned() -> None:
    """Never more than there were first, and no debts."""
    trials = LookupBudget(10)
    for known, unknown, left in ((0, 0, 10), (0, 8, 2), (5, 1, 6), (1000, 0, 10), (0, 1000, 0), (1, 0, 1)):
        trials.count(known, unknown)
        assert [trials.pays(range(size), lambda _: False) for size in (left, left + 1)] == [True, False]


@pytest.mark.parametrize(("known", "size"), [(0, 1), (8, 16), (9, 16), (40, 100), (60, 100)])
def test_without_trials_more_than_half_of_a_sample_must_be_known(known: int, size: int) -> None:
    assert LookupBudget(0).pays(range(size), lambda each: each < known) == (known > size / 2)
