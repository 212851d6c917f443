"""Models in Hugging Face's naming to engines with vLLM's fused and divided tensors, and back, by real processes."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.kit.hubs import RunningHub, new_job
from tests.kit.models import MODELS, TP, checkpoint, loaded, made
from tests.kit.shardings import Sharding, columns, mesh, published, registered, rows
from tests.kit.transports import UCXX_AND_LONG_LOCAL, hub_over
from tests.unit.agent.casting.torch_bits import bits_in
from tests.unit.agent.casting.torch_fp8 import referred, weight

from tensorhub import AsyncHub, AsyncShard, Part, TensorSpec, mapping
from tensorhub.arguments import Install
from tensorhub_common.layout.casts import fp8_scheme

pytestmark = pytest.mark.asyncio(loop_scope="session")
hub = hub_over(UCXX_AND_LONG_LOCAL)


async def engine(hubs: list[AsyncHub], like: Any, install: Install) -> list[AsyncShard]:
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
            if version == 1:
                told = await hubs[1].specs("m")
            await policy.unpublish()
        # The trainer, and then the engines alone, tell what a checkpoint has. A tied head is the embedding.
        tied = {"lm_head.weight"} if trainer.config.tie_word_embeddings else set()
        assert {name: each.shape for name, each in told.items()} == {
            name: tuple(each.shape) for name, each in checkpoint(new).items() if name not in tied
        }
        await policy.release()
        assert await hubs[0].specs("m") == told
        back = made(family, 9)
        reader = await hubs[1].register("m", back, replica="evaluator", mapping=names)
        assert await reader.replicate(2) == 2
        for name, expected in checkpoint(new).items():
            assert torch.equal(checkpoint(back)[name], expected), name


SCHEME = "fp8-block-128"
GPU = "GPU-fake-0"


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    bits = weight(shape, str(dtype).removeprefix("torch."), seed)
    signed = torch.from_numpy(bits.view({2: np.int16, 4: np.int32}[bits.itemsize]))
    return signed.view(dtype)


def quantised(tensor: torch.Tensor, scheme: str = SCHEME) -> tuple[torch.Tensor, torch.Tensor]:
    name = str(tensor.dtype).removeprefix("torch.")
    values, scales = referred(bits_in(tensor.contiguous(), name), name, fp8_scheme(scheme))
    return torch.from_numpy(values).view(torch.float8_e4m3fn), torch.from_numpy(scales)


def assert_equal(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    assert torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (found, expected))), what


def spec(name: str, whole: torch.Tensor, scheme: str, box: tuple[slice, slice]) -> dict[str, TensorSpec]:
    """Describe a box of a matrix's values, and all of its scales, by hand."""
    values, scales = quantised(whole, scheme)
    shape, offset = values[box].shape, tuple(side.start or 0 for side in box)
    zeros = (0, 0)
    part = Part(name, tuple(whole.shape), offset, tuple(shape), zeros, tuple(shape), f"{scheme}:values")
    all_scales = Part(
        name, tuple(whole.shape), zeros, tuple(scales.shape), zeros, tuple(scales.shape), f"{scheme}:scales"
    )
    return {
        f"{name}.values": TensorSpec(shape, torch.float8_e4m3fn, parts=[part]),
        f"{name}.scales": TensorSpec(scales.shape, torch.float32, parts=[all_scales]),
    }


WHOLE = (slice(None), slice(None))
BOXES = (WHOLE, (slice(100, 1001), slice(None)), (slice(None), slice(77, None)), WHOLE)


@pytest.mark.parametrize(
    "memories",
    [
        ("host", "host"),
        *(pytest.param(each, marks=pytest.mark.long) for each in ((GPU, GPU), (GPU, "host"), ("host", GPU))),
    ],
    ids="-".join,
)
@pytest.mark.parametrize(
    ("how", "shards", "shape", "scheme", "dtype"),
    [
        # Shards end with whole blocks.
        (rows, 3, (1150, 2051), "fp8-block-128", torch.bfloat16),
        (columns, 3, (1150, 2303), "fp8-block-128-nemo", torch.float32),
        (mesh, 4, (1023, 1279), "fp8-block-128-ue8m0", torch.float16),
        (rows, 5, (1150, 2051), "fp8-channel", torch.bfloat16),
        # No shard has a whole block.
        (rows, 7, (300, 517), "fp8-block-128", torch.bfloat16),
        (columns, 5, (389, 333), "fp8-block-128-nemo", torch.float32),
        (mesh, 4, (301, 207), "fp8-block-128-slime", torch.float16),
        (columns, 3, (150, 1001), "fp8-channel", torch.bfloat16),
        (rows, 5, (257, 300), "fp8-tensor", torch.float32),
    ],
)
async def test_values_and_scales_of_any_box_are_torchs(
    hub: RunningHub,
    how: Sharding,
    shards: int,
    shape: tuple[int, int],
    scheme: str,
    dtype: torch.dtype,
    memories: tuple[str, str],
) -> None:
    """Readers' boxes begin and end anywhere; two versions; each reader that has a version serves others as well."""
    async with hub.connected() as hubs:
        models = [{"w": drawn(shape, dtype, version)} for version in (1, 2)]
        trainer = await registered(hubs, "trainer", how, shards, models[0], memory=memories[0])
        readers = [
            await hubs[n % len(hubs)].register(
                "m", spec("w", models[0]["w"], scheme, box), replica=f"r{n}", memory=memories[1]
            )
            for n, box in enumerate(BOXES)
        ]
        for version, model in enumerate(models, 1):
            assert await published(trainer, how, model) == version
            await asyncio.gather(*(reader.replicate(version) for reader in readers))
            values, scales = quantised(model["w"], scheme)
            for reader, box in zip(readers, BOXES, strict=True):
                assert_equal(reader.tensors["w.values"], values[box], (version, box))
                assert_equal(reader.tensors["w.scales"], scales, (version, box))
            await asyncio.gather(*(shard.unpublish() for shard in trainer))


CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 320,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 3,
    "vocab_size": 101,
}

LAYER = "model.layers.0"
EXPERT_MATRICES = {"gate_proj": (256, 320), "up_proj": (256, 320), "down_proj": (320, 256)}


def own_tensors(seed: int) -> dict[str, torch.Tensor]:
    shapes = {
        f"{LAYER}.self_attn.q_proj.weight": (512, 320),
        f"{LAYER}.self_attn.k_proj.weight": (256, 320),
        f"{LAYER}.self_attn.v_proj.weight": (256, 320),
        f"{LAYER}.self_attn.o_proj.weight": (320, 512),
        f"{LAYER}.mlp.gate.weight": (3, 320),
        "model.embed_tokens.weight": (101, 320),
    }
    for expert in range(3):
        shapes |= {f"{LAYER}.mlp.experts.{expert}.{name}.weight": size for name, size in EXPERT_MATRICES.items()}
    found = {name: drawn(shape, torch.bfloat16, seed + n) for n, (name, shape) in enumerate(shapes.items())}
    return found | {"model.norm.weight": torch.full((320,), float(seed), dtype=torch.bfloat16)}


def quantised_engine(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Return what rank `rank` of 2 holds in vLLM's naming: quantised first, then divided and fused."""
    whole = {name: quantised(tensor) for name, tensor in tensors.items() if "proj" in name}
    found: dict[str, torch.Tensor] = {
        f"{LAYER}.mlp.gate.weight": tensors[f"{LAYER}.mlp.gate.weight"],
        "model.norm.weight": tensors["model.norm.weight"],
    }
    for number, suffix in enumerate(("", "_scale_inv")):

        def share(name: str, dim: int, number: int = number) -> torch.Tensor:
            return whole[f"{LAYER}.{name}.weight"][number].chunk(2, dim)[rank]

        fused = [share(f"self_attn.{name}_proj", 0) for name in "qkv"]
        experts = [[share(f"mlp.experts.{expert}.{half}_proj", 0) for half in ("gate", "up")] for expert in range(3)]
        found |= {
            f"{LAYER}.self_attn.qkv_proj.weight{suffix}": joined(fused),
            f"{LAYER}.self_attn.o_proj.weight{suffix}": share("self_attn.o_proj", 1),
            f"{LAYER}.mlp.experts.w13_weight{suffix}": torch.stack([joined(both) for both in experts]),
            f"{LAYER}.mlp.experts.w2_weight{suffix}": torch.stack(
                [share(f"mlp.experts.{expert}.down_proj", 1) for expert in range(3)]
            ),
        }
    return found


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Put them one after another; torch can't concatenate fp8 everywhere."""
    bits = [each.contiguous().view(torch.uint8) for each in tensors]
    return torch.cat(bits).view(tensors[0].dtype)


async def ranks_of(hubs: list[AsyncHub], like: dict[str, torch.Tensor]) -> list[AsyncShard]:
    return [
        await hubs[rank % len(hubs)].register(
            "m",
            {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in quantised_engine(like, rank).items()},
            replica="engine",
            shard=rank,
            shards=2,
            mapping=mapping.for_model(CONFIG, "vllm", tp_rank=rank, tp_size=2, quantise=mapping.fp8(SCHEME)),
        )
        for rank in range(2)
    ]


async def test_fused_and_stacked_weights_by_a_mapping_and_a_checkpoint_of_them(hub: RunningHub, tmp_path: Path) -> None:
    """A trainer sharded by rows to two ranks of an engine; `tensorhub pull` makes a checkpoint in fp8 of those."""
    job = new_job()
    async with hub.connected(job) as hubs:
        tensors = own_tensors(1)
        trainer = await registered(hubs, "trainer", divided, 2, tensors)
        ranks = await ranks_of(hubs, tensors)
        assert await published(trainer, divided, tensors) == 1
        await asyncio.gather(*(rank.replicate(1) for rank in ranks))
        for rank in ranks:
            for name, expected in quantised_engine(tensors, rank.shard).items():
                assert_equal(rank.tensors[name], expected, (rank.shard, name))
        await asyncio.gather(*(shard.release() for shard in trainer))
        out = tmp_path / "fp8.safetensors"
        assert (await hub.command("pull", "m", out, "--job", job))[0] == 0
        file = load_file(out)
    for name, tensor in tensors.items():
        if "proj" in name:
            values, scales = quantised(tensor)
            assert_equal(file[name], values, name)
            assert_equal(file[f"{name}_scale_inv"], scales, name)


def divided(_: str, tensor: torch.Tensor, shard: int, shards: int) -> tuple[slice, ...]:
    half = tensor.shape[0] // shards
    if half % 128 or tensor.ndim == 1:
        return (slice(None),) * tensor.ndim
    return (slice(shard * half, (shard + 1) * half), slice(None))
