"""A trainer that uses vLLM's own interface publishes into the hub; a server without a runner loads what it sends."""

import asyncio
from pathlib import Path

import pytest
import torch
from tests.integrations.servers import runner_beside
from tests.integrations.trainers import draw
from tests.integrations.vllm.processes import START_S, VllmProcess
from tests.integrations.vllm.test_follow import PROMPTS, TOKENS, of_version
from tests.kit.hubs import RunningHub, new_job
from tests.kit.waiting import until
from transformers import Qwen2ForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from tensorhub.integrations.vllm import BACKEND, register
from tensorhub.integrations.vllm.trainer_backend import HubTrainer, HubTrainerInfo

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(2 * START_S)]


def trainer_of(module: torch.nn.Module, info: HubTrainerInfo, client: HTTPVLLMWeightSyncClient | None) -> HubTrainer:
    register()
    made = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(module))
    assert isinstance(made, HubTrainer)
    return made


def test_it_is_known_to_vllm_under_its_name_however_often_it_is_loaded() -> None:
    register()
    register()
    assert HubTrainerInfo.backend == BACKEND == "tensorhub"


@pytest.mark.parametrize("is_stale", [False, True])
async def test_a_server_without_a_runner_loads_what_its_trainer_sends(
    servers: list[VllmProcess], hub: RunningHub, model_folder: Path, *, is_stale: bool
) -> None:
    """`is_stale`: somebody was killed within an update before."""
    server, module = servers[0], Qwen2ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    socket = hub.file.agents[0].socket
    info = HubTrainerInfo(new_job(), "policy", agent=socket, server_agent=socket, rank=0)
    client = HTTPVLLMWeightSyncClient(server.url)
    trainer = await asyncio.to_thread(trainer_of, module, info, client)
    await server.ask("POST", "/resume")
    if is_stale:
        await asyncio.to_thread(client.start_weight_update)
    try:
        for seed in range(3):
            draw(module, seed)
            await asyncio.to_thread(trainer.send_weights)
            assert await server.version() == str(trainer.version)
            assert await server.greedy(PROMPTS[0], TOKENS) == of_version(model_folder, seed)
    finally:
        await asyncio.to_thread(client.shutdown_weight_transfer_engine)
        await asyncio.to_thread(trainer.shutdown)


async def test_servers_with_runners_need_no_client(
    servers: list[VllmProcess], hub: RunningHub, model_folder: Path
) -> None:
    server, module = servers[0], Qwen2ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    info = HubTrainerInfo(new_job(), "policy", agent=hub.file.agents[0].socket, rank=0)
    trainer = await asyncio.to_thread(trainer_of, module, info, None)
    try:
        async with runner_beside(server, hub, info.job, "far", 1):
            draw(module, 7)
            await asyncio.to_thread(trainer.send_weights)
            assert trainer.version is not None
            expected = of_version(model_folder, 7)

            async def follows() -> bool:
                # The server may have had a version of this number from another job.
                return await server.greedy(PROMPTS[0], TOKENS) == expected

            await until(follows, "the server has what was published", START_S)
            assert await server.version() == str(trainer.version)
    finally:
        await asyncio.to_thread(trainer.shutdown)


async def test_a_source_is_needed(hub: RunningHub) -> None:
    info = HubTrainerInfo(new_job(), "policy", agent=hub.file.agents[0].socket, rank=0)
    with pytest.raises(ValueError, match="give a source"):
        HubTrainer.trainer_init(info, client=None, source=None)
