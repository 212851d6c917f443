"""Whether a model computes packed rows as it computes whole sequences.

Packed rows are right only where attention alone looks from one row at another, and where the engine's attention is the
model's own. Both are asked of the model itself, with its weights: two short sequences, in parts and side by side,
against the same sequences without a cache and with the model's own attention.

In exact mode a second thing is asked: whether a row gets the same bits in each place of a pass, whatever is beside it.
Which instructions a kernel takes for a place follows from shapes, not from values. So if for each two places that are
neighbours one row of random or trained numbers has the same bits in both, then all rows have.
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
ROWS_BEFORE: Final = (1, 15, 6)
"""One row before compares each place with its neighbour; 15 do so for logits, which the last rows alone have. Six are
more than has to be asked."""


def check(model: PackedModel) -> bool:
    """Return whether a model could be checked: not while its weights make NaN, or are as good as all zero.

    Raises `NotInThisVersion` where packed rows have other logits than the model has by itself.
    """
    texts = [[(7 * place + 3 * length) % model.vocabulary for place in range(length)] for length in LENGTHS]
    plain = [model.plain_logits(text) for text in texts]
    if not all(each.isfinite().all() and each.min() < each.max() for each in plain):
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


def has_equal_rows(model: PackedModel) -> bool:
    """Return whether all that is computed of a row has the same bits in each place of a pass."""
    alone = _row_bits(model, 0)
    return all(
        torch.equal(bits, alone[what]) for before in ROWS_BEFORE for what, bits in _row_bits(model, before).items()
    )


def _row_bits(model: PackedModel, before: int) -> dict[str, torch.Tensor]:
    """Compute a sequence as long as a pass behind so many other rows; return all that is computed of it, by what it is.

    What is asked for of the last rows alone, as logits are, may be missing for the first ones.
    """
    rows = model.exact_rows
    texts = [*([5 * number + 1] for number in range(before)), [7 * place for place in range(rows)]]
    cache, schedule = _begun(model, texts, prefill_tokens_max=rows)
    chunks = schedule.plan()
    with model.recorded() as passes:
        model.compute(cache, chunks)
    places = torch.tensor(chunks[-1].sequence.places)
    bits = {
        f"cache {layer} {which}": part for layer in cache.layers for which, part in enumerate(cache.read(layer, places))
    }
    for token in range(rows):
        number, place = divmod(before + token, rows)
        for name, made in passes[number].items():
            if made.ndim > 1 and made.shape[:2] == (1, rows):
                bits[f"token {token} {name}"] = made[0, place]
    return bits


def _packed_logits(model: PackedModel, texts: list[list[int]]) -> list[torch.Tensor]:
    cache, schedule = _begun(model, texts, prefill_tokens_max=PREFILL_TOKENS)
    found = dict[int, torch.Tensor]()
    while len(found) < len(texts):
        chunks = schedule.plan()
        found |= {chunk.sequence.attempt.n: logits for chunk, logits in model.compute(cache, chunks)}
        for chunk in chunks:
            schedule.computed(chunk)
    return [found[number] for number in range(len(texts))]


def _begun(model: PackedModel, texts: list[list[int]], prefill_tokens_max: int) -> tuple[KvCache, Schedule]:
    tokens_max = sum(map(len, texts))
    cache, schedule = KvCache(tokens_max), Schedule(tokens_max, prefill_tokens_max)
    for number, text in enumerate(texts):
        ids = array("i", [each % model.vocabulary for each in text])
        schedule.begin(Sequence(Attempt(0, number), ids.tobytes(), len(ids), ids, Sampling(1, 0)))
    return cache, schedule
