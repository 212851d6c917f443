"""Small models of transformers with unlike values, and what vLLM's loaders make of their checkpoints on two ranks."""

from typing import Any

import torch
import transformers
from tests.property.vllm_loading import Shape, Worker

TP = 2

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
    config = getattr(transformers, f"{family}Config")(**MODELS[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
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
    bits = {name: tensor.detach().contiguous().view(torch.int32).numpy() for name, tensor in checkpoint(model).items()}
    found = Worker(engine_shape(model.config, rank)).load(bits)
    return {name: torch.from_numpy(array).to(torch.int32).view(torch.float32) for name, array in found.items()}


def checkpoint(model: Any) -> dict[str, torch.Tensor]:
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
