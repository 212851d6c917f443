"""Runners with the torch engine follow trainers that send a `state_dict()`: it lacks what a model computes itself."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.tiny_engines import SIZES, Desk, engine_of, fill
from tests.kit.waiting import until
from transformers import PreTrainedModel

import tensorhub
from tensorhub.local.hub import LocalRollouts
from tensorhub_common.protocol.rollout import messages
from tensorhub_runner.engines.models import build

pytestmark = [pytest.mark.asyncio, pytest.mark.long]

CONFIG: Final[dict[str, Any]] = {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True}
TABLE: Final = "model.rotary_emb.inv_freq"
SAMPLING: Final = tensorhub.Sampling(max_tokens=24, temperature=0.8)
PROMPT: Final = [5, 9, 3]
GROUP: Final = 4

Tensors = dict[str, torch.Tensor]


@asynccontextmanager
async def hub_with_runner(directory: Path) -> AsyncIterator[RunningHub]:
    folder = directory / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    async with running_hub(directory, 1, rollouts=LocalRollouts(1, model=folder)) as hub:
        yield hub


def of_module(module: PreTrainedModel) -> Tensors:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def of_state_dict(module: PreTrainedModel) -> Tensors:
    found: Tensors = module.state_dict()
    assert TABLE not in found
    assert "lm_head.weight" in found, "tied tensors are in it by every name"
    return found


def expected(module: PreTrainedModel, seed: int) -> list[int]:
    """Return the tokens of an engine with this module in this process."""
    desk = Desk(engine_of(module))
    made = desk.begin(PROMPT, messages.Sampling(SAMPLING.max_tokens, seed, SAMPLING.temperature))
    desk.run()
    return made.tokens


@pytest.mark.parametrize("sent", [of_module, of_state_dict])
async def test_tokens_are_those_of_the_module_and_replay_confirms_them(
    sent: Callable[[PreTrainedModel], Tensors], tmp_path: Path
) -> None:
    module = build(CONFIG)
    if sent is of_module:
        # What a version has is used: an engine that computed these would have others.
        module.get_buffer(TABLE).mul_(0.5)
    async with hub_with_runner(tmp_path) as hub, hub.connected("default", 1) as (trainer,):
        fill(module, 0)
        shard = await trainer.register("policy", sent(module), replica="trainer")
        await trainer.retain("policy", last=3)
        rollouts = await trainer.rollouts("policy", name="trainer", group_size=GROUP, sampling=SAMPLING)
        for version in (1, 2):
            async with shard.overwriting():
                fill(module, version)
                for name, tensor in sent(module).items():
                    shard.tensors[name].copy_(tensor.detach())
            await shard.publish(version)
            await rollouts.submit([tensorhub.Prompt(PROMPT)])
            async for batch in rollouts.batches(GROUP, wait_s=WAIT_S):
                for each in batch.responses:
                    assert (each.finish_reason, {*each.versions.tolist()}) == ("length", {version})
                    assert each.token_ids.tolist() == await asyncio.to_thread(expected, module, each.seed)
                    assert np.isfinite(each.logprobs).all()
                await batch.save(tmp_path / "rollouts.jsonl")
                await batch.done()
        assert (TABLE in await trainer.specs("policy")) == (sent is of_module)
        code, out, err = await hub.command("replay", tmp_path / "rollouts.jsonl", "--model", tmp_path / "model")
        assert (code, err) == (0, "")
        assert f"{2 * GROUP} confirmed" in out


async def test_a_version_without_a_weight_is_refused_by_its_name(tmp_path: Path) -> None:
    module = build(CONFIG)
    fill(module, 1)
    lacking = "model.layers.1.mlp.up_proj.weight"
    tensors = {name: each for name, each in of_state_dict(module).items() if name != lacking}
    async with hub_with_runner(tmp_path) as hub, hub.connected("default", 1) as (trainer,):
        shard = await trainer.register("policy", tensors, replica="trainer")
        await shard.publish(1)
        log = hub.directory / "logs" / "runner-0.log"
        await until(lambda: "LayoutMismatch: " in log.read_text() and lacking in log.read_text(), "it says so")
