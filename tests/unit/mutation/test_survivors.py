"""Whether a surviving mutant is explained: each needs its own words, and words without a survivor are told."""

from collections import Counter

import pytest
from tests.mutation.results import Survivor
from tests.mutation.survivors import Verdict, explanations, judged, page

KNOWN = """
[[harmless]]
where = "catalog.rounds.want"
line = "a < b"
mutants = ["a <= b", "a > b"]
why = "They are never equal."
"""
PAGE = "# Page\n<!-- generated: counts -->\nold\n<!-- end -->\ntext\n<!-- generated: survivors -->\n<!-- end -->\n"


def survivor(mutant: str, line: str = "a < b", where: str = "catalog.rounds.want") -> Survivor:
    return Survivor(f"{where}__mutmut_1", where, line, mutant)


def test_a_mutant_is_explained_by_words_about_itself_alone() -> None:
    found = [survivor("a <= b"), survivor("a != b"), survivor("a <= b", where="catalog.rounds.end")]
    verdict = judged(found, explanations(KNOWN))
    assert verdict.explained == [(found[0], "They are never equal.")]
    assert verdict.unexplained == found[1:]


def test_an_explanation_of_what_did_not_survive_is_told() -> None:
    known = explanations(KNOWN)
    assert judged([survivor("a <= b"), survivor("a > b")], known).stale == []
    assert judged([survivor("a <= b")], known).stale == known


def test_the_page_names_counts_and_survivors_and_keeps_the_rest() -> None:
    verdict = judged([survivor("a <= b"), survivor("a | b"), survivor("")], explanations(KNOWN))
    written = page(PAGE, {"tensorhub_common.catalog.rounds": Counter(killed=3, survived=2, timeout=1)}, verdict)
    assert "| common.catalog.rounds | 6 | 3 | 0 | 1 | 2 | 0 |" in written
    assert "| **all** | 6 | 3 | 0 | 1 | 2 | 0 |" in written
    assert "| catalog.rounds.want | `a < b` | `a <= b` | They are never equal. |" in written
    assert "`a \\| b` | **not explained yet** |" in written
    assert "| `a < b` | (left out) | **not explained yet** |" in written
    assert "old" not in written
    assert "\ntext\n" in written
    assert page(written, {}, Verdict([], [], [])).count("<!-- end -->") == 2


def test_a_page_without_a_place_for_a_table_is_an_error() -> None:
    with pytest.raises(AssertionError, match="0 places for counts"):
        page("# Page\n", {}, Verdict([], [], []))
