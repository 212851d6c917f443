"""Compares every byte of a copy with what the trainer wrote before it published; and what the demo's programs print.

The digests are taken of the tensors that a program computes with, by other code and another hash than the hub's own:
so a fault of the hub can't hide itself.

Invariant: the trainer writes the digests of a version before anybody can read this version.
"""

import hashlib
import json
import sys
from itertools import chain
from pathlib import Path

import msgspec
import torch
from torch import nn


def record(directory: Path, version: int, model: nn.Module) -> None:
    """Write the digests of a version that is about to be published."""
    path(directory, version).write_text(json.dumps(digests(model)))


def differing(directory: Path, version: int, model: nn.Module) -> list[str]:
    """Return the names of the tensors that are not what the trainer wrote; one that is missing on a side differs."""
    written, found = json.loads(path(directory, version).read_text()), digests(model)
    return sorted(name for name in written.keys() | found.keys() if written.get(name) != found.get(name))


def path(directory: Path, version: int) -> Path:
    """Say where the digests of a version are stored."""
    return directory / f"{version}.json"


def digests(model: nn.Module) -> dict[str, str]:
    """Return the BLAKE2b digest of the bytes of each parameter and buffer, by name."""
    return {
        name: hashlib.blake2b(memory(tensor), digest_size=16).hexdigest() for name, tensor in tensors(model).items()
    }


def nbytes(model: nn.Module) -> int:
    """Return how many bytes the digests cover."""
    return sum(memory(tensor).nbytes for tensor in tensors(model).values())


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers."""
    return dict(chain(model.named_parameters(), model.named_buffers()))


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data


def report(kind: str, **facts: object) -> None:
    """Tell `run` what happened: one JSON object a line on stdout."""
    sys.stdout.write(msgspec.json.encode({"kind": kind, **facts}).decode() + "\n")
    sys.stdout.flush()
