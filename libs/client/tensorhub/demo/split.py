"""Splitting one model into shards by name, as pipeline parallelism does: the first layers here, the last ones there.

Each shard is an `nn.Module` that only holds parts of the model, under their full names. So `register` adopts those
very Parameter objects, and several `register` calls in one process each move their part of one model.

Always true of the shards: each parameter and buffer of the model is in exactly one of them, under the name it has in
the model; they follow the model's order; parts tied to each other are in one shard; the same model and number give
the same shards.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn

from tensorhub_common.errors import LayoutMismatch


def shard_modules(model: nn.Module, shards: int) -> list[nn.Module]:
    """Split a model into so many shards of about equal bytes. A list of layers is cut between layers, not within one.

    Raises `LayoutMismatch` when the model has fewer parts than that, or holds tensors outside of every part.
    """
    if _holds_tensors(model):
        raise LayoutMismatch("the model holds tensors itself, beside its parts; put them into a submodule to split it")
    groups = _tied_together(list(_parts("", model)))
    if not 1 <= shards <= len(groups):
        raise LayoutMismatch(f"a model of {len(groups)} parts can't be split into {shards} shards")
    cuts = _cuts([sum(_nbytes(part) for _, part in group) for group in groups], shards)
    return [_holding([part for group in groups[first:stop] for part in group]) for first, stop in pairwise(cuts)]


def _cuts(weights: list[int], shards: int) -> list[int]:
    """Return where each shard begins, and where the last one ends: about equal weight, at least one group each."""
    cuts, taken = [0], 0
    for number in range(1, shards):
        stop = cuts[-1] + 1
        taken += weights[cuts[-1]]
        share = sum(weights) * number / shards
        # A group goes to the side on which the greater part of it lies.
        while stop < len(weights) - (shards - number) and taken + weights[stop] / 2 <= share:
            taken += weights[stop]
            stop += 1
        cuts.append(stop)
    return [*cuts, len(weights)]


def _parts(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Walk to the parts that stay whole: those that hold tensors themselves, and the items of lists."""
    for name, child in module.named_children():
        here = f"{path}.{name}" if path else name
        if isinstance(module, nn.ModuleList) or _holds_tensors(child) or not [*child.children()]:
            yield here, child
        else:
            yield from _parts(here, child)


def _tied_together(parts: list[tuple[str, nn.Module]]) -> list[list[tuple[str, nn.Module]]]:
    """Group the parts that share a tensor object, each group at the place of its first part."""
    groups: list[tuple[list[tuple[str, nn.Module]], set[int]]] = []
    for part in parts:
        tensors = {id(tensor) for tensor in _tensors(part[1])}
        tied = [group for group in groups if group[1] & tensors]
        groups = [group for group in groups if group not in tied[1:]]
        if not tied:
            tied = [([], set())]
            groups.append(tied[0])
        for members, known in tied[1:]:
            tied[0][0].extend(members)
            tied[0][1].update(known)
        tied[0][0].append(part)
        tied[0][1].update(tensors)
    return [members for members, _ in groups]


def _holding(parts: list[tuple[str, nn.Module]]) -> nn.Module:
    """Return a tree of empty modules that holds the parts under their full names."""
    root = nn.Module()
    for path, part in parts:
        *above, last = path.split(".")
        holder = root
        for name in above:
            if name not in holder._modules:  # noqa: SLF001 (the public test would also find attributes)
                holder.add_module(name, nn.Module())
            holder = holder.get_submodule(name)
        holder.add_module(last, part)
    return root


def _holds_tensors(module: nn.Module) -> bool:
    """Tell whether the module holds a parameter or buffer itself, not through a child."""
    return any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _nbytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(module))
