"""Generation on the CPU: the demo's rollout, short and with a key-value cache.

Always true: the model's weights are only read; with the same model, prompt and seed the same text comes out.
"""

import torch
from transformers import DynamicCache, LlamaForCausalLM

from tensorhub.demo.model import BEGIN, END, decode, encode


@torch.inference_mode()
def generate(model: LlamaForCausalLM, prompt: str, *, tokens: int = 60, temperature: float = 0.0, seed: int = 0) -> str:
    """Return what the model says after the prompt: at most so many tokens, fewer if it ends the text.

    At temperature 0 the likeliest token is taken; otherwise one is drawn. The model's mode is put back.
    """
    training = model.training
    model.eval()
    try:
        return decode(_tokens(model, encode(prompt) or [BEGIN], tokens, temperature, seed))
    finally:
        model.train(training)


def one_line(text: str) -> str:
    """Return a text as it can stand in a table: a young model also says control characters, which a terminal obeys."""
    return "".join(" / " if char == "\n" else char if char.isprintable() else "·" for char in text)


def _tokens(model: LlamaForCausalLM, prompt: list[int], count: int, temperature: float, seed: int) -> list[int]:
    chance = torch.Generator().manual_seed(seed)
    cache = DynamicCache(config=model.config)
    said: list[int] = []
    read = torch.tensor([prompt])
    while len(said) < count:
        logits = model(input_ids=read, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        if temperature > 0:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=chance))
        else:
            token = int(logits.argmax())
        if token == END:
            break
        said.append(token)
        read = torch.tensor([[token]])
    return said
