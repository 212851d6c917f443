"""Sizes that are read out of a configuration: defaults, several names for one thing, and what is no size."""

from typing import Any

import pytest

from tensorhub.mapping.sizes import Experts, Latent, Sizes, experts_sizes_of, latent_sizes_of, sizes_of

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 100,
}


def test_what_is_left_out_has_the_default_of_transformers() -> None:
    assert sizes_of(CONFIG.get) == Sizes(
        layers=2, heads=4, kv_heads=4, head_dim=8, intermediate=48, vocabulary=100, tied=False
    )
    more = {**CONFIG, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
    assert sizes_of(more.get) == Sizes(
        layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=48, vocabulary=100, tied=True
    )
    assert sizes_of({**CONFIG, "head_dim": None}.get).head_dim == 8


@pytest.mark.parametrize("name", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_experts_go_by_several_names(name: str) -> None:
    config = {name: 8, "moe_intermediate_size": 16}
    assert experts_sizes_of(config.get) == Experts(count=8, intermediate=16)
    assert experts_sizes_of({**config, "n_shared_experts": 2}.get).shared_intermediate == 32
    assert experts_sizes_of({**config, "n_shared_experts": 0}.get).shared_intermediate == 0
    with pytest.raises(ValueError, match="n_shared_experts is -1"):
        experts_sizes_of({**config, "n_shared_experts": -1}.get)


def test_latent_attention_may_have_a_query_of_full_rank() -> None:
    config = {
        "num_attention_heads": 4,
        "kv_lora_rank": 3,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 6,
        "v_head_dim": 7,
    }
    assert latent_sizes_of(config.get) == Latent(heads=4, q_rank=None, kv_rank=3, nope_dim=5, rope_dim=6, v_dim=7)
    assert latent_sizes_of({**config, "q_lora_rank": 2}.get).q_rank == 2


def test_what_is_missing_or_no_size_is_named() -> None:
    with pytest.raises(ValueError, match="has no vocab_size: is it the one of this family"):
        sizes_of({name: value for name, value in CONFIG.items() if name != "vocab_size"}.get)
    with pytest.raises(ValueError, match="has no num_experts or n_routed_experts or num_local_experts"):
        experts_sizes_of({"moe_intermediate_size": 1}.get)
    for wrong in (0, -1, True, "4", 4.0):
        with pytest.raises(ValueError, match="it is a whole number, at least 1"):
            sizes_of({**CONFIG, "num_attention_heads": wrong}.get)
