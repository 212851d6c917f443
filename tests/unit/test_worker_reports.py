"""What a worker can't send as it is arrives nevertheless, and what broke a worker off is said at the very end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.worker_reports import LINES_MAX, written

CONFTEST = """
from tests.worker_reports import WorkerReports

def pytest_configure(config):
    config.pluginmanager.register(WorkerReports())
"""

FAILING = r"""
import logging

def test_that_compares():
    assert "one \udcff" == "another"

def test_that_raises():
    raise ValueError("half \ud800")

def test_that_logs():
    logging.getLogger("its").warning("logged \udcfe")

def test_that_records(record_property):
    record_property("what", object())
"""

WITHOUT_LINE = """
def lineless():
    # As where a signal comes in a loop: code in which no place has a line.
    def fails(): raise ValueError("somewhere in a loop")
    exec(fails.__code__.replace(co_linetable=bytes([0x80 | 15 << 3 | 7]) * (len(fails.__code__.co_code) // 16 + 1)))

def test_that_raises():
    lineless()

def test_that_passes(): pass
"""

BREAKING = """
import pytest

@pytest.fixture
def breaks(request):
    yield
    def no_report(**_):
        raise OSError("no report of it")
    request.config.hook.pytest_runtest_makereport = no_report

def test_before(): pass
def test_that_breaks_the_worker_off(breaks): pass
def test_after(): pass
def test_last(): pass
"""


def run_of(folder: Path, tests: str) -> str:
    """Run tests in one worker, as `make test` runs ours; return what is printed."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", "--dist", "loadfile", "-rf"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**own, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [*command, f"--basetemp={folder / 'base'}", str(folder)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout


@pytest.mark.long
def test_a_report_with_text_that_utf8_can_not_write_arrives(tmp_path: Path) -> None:
    said = run_of(tmp_path, FAILING)
    assert "2 failed, 2 passed" in said, said
    assert r"FAILED test_some.py::test_that_raises - ValueError: half \ud800" in said
    assert "INTERNALERROR" not in said


@pytest.mark.long
def test_a_traceback_in_which_a_place_has_no_line_arrives(tmp_path: Path) -> None:
    said = run_of(tmp_path, WITHOUT_LINE)
    assert "1 failed, 1 passed" in said, said
    assert "FAILED test_some.py::test_that_raises - ValueError: somewhere in a loop" in said


@pytest.mark.long
def test_what_broke_a_worker_off_and_in_which_test_stands_at_the_end(tmp_path: Path) -> None:
    said = run_of(tmp_path, BREAKING)
    assert "Unexpectedly no active workers available" in said, said
    end = said.partition(" the run broke off ")[2].splitlines()
    assert "OSError: no report of it" in end[LINES_MAX].strip()
    assert end[-1] == "begun and not ended: test_some.py::test_that_breaks_the_worker_off"
    assert len(end) <= 2 * LINES_MAX


@pytest.mark.long
def test_what_can_be_sent_stays_as_it_is() -> None:
    report = {"nodeid": "a::b", "when": None, "duration": 0.5, "sections": [("out", "ä")], "keywords": {"b": 1}}
    assert written(report) == report
    assert written(("\ud800", {1: b"x"}, range(2))) == ("\\ud800", {1: b"x"}, "range(0, 2)")
