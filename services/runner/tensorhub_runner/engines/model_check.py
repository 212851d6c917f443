"""Whether a model computes packed rows as it computes whole sequences.

Packed rows are right only where attention alone looks from one row at another, and where the engine's attention is the
model's own. Both are asked of the model itself, with its weights: two short sequences, in parts and side by side, against
the same sequences without a cache and with the model's own attention.
"""

from array import array
from typing import Final

import torch

from tensorhub_common.errors import NotInThisVersion
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import Sampling
from tensorhub_runner.engines.kv_cache import KvCache
from tensorhub_runner.engines.packed_model import PackedModel
from tensorhub_runner.engines.schedule import Schedule, Sequence

LENGTHS: Final = (9, 5)
PREFILL_TOKENS: Final = 4
TOLERANCES: Final = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""How far logits of one model may be apart when they are computed in another order, over the largest of them."""


def check(model: PackedModel) -> bool:
    """Return whether a model could be checked: not while its weights make NaN.

    Raises `NotInThisVersion` where packed rows have other logits than the model has by itself.
    """
    texts = [[(7 * place + 3 * length) % model.vocabulary for place in range(length)] for length in LENGTHS]
    plain = [model.plain_logits(text) for text in texts]
    if not all(each.isfinite().all() for each in plain):
        return False
    for packed, right in zip(_packed_logits(model, texts), plain, strict=True):
        largest = right.abs().max().item()
        apart = (packed - right).abs().max().item()
        if not apart <= TOLERANCES.get(model.dtype, 0.0) * max(largest, torch.finfo(model.dtype).tiny):
            raise NotInThisVersion(
                f"{model.name} computes other logits when sequences are packed ({apart:.3g} apart, of {largest:.3g}): "
                "it has something that looks across tokens and is no attention as this engine knows it"
            )
    return True


def _packed_logits(model: PackedModel, texts: list[list[int]]) -> list[torch.Tensor]:
    cache, schedule = KvCache(sum(LENGTHS)), Schedule(len(texts), sum(LENGTHS), PREFILL_TOKENS)
    for number, text in enumerate(texts):
        ids = array("i", text)
        schedule.begin(Sequence(Attempt(0, number), ids.tobytes(), len(ids), ids, Sampling(1, 0)))
    found = dict[int, torch.Tensor]()
    while len(found) < len(texts):
        chunks = schedule.plan()
        found |= {chunk.sequence.attempt.n: logits for chunk, logits in model.compute(cache, chunks)}
        for chunk in chunks:
            schedule.computed(chunk)
    return [found[number] for number in range(len(texts))]
