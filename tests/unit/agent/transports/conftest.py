"""The fixture `hub` runs a test over both transports; `local` and `ucxx` are hubs of one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.agent.transports.hubs import Hub, running_hub


@pytest.fixture(params=["local", "ucxx"])
async def hub(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Hub]:
    async with running_hub(request.param, tmp_path) as hub:
        yield hub


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Hub]:
    async with running_hub("local", tmp_path) as hub:
        yield hub


@pytest.fixture
async def ucxx(tmp_path: Path) -> AsyncIterator[Hub]:
    async with running_hub("ucxx", tmp_path) as hub:
        yield hub
