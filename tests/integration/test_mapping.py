"""Models in Hugging Face's naming to engines with vLLM's fused and divided tensors, and back, by real processes."""

import asyncio
from typing import Any

import pytest
import torch
import transformers
from tests.kit.hubs import RunningHub
from tests.kit.transports import HUB_OF, UCXX_AND_LONG_LOCAL
from tests.property.vllm_loading import Shape, Worker

from tensorhub import AsyncHub, AsyncShard, mapping

pytestmark = pytest.mark.asyncio(loop_scope="session")

TP = 2


@pytest.fixture(scope="module", params=UCXX_AND_LONG_LOCAL)
def hub(request: pytest.FixtureRequest) -> RunningHub:
    hub: RunningHub = request.getfixturevalue(HUB_OF[request.param])
    return hub


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 101,
    "head_dim": 8,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 5,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
}
MODELS = {
    "Llama": {**SIZES, "attention_bias": True, "mlp_bias": True},
    "Qwen3": {**SIZES, "tie_word_embeddings": True},
    "Qwen3Moe": {**SIZES, **EXPERTS, "num_experts": 5, "mlp_only_layers": [0]},
    "DeepseekV3": {**SIZES, **EXPERTS, **LATENT},
}


def made(family: str, seed: int) -> Any:
    """Return a model of transformers with values of its own in every parameter and buffer."""
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**MODELS[family]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "rotary" not in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def engine_shape(config: Any, rank: int) -> Shape:
    """Return the engine's worker: experts whole on the ranks of their own, all the rest divided."""
    experts: int = getattr(config, "n_routed_experts", 0) or getattr(config, "num_experts", 0)
    first = -(-experts // TP)
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        padding_to=64,
        tp_rank=rank,
        tp_size=TP,
        tied=config.tie_word_embeddings,
        experts=experts,
        expert_intermediate=getattr(config, "moe_intermediate_size", 0),
        expert_map=tuple(range(experts)[:first] if rank == 0 else range(experts)[first:]),
        latent=hasattr(config, "kv_lora_rank"),
        q_rank=getattr(config, "q_lora_rank", None),
        kv_rank=getattr(config, "kv_lora_rank", 0),
        rope=getattr(config, "qk_rope_head_dim", 0),
    )


def loaded(model: Any, rank: int) -> dict[str, torch.Tensor]:
    """Return what vLLM's loaders make of the model's checkpoint on one rank. Values are moved as their bits."""
    bits = {name: tensor.detach().view(torch.int32).numpy() for name, tensor in checkpoint(model).items()}
    found = Worker(engine_shape(model.config, rank)).load(bits)
    return {name: torch.from_numpy(array).to(torch.int32).view(torch.float32) for name, array in found.items()}


def checkpoint(model: Any) -> dict[str, torch.Tensor]:
    """Return the model's tensors as its checkpoint has them: each expert by itself."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                gate, up = both.chunk(2)
                at = name.replace("gate_up_proj", str(number))
                tensors |= {f"{at}.gate_proj.weight": gate.clone(), f"{at}.up_proj.weight": up.clone()}
        elif name.endswith("experts.down_proj"):
            at = name.removesuffix(".down_proj")
            tensors |= {f"{at}.{number}.down_proj.weight": one.clone() for number, one in enumerate(tensor)}
        else:
            tensors[name] = tensor
    return tensors


async def engine(hubs: list[AsyncHub], like: Any, install: str) -> list[AsyncShard]:
    """Register an engine of two ranks with tensors of vLLM's names and shapes, which at first hold no number."""
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
