"""A worker of any release: a trainer or an engine that does what it is told, one line after another.

It uses what the SDK of each release has, and imports nothing of the tests, since it also runs by another release's
interpreter. An order is a JSON array: a method of `Worker` and its arguments. It is answered by one line: what the
method returns and None, or None and the error.
"""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

import tensorhub

if TYPE_CHECKING:
    # An older release has no such name.
    from tensorhub.arguments import Install

TIMEOUT_S = 40.0


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(257, 513, generator=generator),
        "layers.1.weight": torch.randn(191, 509, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(seed),
    }


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        found.update(tensors[name].detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Worker:
    """One process's shards, by replica."""

    def __init__(self) -> None:
        self.hub: Any = None
        self.shards: dict[str, Any] = {}

    def connect(self, job: str, agent: str | None = None) -> None:
        self.hub = tensorhub.connect(job, agent=agent)

    def register(self, model: str, replica: str, install: "Install", seed: int) -> int | None:
        return self._register(model, values(seed), replica=replica, install=install)

    def register_full(self, model: str, replica: str, count: int, value: float, options: dict[str, Any]) -> int | None:
        options = dict(options)
        return self._register(
            model, {options.pop("name", "w"): torch.full((count,), value)}, replica=replica, **options
        )

    def _register(self, model: str, tensors: dict[str, torch.Tensor], replica: str, **options: Any) -> int | None:
        shard = self.hub.register(model, tensors, replica=replica, timeout_s=TIMEOUT_S, **options)
        self.shards[replica] = shard
        version: int | None = shard.version
        return version

    def write(self, replica: str, seed: int) -> None:
        for name, tensor in values(seed).items():
            self.shards[replica].tensors[name].copy_(tensor)

    def fill(self, replica: str, value: float) -> None:
        for tensor in self.shards[replica].tensors.values():
            tensor.fill_(value)

    def shown(self, replica: str) -> list[float]:
        tensors = self.shards[replica].tensors.values()
        return sorted({value for tensor in tensors for value in tensor.float().unique().tolist()})

    def publish(self, replica: str, version: int | None = None) -> int:
        found: int = self.shards[replica].publish(version=version, timeout_s=TIMEOUT_S)
        return found

    def unpublish(self, replica: str) -> None:
        self.shards[replica].unpublish(timeout_s=TIMEOUT_S)

    def read(self, replica: str, version: Any) -> list[Any]:
        found = self.shards[replica].replicate(version, timeout_s=TIMEOUT_S)
        return [found, digest(self.shards[replica].tensors)]

    def replicate(self, replica: str, version: Any = "latest") -> int:
        found: int = self.shards[replica].replicate(version, timeout_s=TIMEOUT_S)
        return found

    def update(self, replica: str, wait_s: float) -> int | None:
        found: int | None = self.shards[replica].update(wait_s=wait_s, timeout_s=TIMEOUT_S)
        return found

    def release(self, replica: str) -> None:
        self.shards.pop(replica).release()

    def die_overwriting(self, replica: str, value: float) -> None:
        """Be killed in the middle of a step."""
        with self.shards[replica].overwriting() as tensors:
            for tensor in tensors.values():
                tensor.fill_(value)
            self.die()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fork(self) -> None:
        """Go on in a child, and let this process end without a word to the hub."""
        if os.fork():
            os._exit(0)

    def close(self) -> None:
        if self.hub is not None:
            self.hub.close()


def serve(orders: Callable[[str], Callable[..., Any]]) -> None:
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            answer = [orders(what)(*arguments), None]
        except Exception as why:  # noqa: BLE001 (the process that gave the order judges it)
            answer = [None, f"{type(why).__name__}: {why}"]
        print(json.dumps(answer), flush=True)


def main() -> None:
    worker = Worker()
    serve(lambda what: getattr(worker, what))
    worker.close()


if __name__ == "__main__":
    main()
