"""Attention of rows that belong to many sequences: what stands in for a model's own in transformers.

A model of transformers computes all but attention row by row, so the rows of a step, prompts and single tokens of any
sequences, go through it as if they were one sequence: input_ids[1, n]. Attention alone has to know whose row is whose.
`Rows` tells it, which the model passes down to here (`rows=`) with keys, values and queries.

A model whose attention can't be replaced this way, or means more than this one does, computes something else then.
`model_check` compares both, and refuses such a model.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AttentionInterface

from tensorhub_common.errors import NotInThisVersion
from tensorhub_runner.engines.kv_cache import KvCache
from tensorhub_runner.engines.schedule import Chunk

PACKED: Final = "tensorhub_packed"
"""Under this name transformers knows `packed_attention`."""
PADDED_TIMES: Final = 2
"""Limit of a padded batch's longest sequence over its shortest, so that at most half of what is read is padding."""
PADDED_TOKENS: Final = 64
"""Up to this length sequences are padded whatever the shortest is: many small batches would cost more."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend at once: one token of each of several sequences, or several of one sequence."""

    first: int
    """Which of all rows is the first of these. The rest follow, by sequence and then by position."""
    places: torch.Tensor
    """int64[sequences, longest]: where their tokens are, filled up with each one's first place."""
    positions: torch.Tensor
    """int64[sequences, rows of each]."""

    def visible(self, window: int | None) -> torch.Tensor:
        """Return which token each row sees: bool[sequences, rows of each, longest]."""
        tokens = torch.arange(self.places.shape[1], device=self.places.device)
        positions = self.positions.unsqueeze(-1)
        seen = tokens <= positions
        return seen if window is None else seen & (tokens > positions - window)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one pass through a model, and the cache that they read and write."""

    cache: KvCache
    ids: torch.Tensor
    """int64[1, n]: their tokens."""
    positions: torch.Tensor
    """int64[1, n]: each one's place in its own sequence."""
    places: torch.Tensor
    """int64[k]: where the keys and values of the first k rows go. The others are there to fill up."""
    wanted: torch.Tensor
    """int64[m]: the rows whose logits are asked for."""
    groups: tuple[Group, ...]
    """What attends at once. None in exact mode."""
    sequences: tuple[torch.Tensor, ...] = ()
    """In exact mode, by row: where its sequence's tokens are up to its own, int64[position + 1]."""


def exact_rows(cache: KvCache, tokens: list[tuple[Chunk, int]], count: int, device: torch.device) -> Rows:
    """Return some tokens of chunks, each with its position, filled up to `count` rows.

    Logits are asked for of all rows or of none, so that the last layer has two shapes.
    """
    blank = [0] * (count - len(tokens))
    ids = [chunk.sequence.tokens[position] for chunk, position in tokens]
    positions = [position for _, position in tokens]
    is_wanted = any(is_last(chunk, position) for chunk, position in tokens)
    return Rows(
        cache,
        torch.tensor([[*ids, *blank]], device=device),
        torch.tensor([[*positions, *blank]], device=device),
        torch.tensor([chunk.sequence.places[position] for chunk, position in tokens], device=device),
        torch.arange(count if is_wanted else 0, device=device),
        groups=(),
        sequences=tuple(
            torch.tensor(chunk.sequence.places[: position + 1], device=device) for chunk, position in tokens
        ),
    )


def is_last(chunk: Chunk, position: int) -> bool:
    """Tell whether a token is drawn behind this one."""
    return chunk.is_last and position == chunk.start + chunk.count - 1


