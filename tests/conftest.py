"""What holds for every test: it finds `logging` as the first one did, in whatever order and process they run.

The tests start hundreds of interpreters, several workers side by side: each of them finds bytecode, torch has one
thread, as a worker has one core, and neither Ctrl-C nor a hangup is ignored. What they start and make is gone when they
end (`leftovers.py`).

Examples are the same in every run, on every machine: what fails once fails again, and what passed here passes there.
With `--hypothesis-profile=anew` they are others each time, and with `thorough` eight times as many, as in `make slow`;
`--hypothesis-seed` repeats them. `mutants` keeps what it found as it is, as `make mutants` does.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from tests import leftovers, longest_first
from tests.worker_reports import WorkerReports

# Where images set it, every process would compile all of our modules anew, and each run would rewrite all assertions.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Else the threads of every torch spin on the same cores, for half as much again of a test's time. It asks at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell has what it runs in the background ignore Ctrl-C, and nohup a hangup; all that this starts would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# No deadline, and no complaint about examples that are slow to draw: how long one takes says how busy the machine is.
settings.register_profile(
    "same",
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("anew", settings.get_profile("same"), derandomize=False)
settings.register_profile("thorough", settings.get_profile("anew"), max_examples=400)
settings.register_profile(
    "mutants", max_examples=10, derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    """Let every report of a worker arrive, and the end of the output say what broke off."""
    config.pluginmanager.register(WorkerReports())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the files that take longest begin first; `make test` has the workers take them in this order."""
    places = {config.rootpath / file: place for place, file in enumerate(longest_first.FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole files, and one of them all that use the session's hubs."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # noqa: PLC0415 (not in every environment of `make integrations`)

    class SharedHubs(LoadFileScheduling):  # type: ignore[misc]  # xdist has no annotations
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "the session's hubs" if file in longest_first.ONE_WORKER else file

    return SharedHubs(config, log)


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected, a million objects, out of each later collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the run when a process or shared memory of its tests is left at its end, and take that away."""
    with leftovers.nothing_left(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(autouse=True)
def same_chance() -> None:
    """Let each test draw the same values from torch's own generator, whichever ran before it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        # `torch.manual_seed` notes a stack for each kind of device that is not there, longer than some tests take.
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Restore `logging` after a command that ran in this process: where lines go, and each logger's level."""
    root = logging.getLogger()
    handlers, levels = list(root.handlers), _levels()
    yield
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
    # To set a level, even the one that it has, asks every logger to forget what it knew.
    for each, level in _levels().items():
        if level != levels.get(each, logging.NOTSET):
            each.setLevel(levels.get(each, logging.NOTSET))


def _levels() -> dict[logging.Logger, int]:
    """Return the levels of all loggers that were ever asked for."""
    named = [each for each in logging.Logger.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    return {each: each.level for each in (logging.getLogger(), *named)}
