"""Whether a surviving mutant is explained: each needs its own words, and words without a survivor are told.

And what is known from several runs: each adds what it has tested to what others have.
"""

import pytest
from tests.mutation.results import Outcome, Survivor
from tests.mutation.survivors import Verdict, added, explanations, judged, page, recorded, written

KNOWN = """
[[harmless]]
where = "catalog.rounds.want"
line = "a < b"
mutants = ["a <= b", "a > b"]
why = "They are never equal."
"""
PAGE = "# Page\n<!-- generated: counts -->\nold\n<!-- end -->\ntext\n<!-- generated: survivors -->\n<!-- end -->\n"
ROUNDS = "catalog.rounds"


def survivor(mutant: str, line: str = "a < b", where: str = "catalog.rounds.want") -> Survivor:
    return Survivor(where, line, mutant)


def outcome(*survivors: Survivor, source: str = "1", killed: int = 3) -> Outcome:
    return Outcome(source, {"killed": killed, "survived": len(survivors)}, survivors)


def test_a_mutant_is_explained_by_words_about_itself_alone() -> None:
    found = [survivor("a <= b"), survivor("a != b"), survivor("a <= b", where="catalog.rounds.end")]
    verdict = judged({ROUNDS: outcome(*found)}, {ROUNDS: "1"}, explanations(KNOWN))
    assert verdict.explained == [(found[0], "They are never equal.")]
    assert verdict.unexplained == found[1:]


def test_an_explanation_of_what_did_not_survive_is_told() -> None:
    known = explanations(KNOWN)
    both = outcome(survivor("a <= b"), survivor("a > b"))
    assert judged({ROUNDS: both}, {ROUNDS: "1"}, known).stale == []
    assert judged({ROUNDS: outcome(survivor("a <= b"))}, {ROUNDS: "1"}, known).stale == known


def test_an_explanation_of_a_module_that_nobody_has_tested_is_not_stale() -> None:
    known = explanations(KNOWN)
    assert judged({}, {ROUNDS: "1", "planner.plan": "1"}, known).stale == []
    # One whose name begins alike has been tested; and of a module that is no more nothing survives.
    assert judged({"catalog.round": outcome()}, {ROUNDS: "1", "catalog.round": "1"}, known).stale == []
    assert judged({}, {"planner.plan": "1"}, known).stale == known


def test_of_a_module_that_has_changed_since_nothing_is_asked_for() -> None:
    """What survived and is known is told all the same."""
    survived = outcome(survivor("a <= b"), survivor("a != b"))
    verdict = judged({ROUNDS: survived}, {ROUNDS: "2"}, explanations(KNOWN))
    assert verdict == Verdict([(survivor("a <= b"), "They are never equal.")], [], [])


def test_runs_of_several_modules_add_up() -> None:
    before = {"a": outcome(), "b": outcome(source="old"), "gone": outcome()}
    run = {"b": outcome(survivor("a <= b"), source="new"), "c": outcome()}
    record = added(before, run, ["a", "b", "c", "d"])
    assert record == {"a": before["a"], "b": run["b"], "c": run["c"]}
    assert recorded(written(record)) == record


def test_the_record_is_written_in_the_order_of_names() -> None:
    """So that two runs of unlike modules change unlike lines."""
    assert written({"b": outcome(), "a": outcome()}) == written({"a": outcome(), "b": outcome()})


def test_the_page_names_counts_and_survivors_and_keeps_the_rest() -> None:
    module = "tensorhub_common.catalog.handlers.rounds"
    record = {module: Outcome("1", {"killed": 3, "survived": 1, "no tests": 1, "timeout": 1}, ())}
    verdict = judged(
        {ROUNDS: outcome(survivor("a <= b"), survivor("a | b"), survivor(""))}, {ROUNDS: "1"}, explanations(KNOWN)
    )
    shown = page(PAGE, record, {module: "1"}, verdict)
    assert "| common.catalog.handlers.rounds | 6 | 3 | 0 | 1 | 2 | as it stands |" in shown
    assert "| **all** | 6 | 3 | 0 | 1 | 2 |  |" in shown
    assert "| catalog.rounds.want | `a < b` | `a <= b` | They are never equal. |" in shown
    assert "`a \\| b` | **not explained yet** |" in shown
    assert "| `a < b` | (left out) | **not explained yet** |" in shown
    assert "old" not in shown
    assert "\ntext\n" in shown
    assert page(shown, {}, {}, Verdict([], [], [])).count("<!-- end -->") == 2


def test_the_page_tells_which_modules_have_changed_since_and_which_nobody_has_tested() -> None:
    """Neither counts for nothing: the first goes on counting as it was tested, the second is in no sum."""
    now = {"same": "1", "changed": "2", "new": "1", "prose": "1"}
    record = {"same": outcome(), "changed": outcome(killed=4), "prose": Outcome("1", {}, ())}
    shown = page(PAGE, record, now, Verdict([], [], []))
    assert "| same | 3 | 3 | 0 | 0 | 0 | as it stands |" in shown
    assert "| changed | 4 | 4 | 0 | 0 | 0 | changed since |" in shown
    assert "| new | – | – | – | – | – | not yet |" in shown
    assert "prose" not in shown
    assert "| **all** | 7 | 7 | 0 | 0 | 0 |  |" in shown


def test_a_page_without_a_place_for_a_table_is_an_error() -> None:
    with pytest.raises(AssertionError, match="0 places for counts"):
        page("# Page\n", {}, {}, Verdict([], [], []))