def packed_rows(cache: KvCache, chunks: list[Chunk], device: torch.device) -> tuple[Rows, list[Chunk]]:
    """Return all tokens of chunks as rows, and the chunks whose logits are asked for, in the order of these."""
    ordered = sorted(chunks, key=lambda each: (each.count > 1, each.start))
    starts = np.cumsum([0, *(each.count for each in ordered)])
    wanted = [number for number, each in enumerate(ordered) if each.is_last]
    groups, number = list[Group](), 0
    while number < len(ordered):
        alike = _alike(ordered, number)
        groups.append(_group(ordered[number : number + alike], int(starts[number]), device))
        number += alike

    def column(values: list[npt.NDArray[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device)

    spans = [slice(each.start, each.start + each.count) for each in ordered]
    pairs = list(zip(ordered, spans, strict=True))
    rows = Rows(
        cache,
        column([np.array(each.sequence.tokens[span], np.int64) for each, span in pairs]).unsqueeze(0),
        column([np.arange(span.start, span.stop) for span in spans]).unsqueeze(0),
        column([np.array(each.sequence.places[span], np.int64) for each, span in pairs]),
        torch.tensor([int(starts[number + 1]) - 1 for number in wanted], dtype=torch.int64, device=device),
        tuple(groups),
    )
    return rows, [ordered[number] for number in wanted]


def _alike(ordered: list[Chunk], number: int) -> int:
    """Return how many chunks from this one on make a group: single rows of sequences about as long."""
    first = ordered[number]
    if first.count > 1:
        return 1
    longest = max(PADDED_TIMES * (first.start + 1), PADDED_TOKENS)
    return sum(each.count == 1 and each.start < longest for each in ordered[number:])


def _group(chunks: list[Chunk], first: int, device: torch.device) -> Group:
    longest = max(each.start + each.count for each in chunks)
    places = np.empty((len(chunks), longest), np.int64)
    for row, each in zip(places, chunks, strict=True):
        row[: each.start + each.count] = each.sequence.places[: each.start + each.count]
        # Not a place of another sequence: what is masked has the weight 0, and 0 times NaN is NaN.
        row[each.start + each.count :] = each.sequence.places[0]
    positions = np.array([range(each.start, each.start + each.count) for each in chunks], np.int64)
    return Group(first, torch.from_numpy(places).to(device), torch.from_numpy(positions).to(device))


# ---------------------------------------------------------------------------------------------- what a model calls


def packed_attention(  # noqa: D417 (transformers names the other arguments)
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    rows: Rows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attend with query[1, heads, n, d], key[1, kv heads, n, d] and value[1, kv heads, n, e] in place of a model's own.

    Returns [1, n, heads, e].

    Args:
        rows: Whose rows these are. It writes `key` and `value` to their places before any row attends.
    """
    if attention_mask is not None or others.get("s_aux") is not None or not getattr(module, "is_causal", True):
        raise NotInThisVersion(
            f"{type(module).__name__} attends in a way that this engine does not know: another mask than the causal "
            "one, or sinks"
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    kept = len(rows.places)
    rows.cache.write(layer, rows.places, key[0, :, :kept].transpose(0, 1), value[0, :, :kept].transpose(0, 1))
    if rows.sequences:
        out = value.new_zeros((1, query.shape[2], query.shape[1], value.shape[-1]))
        for row, places in enumerate(rows.sequences):
            keys, values = rows.cache.read(layer, places if sliding_window is None else places[-sliding_window:])
            out[0, row] = _attend_one(query[0, :, row].contiguous(), keys, values, scaling, softcap)
        return out, None
    parts = [_attend(query[0], rows.cache, layer, group, scaling, sliding_window, softcap) for group in rows.groups]
    return torch.cat(parts).unsqueeze(0), None


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, softcap: float | None
) -> torch.Tensor:
    """Return one row's attention, [heads, e], with query[heads, d], keys[n, kv heads, d] and values[n, kv heads, e].

    All of these begin a piece of memory of their own, and their shapes follow from the row's position alone.
    """
    heads, kv_heads = query.shape[0], keys.shape[1]
    grouped = query.reshape(kv_heads, heads // kv_heads, -1)
    scores = torch.matmul(grouped, keys.permute(1, 2, 0)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.matmul(scores.softmax(dim=-1), values.transpose(0, 1)).reshape(heads, -1)


def _attend(
    query: torch.Tensor,
    cache: KvCache,
    layer: int,
    group: Group,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Return the attention of a group's rows, [n, heads, e], with query[heads, all rows, d]."""
    sequences, each = group.positions.shape
    heads = query.shape[0]
    keys, values = (part.transpose(1, 2) for part in cache.read(layer, group.places))
    queries = query[:, group.first : group.first + sequences * each].unflatten(1, (sequences, each)).transpose(0, 1)
    visible = group.visible(window).unsqueeze(1)
    if softcap is None:
        out = nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible, scale=scaling, enable_gqa=True
        )
    else:
        kv_heads = keys.shape[1]
        # [sequences, kv heads, heads of each, rows, d], so that no key is repeated.
        grouped = queries.unflatten(1, (kv_heads, heads // kv_heads))
        scores = torch.matmul(grouped, keys.unsqueeze(2).transpose(-1, -2)) * scaling
        scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(queries.dtype)
        out = torch.matmul(weights, values.unsqueeze(2)).flatten(1, 2)
    return out.transpose(1, 2).flatten(0, 1)


AttentionInterface.register(PACKED, packed_attention)
