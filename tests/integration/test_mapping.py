"""Models in Hugging Face's naming to engines with vLLM's fused and divided tensors, and back, by real processes."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.fsdp_rank import QUESTIONS
from tests.kit.hubs import RunningHub, new_job
from tests.kit.models import MODELS, TP, UNEVEN, checkpoint, loaded, loaded_from, made
from tests.kit.processes import Peer
from tests.kit.tensors import raw
from tests.kit.transports import UCXX_AND_LONG_LOCAL, hub_over

from tensorhub import AsyncHub, AsyncShard, mapping

pytestmark = pytest.mark.asyncio(loop_scope="session")


hub = hub_over(UCXX_AND_LONG_LOCAL)


PROGRAM = "from tests.integration.fsdp_rank import main; main()"
TRAINERS, VERSIONS = 4, 3


async def engine(hubs: list[AsyncHub], like: Any, install: str) -> list[AsyncShard]:
    return [
        await hubs[rank].register(
            "m",
            {name: torch.full_like(tensor, torch.nan) for name, tensor in loaded(like, rank).items()},
            replica=install,
            install=install,
            shard=rank,
            shards=TP,
            mapping=mapping.for_model(like.config, "vllm", tp_rank=rank, tp_size=TP, ep_rank=rank, ep_size=TP),
        )
        for rank in range(TP)
    ]


@pytest.mark.parametrize("family", MODELS)
async def test_a_model_of_transformers_to_a_fused_engine_and_back(hub: RunningHub, family: str) -> None:
    """A trainer that has the whole model publishes twice; then what two engines have is read into another model."""
    async with hub.connected() as hubs:
        trainer = made(family, 0)
        names = mapping.for_model(trainer.config, "hf")
        policy = await hubs[0].register("m", trainer, replica="trainer", mapping=names)
        engines = [await engine(hubs, trainer, install) for install in ("in-place", "staged")]
        ranks = [rank for some in engines for rank in some]
        for version in (1, 2):
            new = made(family, version)
            trainer.load_state_dict(new.state_dict())
            await policy.publish(version)
            assert await asyncio.gather(*(rank.replicate(version) for rank in ranks)) == [version] * len(ranks)
            for rank in ranks:
                for name, expected in loaded(new, rank.shard).items():
                    found = rank.tensors[name].view(torch.int32)
                    assert torch.equal(found, expected.view(torch.int32)), (rank, name)
            await policy.unpublish()
        await policy.release()
        back = made(family, 9)
        reader = await hubs[1].register("m", back, replica="evaluator", mapping=names)
        assert await reader.replicate(2) == 2
        for name, expected in checkpoint(new).items():
            assert torch.equal(checkpoint(back)[name], expected), name


async def test_a_tied_head_may_be_registered_by_itself(hub: RunningHub) -> None:
    """A state dict has the embedding twice: as a source either of them does, and as a destination both are filled."""
    trainer, back = made("Qwen3", 1), made("Qwen3", 2)
    names = mapping.for_model(trainer.config, "hf")
    async with hub.connected() as hubs:
        policy = await hubs[0].register("m", trainer.state_dict(), replica="trainer", mapping=names)
        await policy.publish(1)
        ranks = await engine(hubs, trainer, "in-place")
        assert await asyncio.gather(*(rank.replicate(1) for rank in ranks)) == [1] * TP
        await policy.release()
        reader = await hubs[1].register("m", back.state_dict(), replica="evaluator", mapping=names)
        assert await reader.replicate(1) == 1
        assert torch.equal(reader.tensors["lm_head.weight"], trainer.model.embed_tokens.weight)
        assert torch.equal(reader.tensors["model.embed_tokens.weight"], trainer.model.embed_tokens.weight)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mesh", "dtype"), [("fsdp", "float32"), ("fsdp", "bfloat16"), ("hsdp", "float32")])
async def test_four_ranks_of_fsdp_to_a_fused_engine_and_a_whole_one(
    hub: RunningHub, tmp_path: Path, mesh: str, dtype: str
) -> None:
    """A real FSDP2 trainer whose ranks are processes. Engines hold its full tensors, and the whole one computes alike.

    What a divided engine computes is shown by an example (test_examples.py).
    """
    job = new_job()
    async with AsyncExitStack() as stack:
        arguments = (str(TRAINERS), mesh, str(tmp_path), dtype)
        environment = {"TENSORHUB_JOB": job, "TENSORHUB_AGENT": hub.file.agents[0].socket}
        ranks = [
            await stack.enter_async_context(hub.program(PROGRAM, str(rank), *arguments, **environment))
            for rank in range(TRAINERS)
        ]
        assert [json.loads(await rank.line()) for rank in ranks] == ["ready"] * TRAINERS
        hubs = await stack.enter_async_context(hub.connected(job))
        like = made("Qwen3", 9, **UNEVEN).to(getattr(torch, dtype))
        fused = await engine(hubs, like, "in-place")
        whole = await hubs[1].register("m", like, replica="whole", mapping=mapping.for_model(like.config, "hf"))
        for version in range(1, VERSIONS + 1):
            await all_do(ranks, "step", version)
            shapes = await all_do(ranks, "save", version)
            assert set(await asyncio.gather(*(each.replicate(version) for each in (*fused, whole)))) == {version}
            saved = torch.load(tmp_path / f"{version}.pt")
            for rank in fused:
                for name, expected in loaded_from(saved["tensors"], like.config, rank.shard).items():
                    assert_same_bits(rank.tensors[name], expected)
            for name, tensor in checkpoint(like).items():
                assert_same_bits(tensor, saved["tensors"][name])
            with torch.no_grad():
                assert_same_bits(like(QUESTIONS).logits, saved["logits"])
    if mesh == "fsdp":
        assert any(0 in shape for shape in shapes[-1]), "the last rank has nothing of some tensors"
        assert shapes[0] != shapes[-1]


async def all_do(ranks: list[Peer], *order: object) -> list[Any]:
    return await asyncio.gather(*(rank.ask(*order) for rank in ranks))


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(raw(found), raw(expected))
