"""The demo's model: a small decoder of the Llama family over bytes, as transformers builds it.

A real model of a real library, so that the demo shows what a trainer and an engine have: layers, an optimizer, a
key-value cache, rotary buffers that no checkpoint keeps. Its tokenizer is the bytes of UTF-8, so nothing is downloaded.

Always true: `build` with one shape and seed makes the same weights; `hollow` has the same names, shapes and dtypes as
`build`, and no values: they come from the hub.
"""

from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tensorhub.demo.size import Size

BEGIN: Final = 256
END: Final = 257
VOCABULARY: Final = 260
"""256 bytes, BEGIN, END and two tokens to spare, so that the size is a multiple of 4."""


def build(size: Size, seed: int = 0) -> LlamaForCausalLM:
    """Return a model on the CPU with fresh weights. Torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(_config(size))


def hollow(size: Size) -> LlamaForCausalLM:
    """Return the model without memory for its weights, for an engine that gets them from the hub."""
    with torch.device("meta"):
        return LlamaForCausalLM(_config(size)).eval()


def encode(text: str) -> list[int]:
    """Return the tokens of a text: its bytes."""
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    """Return the text of tokens. Special tokens say nothing, and broken UTF-8 shows as a replacement character."""
    return bytes(token for token in tokens if token < BEGIN).decode(errors="replace")


def _config(size: Size) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        intermediate_size=size.hidden,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.context_tokens,
        tie_word_embeddings=size.tied,
        bos_token_id=BEGIN,
        eos_token_id=END,
        dtype="float32",
    )
