"""Two vLLM servers for the whole session, since each takes long to start, and a hub on two hosts."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from tests.integrations.vllm.processes import VllmProcess
from tests.kit import fork_server
from tests.kit.hubs import RunningHub, running_hub
from transformers import Qwen2Config, Qwen2ForCausalLM

from tensorhub.local.hub import LocalRollouts


@pytest.fixture(scope="session", autouse=True)
def programs_end() -> Iterator[None]:
    yield
    fork_server.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 32 elements, which is the least that vLLM's CPU attention takes."""
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hub(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningHub]:
    async with running_hub(
        tmp_path_factory.mktemp("hub"), hosts=2, rollouts=LocalRollouts(), TENSORHUB_METRICS="0"
    ) as running:
        yield running
