from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.unit.client.fake_agent import FakeAgent

import tensorhub
from tensorhub import AsyncHub


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
