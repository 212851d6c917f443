"""The model of `trainer`, a Llama of 190,000 parameters, and what it learns: to count once round a clock of 16 hours.

The prompt is an hour, one token. The right response is the 16 hours after it, as 14 → 15 0 1 … 13 14. The model begins
with random weights, so at first one hour in 16 follows rightly; a reward is all that it is ever told.

python -m tensorhub.demo.rl.clock MODEL     (MODEL: a folder for config.json, which `tensorhub up --model` takes)
"""

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MODEL: Final = "policy"
"""Under this name the hub knows the model."""
HOURS: Final = 16
"""The token ids are the hours."""

CONFIG: Final = LlamaConfig(
    vocab_size=HOURS,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
    dtype="float32",
)


def build(seed: int) -> LlamaForCausalLM:
    """Return the model with random weights, the same for each seed."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(CONFIG)


def hour_of(number: int, seed: int) -> int:
    """Return the hour that prompt `number` begins at: the same in each life of the trainer."""
    return Random(f"{seed}.{number}").randrange(HOURS)  # noqa: S311 (a draw of lots, no secret)


def reward(hour: int, token_ids: Sequence[int], until: int | None = None) -> float:
    """Return the share of the clock's steps, from one hour to the next, that a response makes: 0 to 1.

    Wanted are all 16, or those up to the hour `until`. Each counts once, so that going round within a few hours gains
    nothing. Only the right response has 1.
    """
    count = HOURS if until is None else (until - hour - 1) % HOURS + 1
    wanted = {((hour + at) % HOURS, (hour + at + 1) % HOURS) for at in range(count)}
    return len(wanted.intersection(pairwise((hour, *token_ids)))) / count


def main() -> None:
    """Write the configuration of the model for runners."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    CONFIG.save_pretrained(parser.parse_args().folder)


if __name__ == "__main__":
    main()
