"""Two vLLM servers for the whole session, since each takes long to start, and a hub on two hosts."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.integrations.qwen2 import save_qwen2
from tests.integrations.servers import hub_of_two_hosts
from tests.integrations.vllm.processes import ENVIRONMENT, VllmProcess
from tests.kit import fork_server

from tensorhub.integrations.vllm import ENDS_WITH


@pytest.fixture(scope="session", autouse=True)
def programs_end() -> Iterator[None]:
    yield
    fork_server.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_qwen2(folder)
    return folder


@pytest.fixture
def vllm_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process make an engine, and leave the environment of later ones as it was."""
    for name, text in ENVIRONMENT.items():
        monkeypatch.setenv(name, text)
    for name in (ENDS_WITH, "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[VllmProcess]]:
    folder = tmp_path_factory.mktemp("servers")
    made = [VllmProcess(model_folder, free_port(), folder / f"{number}.log") for number in range(2)]
    for each in made:
        each.start()
    try:
        await asyncio.gather(*(each.ready() for each in made))
        yield made
    finally:
        for each in made:
            each.kill()


hub = hub_of_two_hosts
