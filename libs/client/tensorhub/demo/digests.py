"""Digests of a model's bytes, by which the demo compares every copy with the trainer's weights.

They are taken of the tensors that the model computes with, by other code and another hash than the hub's own digests:
so a fault of the hub can't hide itself.
"""

import hashlib
from itertools import chain
from typing import Final

import torch
from torch import nn

DIGEST_BYTES: Final = 16


def digests_of(model: nn.Module) -> dict[str, str]:
    """Return the BLAKE2b digest of each parameter's and buffer's bytes, by name."""
    return {name: _digest(tensor) for name, tensor in _tensors(model)}


def nbytes_of(model: nn.Module) -> int:
    """Return how many bytes these digests speak of."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in _tensors(model))


def _tensors(model: nn.Module) -> chain[tuple[str, torch.Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
