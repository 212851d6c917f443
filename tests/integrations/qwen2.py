"""A model that vLLM and SGLang take, small enough for a CPU."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def save_qwen2(folder: Path, *, is_tied: bool = False) -> None:
    """Write it as a checkpoint. Its heads have 32 elements, which is the least that vLLM's CPU attention takes.

    `is_tied`: its output layer is its table of embeddings.
    """
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=is_tied,
    )
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
