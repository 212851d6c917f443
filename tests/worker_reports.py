"""What the workers of pytest-xdist tell the run: every report arrives, and why a worker broke off stands at the end.

What raises while a report is made or sent breaks the worker off: the test counts as neither passed nor failed, nor do
those that it still had, and the run ends with "Unexpectedly no active workers available". Two things are mended here:

- pytest can't show a traceback in which a place has no line. CPython has such places in loops, and the signal of
  pytest-timeout may come there.
- A report goes to the run as plain values and UTF-8. Other text, such as a lone surrogate in what a failed test
  compared or in a line that it logged, is written as an escape, and another value as its `repr`.

What breaks a worker off otherwise is told in the middle of the output, of which often only the end is kept.
"""

from collections.abc import Generator
from types import TracebackType
from typing import Any, Final

import pytest

LINES_MAX: Final = 4
"""So many lines of each error are repeated: the last ones name it."""
RUNNING_MAX: Final = 8
"""So many tests that had begun and not ended are named."""
PLAIN: Final = frozenset({bool, int, float, bytes})


class WorkerReports:
    """A plugin of the run and of each of its workers."""

    def __init__(self) -> None:
        """Begin with no test running and nothing broken."""
        self._running: dict[str, None] = {}
        self._errors: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        """Let every place of a traceback have a line."""
        if call.excinfo is not None:
            for error in told_by(call.excinfo.value):
                error.__traceback__ = with_lines(error.__traceback__)
            call.excinfo = pytest.ExceptionInfo.from_exception(call.excinfo.value)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(self) -> Generator[None, Any, Any]:
        """Escape what is no text in UTF-8."""
        return written((yield))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note which test runs."""
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Note that it has ended."""
        self._running.pop(nodeid, None)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Keep what broke, here or in a worker."""
        self._errors.append(str(excinfo.value) or excinfo.typename)

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Say at the very end what broke, and during which tests."""
        terminal = config.pluginmanager.getplugin("terminalreporter")
        if terminal is None or not self._errors:
            return
        terminal.write_sep("=", "the run broke off", red=True)
        for error in self._errors:
            lines = [line for line in error.splitlines() if line.strip() and line != "assert False"]
            terminal.write_line("\n".join(lines[-LINES_MAX:]))
        for test in [*self._running][:RUNNING_MAX]:
            terminal.write_line(f"begun and not ended: {test}")


def told_by(error: BaseException) -> list[BaseException]:
    """Return an error and all that are shown with it: what it came of, and those of a group."""
    found: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is not None and not any(each is other for other in found):
            found.append(each)
            todo += [each.__cause__, each.__context__]
            todo += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
    return found


def with_lines(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback that says of a place without a line in which function it is."""
    places = []
    while traceback is not None:
        places.append(traceback)
        traceback = traceback.tb_next
    for place in reversed(places):
        # typeshed does not know that there may be none.
        line: int | None = place.tb_lineno
        traceback = TracebackType(
            traceback, place.tb_frame, place.tb_lasti, place.tb_frame.f_code.co_firstlineno if line is None else line
        )
    return traceback


def written(data: Any) -> Any:
    """Return a report's data as what can be sent: UTF-8 can write each text, and each value is a plain one."""
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace").decode()
    if isinstance(data, dict):
        return {written(key): written(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(map(written, data))
    return data if data is None or type(data) in PLAIN else repr(data)
