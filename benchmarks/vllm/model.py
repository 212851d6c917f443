"""The model of these benchmarks: of Qwen2's shape, with random weights."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 8192
CONTEXT = 512


def saved_model(folder: Path, layers: int, hidden: int) -> Qwen2ForCausalLM:
    """Make a model with heads of 64 elements, in float32, and write it as a checkpoint."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )
    module = Qwen2ForCausalLM(config).to(torch.float32)
    module.save_pretrained(folder)
    return module
