"""A trainer or an engine of the benchmarks, in a process of its own: it does what lines on its standard input say.

Each line is a JSON object with the name of a method of `Worker` as "do" and its arguments; each is answered by one JSON
line. Times are of the clock that all processes of a machine share, so that the parent may compare them.
"""

import json
import mmap
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler, SamplingResult

import tensorhub
from tensorhub.arguments import Install
from tensorhub_common.observability.span_cost import SPAN_CPU

WAIT_S = 60.0

Answer = dict[str, object]


class Switched(Sampler):
    """Decides about each new trace as it was told last."""

    def __init__(self) -> None:
        self.is_on = True

    def should_sample(self, *arguments: Any, **named: Any) -> SamplingResult:  # noqa: ANN401 (they are passed on)
        """Ask the one sampler or the other."""
        return (ALWAYS_ON if self.is_on else ALWAYS_OFF).should_sample(*arguments, **named)

    def get_description(self) -> str:
        """Say what it is."""
        return "as told"


class Worker:
    """One shard of one model, and the connection that it was registered through."""

    def __init__(self) -> None:
        self.hub: tensorhub.Hub | None = None
        self.shard: tensorhub.Shard | None = None
        self.sampler = Switched()

    def trace_when_told(self) -> Answer:
        """Be an application with a provider of its own, whose sampler `trace` switches."""
        trace.set_tracer_provider(TracerProvider(sampler=self.sampler))
        return {}

    def trace(self, *, on: bool) -> Answer:
        """Have the versions from now on traced, or not."""
        self.sampler.is_on = on
        return {}

    def spans_cost(self) -> Answer:
        """Tell what this process has spent on finished spans."""
        return {"seconds": SPAN_CPU.spent_s}

    def register(
        self,
        *,
        socket: str,
        nats: str,
        job: str,
        model: str,
        replica: str,
        shapes: Mapping[str, Sequence[int]],
        fill: bool,
        install: Install = "in-place",
        shard: int = 0,
        shards: int = 1,
    ) -> Answer:
        """Connect to an agent and register one shard: of zeros, as new memory is, or with `fill` of random bits.

        Of several shards each has some rows of every tensor.
        """
        self.hub = tensorhub.connect(job, agent=socket, nats=nats)
        specs = {name: _rows(tuple(shape), shard, shards) for name, shape in shapes.items()}
        self.shard = self.hub.register(model, specs, replica=replica, install=install, shard=shard, shards=shards)
        if fill:
            random = np.random.Generator(np.random.SFC64(1 + shard))
            for tensor in self.shard.tensors.values():
                words = tensor.view(torch.int16).flatten().numpy()
                words[:] = np.frombuffer(random.bytes(words.nbytes), dtype=np.int16)
        return {}

    def change(self, *, part: float = 1.0, seed: int = 0) -> Answer:
        """Train: another value in every element, or in so large a part of them, anywhere."""
        chance = torch.Generator().manual_seed(seed)
        for tensor in self._registered().tensors.values():
            values = tensor.view(torch.int16)
            if part == 1:
                values.add_(1)
            else:
                values.add_(torch.rand(values.shape, generator=chance) < part)
        return {}

    def publish(self) -> Answer:
        """Publish the next version."""
        begin = time.perf_counter()
        version = self._registered().publish(timeout_s=WAIT_S)
        return {"begin": begin, "end": time.perf_counter(), "version": version}

    def unpublish(self) -> Answer:
        """Take the version back, so that the memory may change."""
        begin = time.perf_counter()
        self._registered().unpublish(timeout_s=WAIT_S)
        return {"begin": begin, "end": time.perf_counter()}

    def update(self, *, wait_s: float = 0, timeout_s: float = WAIT_S) -> Answer:
        """Fetch the newest version."""
        shard = self._registered()
        begin = time.perf_counter()
        version = shard.update(wait_s=wait_s, timeout_s=timeout_s)
        end = time.perf_counter()
        return {"begin": begin, "end": end, "version": version, "report": msgspec.to_builtins(shard.last_read)}

    def touch(self) -> Answer:
        """Read a byte of every page."""
        begin = time.perf_counter()
        for tensor in self._registered().tensors.values():
            tensor.view(torch.uint8).flatten()[:: mmap.PAGESIZE].sum()
        return {"seconds": time.perf_counter() - begin}

    def digest(self, *, shards: int = 1) -> Answer:
        """Hash all bytes, for the parent to compare: those of each of so many shards of what stands here."""
        hashers = [xxhash.xxh3_128() for _ in range(shards)]
        for name, tensor in sorted(self._registered().tensors.items()):
            for number, hasher in enumerate(hashers):
                begin, end = _bounds(tensor.shape[0], number, shards)
                hasher.update(name.encode())
                hasher.update(tensor[begin:end].view(torch.uint8).numpy().data)
        return {"digests": [hasher.hexdigest() for hasher in hashers]}

    def close(self) -> Answer:
        """Release the shard."""
        if self.hub is not None:
            self.hub.close()
        self.hub = self.shard = None
        return {}

    def _registered(self) -> tensorhub.Shard:
        assert self.shard is not None, "register first"
        return self.shard


def _bounds(rows: int, shard: int, shards: int) -> tuple[int, int]:
    """Return which rows of so many a shard has."""
    return rows * shard // shards, rows * (shard + 1) // shards


def _rows(shape: tuple[int, ...], shard: int, shards: int) -> tensorhub.TensorSpec:
    """Return a shard's rows of a tensor."""
    if shards == 1:
        return tensorhub.TensorSpec(shape, torch.bfloat16)
    begin, end = _bounds(shape[0], shard, shards)
    offset = (begin, *(0 for _ in shape[1:]))
    return tensorhub.TensorSpec((end - begin, *shape[1:]), torch.bfloat16, global_shape=shape, offset=offset)


def main() -> None:
    """Answer line by line until the input ends."""
    torch.set_num_threads(1)
    worker = Worker()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(worker, order.pop("do"))(**order)
        except tensorhub.TensorHubError as why:
            answer = {"error": f"{type(why).__name__}: {why}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
