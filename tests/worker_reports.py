"""What the workers of pytest-xdist tell the run: every report arrives, and why a worker broke off stands at the end.

A report goes to the run as plain values and UTF-8. Text that has none breaks the worker off instead, such as a lone
surrogate in what a failed test compared or in a line that it logged: the test counts as neither passed nor failed, and
the run ends with "Unexpectedly no active workers available". So such text is written as an escape, and another value
as its `repr`.

What breaks a worker off otherwise is told in the middle of the output, of which often only the end is kept.
"""

from collections.abc import Generator
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


def written(data: Any) -> Any:
    """Return a report's data as what can be sent: UTF-8 can write each text, and each value is a plain one."""
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace").decode()
    if isinstance(data, dict):
        return {written(key): written(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(map(written, data))
    return data if data is None or type(data) in PLAIN else repr(data)
