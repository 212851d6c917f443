import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.bounds import WAIT_S
from tests.unit.client.fake_agent import FakeAgent
from typer.main import get_command
from typer.testing import CliRunner

import tensorhub
from tensorhub import AsyncHub
from tensorhub.cli.main import app


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    """A fake agent, and an environment that names it and no other hub."""
    for name in ("SOCKET", "NATS", "HOST", "JOB"):
        monkeypatch.delenv(f"TENSORHUB_{name}", raising=False)
    monkeypatch.setenv("TENSORHUB_DIR", str(tmp_path))
    monkeypatch.setenv("TENSORHUB_AGENT", str(tmp_path / "agent.sock"))
    fake = FakeAgent(tmp_path / "agent.sock")
    yield fake
    fake.close()


@pytest.fixture
async def hub(agent: FakeAgent) -> AsyncIterator[AsyncHub]:
    hub = await tensorhub.connect_async(agent=agent.path)
    yield hub
    agent.hooks.clear()
    await hub._session.close()


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    def is_one_line(self, code: int, *words: str) -> bool:
        """Tell whether all that it said is one line of what is wrong."""
        told = (self.code, self.out, self.err.count("\n")) == (code, "", 1) and self.err.startswith("tensorhub: ")
        return told and all(each in self.err for each in words)


Run = Callable[..., Ended]


@cache
def commands() -> Any:
    """Return all commands as typer makes them of our functions, once: that takes longer than most of them."""
    return get_command(app)


def command(*arguments: object) -> Ended:
    """Run a command."""
    runner, code = CliRunner(), 0
    with runner.isolation() as (out, err, _):
        try:
            commands().main([str(each) for each in arguments], prog_name=runner.get_default_prog_name(commands()))
        except SystemExit as end:
            code = int(end.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
        return Ended(code, out.getvalue().decode(), err.getvalue().decode())


@pytest.fixture
def run(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command where a fake agent and a NATS that nobody asks are."""
    monkeypatch.setenv("TENSORHUB_NATS", "nats://127.0.0.1:1")
    return command


def python(program: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run a program of Python."""
    whole = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(whole, capture_output=True, text=True, timeout=WAIT_S, check=False)
