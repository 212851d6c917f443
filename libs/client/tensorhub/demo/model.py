"""The demo's model, a small Llama over bytes as transformers builds it, and the text that it learns.

Nothing is downloaded: the weights are random numbers, a token is a byte of UTF-8, and the text is made by a small
grammar, so that the loss falls within a few steps.
"""

from collections.abc import Iterator
from random import Random
from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MODEL: Final = "policy"
"""Under this name the hub knows the model."""

ROWS: Final = 8
ROW_TOKENS: Final = 64
TEXT_VERSES: Final = 1000
PROMPT: Final = "the "
ANSWER_TOKENS: Final = 24
TEMPERATURE: Final = 0.5
BYTES: Final = 256

CONFIG: Final = LlamaConfig(
    vocab_size=BYTES + 4,  # The bytes, where a text begins and ends, and padding.
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=256,
    bos_token_id=BYTES,
    eos_token_id=BYTES + 1,
    pad_token_id=BYTES + 2,
    dtype="float32",
)

BIRDS: Final = ("heron", "raven", "swallow", "plover", "kestrel", "curlew")
PLACES: Final = ("river", "harbour", "orchard", "valley", "island", "meadow")
DEEDS: Final = ("wanders", "lingers", "gathers", "answers", "shelters", "remembers")
REFRAIN: Final = "and the river runs to the sea again,\nand the river remembers the rain.\n\n"


def build(seed: int = 0) -> LlamaForCausalLM:
    """Return the model with random weights, the same for each seed."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(CONFIG)


def build_empty() -> LlamaForCausalLM:
    """Return the model without memory for its weights, for an engine: they come from the hub."""
    with torch.device("meta"):
        return LlamaForCausalLM(CONFIG).eval()


def batches(seed: int = 0) -> Iterator[torch.Tensor]:
    """Yield random rows of the text for ever: int64[ROWS, ROW_TOKENS]."""
    draw = Random(seed)  # noqa: S311 (the text is for reading, not for secrets)
    verses = (
        f"the {draw.choice(BIRDS)} {draw.choice(DEEDS)} over the {draw.choice(PLACES)},\n{REFRAIN}"
        for _ in range(TEXT_VERSES)
    )
    text = torch.tensor(list("".join(verses).encode()))
    while True:
        yield torch.stack(
            [text[start : start + ROW_TOKENS] for start in draw.sample(range(len(text) - ROW_TOKENS), ROWS)]
        )


def generate(model: LlamaForCausalLM) -> str:
    """Return what the model says after a prompt, in one printable line."""
    prompt = torch.tensor([list(PROMPT.encode())])
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=ANSWER_TOKENS,
        do_sample=True,
        temperature=TEMPERATURE,
    )
    text = bytes(token for token in tokens[0].tolist() if token < BYTES).decode(errors="replace")
    # A model in training also says control characters, which a terminal would obey.
    return "".join("/" if char == "\n" else char if char.isprintable() else "." for char in text)
