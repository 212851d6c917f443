"""Scores the tokens of a response that was made before: what the same weights draw there, and how likely they are.

All tokens are given, so they are computed as a prompt is, several rows a pass. In exact mode that changes no bit of
what was computed one token at a time (docs/design/rollouts/engine.md).
"""

from array import array
from collections.abc import Iterator
from typing import Final

from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, Sampling
from tensorhub_runner.engines import sampling as token_sampling
from tensorhub_runner.engines.kv_cache import KvCache
from tensorhub_runner.engines.packed_model import PackedModel
from tensorhub_runner.engines.sampling import Scored
from tensorhub_runner.engines.schedule import Chunk, Sequence

LOGITS_ROWS_MAX: Final = 64
"""Limit of the rows whose logits are in memory at once: each has a number for each token of the vocabulary."""


def scores(
    model: PackedModel, prompt: bytes, tokens: bytes, start: int, end: int, sampling: Sampling
) -> Iterator[Scored | None]:
    """Score tokens `start` to `end` of a response behind those before them. None: the logits there are no numbers."""
    prompt_count = len(prompt) // TOKEN_BYTES
    ids = array("i", prompt + tokens[: TOKEN_BYTES * end])
    sequence = Sequence(Attempt(0, 0), prompt, prompt_count, ids, sampling, places=array("q", range(len(ids))))
    cache = KvCache(len(ids))
    # Behind this one the first of the tokens is drawn.
    first = prompt_count + start - 1
    if first:
        model.compute(cache, [Chunk(sequence, 0, first, is_last=False, is_decode=False)])
    last = prompt_count + end - 1
    for at in range(first, last, LOGITS_ROWS_MAX):
        rows = range(at, min(at + LOGITS_ROWS_MAX, last))
        chunks = [Chunk(sequence, each, 1, is_last=True, is_decode=False) for each in rows]
        for chunk, logits in model.compute(cache, chunks):
            position = chunk.start + 1
            yield token_sampling.score(logits, sampling, position, ids[position])
