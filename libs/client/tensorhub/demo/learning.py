"""The demo's training: a step takes rows of the corpus to a loss, and AdamW moves the weights where they stand.

Always true: learners of one seed see the same rows in the same order; `step` changes the weights in place, so it may
only be called while the version that stands there is not published.
"""

import time
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from transformers import LlamaForCausalLM

from tensorhub.demo.corpus import verses
from tensorhub.demo.model import encode

CORPUS_CHARACTERS: Final = 200_000
WARMUP_STEPS: Final = 4
"""AdamW's first steps are as long as its rate, whatever the gradient; so the rate begins low."""
GRADIENT_NORM_MAX: Final = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of learning did."""

    number: int
    """Counted from 1."""
    loss: float
    """Mean cross-entropy in nats per byte, before the step."""
    seconds: float


class Learner:
    """A model in training. The optimizer is built here, before or after the model moves into hub memory."""

    def __init__(
        self, model: LlamaForCausalLM, *, rows: int = 8, row_tokens: int = 64, rate: float = 1e-3, seed: int = 0
    ) -> None:
        self.model = model
        self._rows, self._row_tokens = rows, row_tokens
        self._text = torch.tensor(encode(verses(seed, CORPUS_CHARACTERS)))
        self._chance = torch.Generator().manual_seed(seed)
        # Unfused, AdamW would walk through the weights a dozen times.
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), fused=True)
        self._rate = rate
        self._number = 0

    def step(self) -> Step:
        """Take one step on fresh rows."""
        begin = time.perf_counter()
        self._number += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * min(1.0, self._number / WARMUP_STEPS)
        loss = self._loss(self._batch())
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)
        self._optimizer.step()
        return Step(self._number, loss.item(), time.perf_counter() - begin)

    def _batch(self) -> torch.Tensor:
        """Return rows of tokens, one longer than what the model reads: int64[rows, row_tokens + 1]."""
        length = self._row_tokens + 1
        starts = torch.randint(len(self._text) - length, (self._rows, 1), generator=self._chance)
        return self._text[starts + torch.arange(length)]

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
