"""A worker of either release: a trainer or an engine that does what it is told, one line after another.

It uses what the SDK of both releases has. Each order is a JSON array and is answered with one line: what it returns, or
the error and its sentence.
"""

import hashlib
import json
import sys
from typing import Any

import torch

import tensorhub

TIMEOUT_S = 40.0


def values(seed: int) -> dict[str, torch.Tensor]:
    """Return a megabyte of weights."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(257, 513, generator=generator),
        "layers.1.weight": torch.randn(191, 509, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(seed),
    }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a digest of all bytes."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        found.update(tensors[name].detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Actor:
    """One process's shards, by replica."""

    def __init__(self) -> None:
        self.hub: Any = None
        self.shards: dict[str, Any] = {}

    def connect(self, job: str, agent: str) -> None:
        self.hub = tensorhub.connect(job, agent=agent)

    def register(self, model: str, replica: str, install: str, seed: int) -> None:
        self.shards[replica] = self.hub.register(
            model, values(seed), replica=replica, install=install, timeout_s=TIMEOUT_S
        )

    def write(self, replica: str, seed: int) -> None:
        for name, tensor in values(seed).items():
            self.shards[replica].tensors[name].copy_(tensor)

    def publish(self, replica: str, version: int) -> int:
        found: int = self.shards[replica].publish(version=version, timeout_s=TIMEOUT_S)
        return found

    def unpublish(self, replica: str) -> None:
        self.shards[replica].unpublish(timeout_s=TIMEOUT_S)

    def read(self, replica: str, version: Any) -> list[Any]:
        found = self.shards[replica].replicate(version, timeout_s=TIMEOUT_S)
        return [found, digest(self.shards[replica].tensors)]

    def release(self, replica: str) -> None:
        self.shards.pop(replica).release()

    def close(self) -> None:
        if self.hub is not None:
            self.hub.close()


def main() -> None:
    """Do as told until the orders end."""
    actor = Actor()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            answer = [getattr(actor, what)(*arguments), None]
        except Exception as why:  # noqa: BLE001 (whoever gave the order judges it)
            answer = [None, f"{type(why).__name__}: {why}"]
        print(json.dumps(answer), flush=True)
    actor.close()


if __name__ == "__main__":
    main()
