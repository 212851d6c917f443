"""What `make mutants` reports: every survivor of a module as it is now needs an explanation of its own."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.mutation import results, selection
from tests.mutation.results import Outcome, Survivor, doubtful, outcomes, untested
from tests.mutation.survivors import Verdict, explanations, judged
from tests.mutation.typed import lacks_assertion

KILLED, SURVIVED, REFUSED, HUNG = 1, 0, 37, 36
CODES: dict[str, dict[str, int | None]] = {
    "whole": {f"whole.x_f__mutmut_{code}": code for code in (KILLED, SURVIVED, REFUSED, results.ASSERTED)},
    "begun": {"begun.x_f__mutmut_1": KILLED, "begun.x_f__mutmut_2": None, "begun.x_f__mutmut_3": HUNG},
}
KNOWN = explanations('[[harmless]]\nwhere = "m.f"\nline = "a < b"\nmutants = ["a <= b", "a > b"]\nwhy = "So."')


def survivor(mutant: str, where: str = "m.f") -> Survivor:
    return Survivor(where, "a < b", mutant)


def outcome(*survivors: Survivor) -> Outcome:
    return Outcome(Counter(killed=3, survived=len(survivors)), survivors)


def test_a_survivor_is_explained_by_words_about_itself_alone() -> None:
    found = [survivor("a <= b"), survivor("a != b"), survivor("a <= b", where="m.g")]
    verdict = judged({"m": outcome(*found)}, ["m"], KNOWN)
    assert (verdict.unexplained, verdict.stale) == (found[1:], KNOWN), "one of its two mutants was noticed"
    assert judged({"m": outcome(survivor("a <= b"), survivor("a > b"))}, ["m"], KNOWN) == Verdict([], [])
    assert judged({}, ["m"], KNOWN) == Verdict([], []), "it was not tested"
    assert judged({}, ["other"], KNOWN).stale == KNOWN, "a module that is no more has no survivor"


def test_a_module_is_told_once_all_of_its_mutants_were_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "walk_mutatable_files", lambda: [Path(f"{module}.py") for module in CODES])
    monkeypatch.setattr(results, "_data", lambda path: SimpleNamespace(exit_code_by_key=CODES[path.stem]))
    monkeypatch.setattr(results, "_survivor", lambda _path, name: Survivor(name, "a", "b"))
    counts = Counter({"caught by type check": 1, "killed": 1, "survived": 1})
    assert outcomes(tmp_path) == {"whole": Outcome(counts, (Survivor("whole.x_f__mutmut_0", "a", "b"),))}
    assert doubtful(tmp_path) == ["begun.x_f__mutmut_3", "whole.x_f__mutmut_0"]
    assert untested(tmp_path) == ["begun.x_f__mutmut_2"]


def test_what_lacks_more_than_an_assertion_is_tested() -> None:
    original = "def x_f__mutmut_orig(a, b):\n    return [c < d for c, d in zip(a, b, strict=True)]"
    changes = {"strict=True": "strict=False", ", strict=True": "", "c < d": "c <= d", "(a, b, strict": "(a, strict"}
    names = [f"x_f__mutmut_{number}" for number in range(len(changes))]
    texts = {
        name: original.replace(*change).replace("x_f__mutmut_orig", name)
        for name, change in zip(names, changes.items(), strict=True)
    }
    assert lacks_assertion({"x_f__mutmut_orig": original, **texts}) == set(names[:2])


def test_tests_that_go_outside_are_left_out_whatever_they_are_called(tmp_path: Path) -> None:
    test = tmp_path / "test_any.py"
    for line, outside in {
        "import threading": {"threading"},
        "from tensorhub_agent.storage.segments import Segment": {"tensorhub_agent.storage.segments.Segment"},
        "from tests.kit.hubs import running_hub": {"tensorhub.local.hub.LocalHub"},
        "from tensorhub_common.catalog import state": set[str](),
    }.items():
        test.write_text(line)
        assert selection.goes_outside(test) >= outside
        assert bool(selection.goes_outside(test)) == bool(outside)
