"""What vLLM's processes do first: they register the backend, and end with the runner whose engine they are."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.bounds import WAIT_S

from tensorhub.integrations.vllm import ENDS_WITH

PLUGIN = """
import sys, threading
from types import ModuleType

class Factory:
    _registry = {}
    @classmethod
    def register_engine(cls, name, module, kind):
        assert name not in cls._registry
        cls._registry[name] = (module, kind)

name = "vllm"
for part in ("", ".distributed", ".weight_transfer", ".factory"):
    name += part
    sys.modules[name] = ModuleType(name)
sys.modules[name].WeightTransferEngineFactory = type("Engines", (Factory,), {"_registry": {}})
sys.modules[name].WeightTransferTrainerFactory = type("Trainers", (Factory,), {"_registry": {}})

from tensorhub.integrations.vllm import register
register()
register()
print(threading.active_count() - 1, flush=True)
sys.stdin.read()
"""
"""A process of vLLM. It says how many threads watch, and ends by itself with its input."""


@contextmanager
def running(*command: str, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=os.environ | environment, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said_by(process: "subprocess.Popen[bytes]") -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_process_ends_with_a_runner_that_is_killed() -> None:
    with (
        running("sleep", "600") as runner,
        running(sys.executable, "-c", PLUGIN, **{ENDS_WITH: str(runner.pid)}) as engine,
    ):
        # One watches, although vLLM has loaded the plugin twice.
        assert said_by(engine) == b"1\n"
        assert engine.poll() is None
        runner.kill()
        assert engine.wait(WAIT_S) == 1


def test_a_process_whose_runner_is_gone_already_ends_at_once() -> None:
    with running("true") as runner:
        runner.wait(WAIT_S)
        with running(sys.executable, "-c", PLUGIN, **{ENDS_WITH: str(runner.pid)}) as engine:
            assert engine.wait(WAIT_S) == 1
            assert said_by(engine) == b""


@pytest.mark.parametrize("environment", [{}, {ENDS_WITH: ""}])
def test_a_process_of_a_server_watches_no_other(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDS_WITH, raising=False)
    with running(sys.executable, "-c", PLUGIN, **environment) as engine:
        assert said_by(engine) == b"0\n"


def test_a_runner_does_not_wait_for_itself() -> None:
    own = f"import os; os.environ[{ENDS_WITH!r}] = str(os.getpid())\n"
    with running(sys.executable, "-c", own + PLUGIN) as engine:
        assert said_by(engine) == b"0\n"
