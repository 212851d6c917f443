"""What is told of a run: whole modules alone, with the text that their mutants were made of."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.mutation import results
from tests.mutation.results import Outcome, Survivor, digests, doubtful, note_sources, outcomes, untested

KILLED, SURVIVED, REFUSED, HUNG = 1, 0, 37, 36
CODES_OF_WHOLE = (KILLED, SURVIVED, REFUSED, results.ASSERTED)
CODES: dict[str, dict[str, int | None]] = {
    "whole": {f"whole.x_f__mutmut_{number}": code for number, code in enumerate(CODES_OF_WHOLE, start=1)},
    "begun": {"begun.x_f__mutmut_1": KILLED, "begun.x_f__mutmut_2": None, "begun.x_f__mutmut_3": HUNG},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which mutmut has worked: one module is done, another one has begun."""
    for module in CODES:
        (tmp_path / f"{module}.py").write_text("def f() -> None: ...\n")
    monkeypatch.setattr(results, "walk_mutatable_files", lambda: [Path(f"{module}.py") for module in CODES])
    monkeypatch.setattr(results, "_data", lambda path: SimpleNamespace(exit_code_by_key=CODES[path.stem]))
    monkeypatch.setattr(results, "_survivor", lambda _path, name: Survivor(name, "a", "b"))
    return tmp_path


def test_a_module_is_told_once_all_of_it_was_tested(folder: Path) -> None:
    note_sources(folder)
    assert outcomes(folder) == {
        "whole": Outcome(
            digests(folder)["whole"],
            {"caught by type check": 1, "killed": 1, "survived": 1},
            (Survivor("whole.x_f__mutmut_2", "a", "b"),),
        )
    }


def test_it_is_told_of_the_text_that_was_tested(folder: Path) -> None:
    """Whatever became of the module since."""
    note_sources(folder)
    before = digests(folder)["whole"]
    (folder / "whole.py").write_text("def g() -> None: ...\n")
    assert outcomes(folder)["whole"].source == before != digests(folder)["whole"]


def test_of_unknown_text_nothing_is_told(folder: Path) -> None:
    assert outcomes(folder) == {}


def test_what_is_to_be_tested_or_tested_again_is_named(folder: Path) -> None:
    assert doubtful(folder) == ["begun.x_f__mutmut_3", "whole.x_f__mutmut_2"]
    assert untested(folder) == ["begun.x_f__mutmut_2"]
