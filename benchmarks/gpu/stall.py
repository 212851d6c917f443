"""How many steps of an engine's are lost while its next versions come.

The engine is a CUDA graph of matrix products over registered weights, replayed without a pause under a lock, as an
engine's step loop is. A second process of the hub publishes a version a second.
"""

import threading
import time
from typing import Final, NamedTuple

import torch

import tensorhub
from tensorhub.arguments import Install
from tensorhub.local.hub import LocalHub

KINDS: Final[tuple[tuple[str, Install], ...]] = (
    ("device", "in-place"),
    ("host", "in-place"),
    ("host", "staged"),
)

YIELD_S: Final = 50e-6


class Stall(NamedTuple):
    """One kind of hub memory."""

    memory: str
    install: str
    nbytes: int
    updates: int
    steps_alone: float
    """Steps a second while nothing comes."""
    steps_meanwhile: float

    @property
    def kept(self) -> float:
        """The share of steps that is left."""
        return self.steps_meanwhile / self.steps_alone


class _Engine:
    """A thread that replays a graph, and counts."""

    def __init__(self, weights: list[torch.Tensor], lock: threading.Lock) -> None:
        self._lock, self._ending = lock, False
        self.steps = 0
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            tokens = torch.randn(256, weights[0].shape[0], device="cuda", dtype=torch.bfloat16)
            state = tokens.clone()
            for weight in weights[:2]:
                torch.matmul(state, weight)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream):
                for weight in weights:
                    state = torch.tanh(state @ weight)
        self._stream = stream
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with torch.cuda.stream(self._stream):
            while not self._ending:
                with self._lock:
                    for _ in range(4):
                        self._graph.replay()
                    self._stream.synchronize()
                self.steps += 4
                # A lock of Python's is not fair: whoever waits for it would get no turn.
                time.sleep(YIELD_S)

    def rate(self, seconds: float) -> float:
        """Return the steps a second over some seconds."""
        before, began = self.steps, time.perf_counter()
        time.sleep(seconds)
        return (self.steps - before) / (time.perf_counter() - began)

    def end(self) -> None:
        """End the thread."""
        self._ending = True
        self._thread.join()


def measure(hub: LocalHub, memory: str, install: Install, layers: int, seconds: float) -> Stall:
    """Measure for some seconds with a version a second, and before for as long without any."""
    job, agents = f"stall-{time.time_ns()}", hub.hub.agents
    shape = (4096, 4096)
    here = tensorhub.connect(job, agent=agents[0].socket, nats=hub.hub.nats_all)
    there = tensorhub.connect(job, agent=agents[1].socket, nats=hub.hub.nats_all)
    given = {f"w{n}": torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 64 for n in range(layers)}
    trainer = here.register("m", given, replica="trainer", memory=memory, timeout_s=120)
    into = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
    engine = there.register("m", into, replica="engine", memory=memory, install=install, timeout_s=120)
    trainer.publish()
    engine.replicate()
    lock = threading.Lock()
    running = _Engine(list(engine.tensors.values()), lock)
    running.rate(0.5)
    alone = running.rate(seconds)
    updates, done = 0, threading.Event()

    def train() -> None:
        nonlocal updates
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not done.is_set():
                with trainer.overwriting(publish=True) as mine:
                    next(iter(mine.values())).add_(0.001)
                engine.update(wait_s=30, swap_under=lock)
                updates += 1
                done.wait(1.0)

    training = threading.Thread(target=train)
    training.start()
    meanwhile = running.rate(seconds)
    done.set()
    training.join()
    running.end()
    nbytes = sum(tensor.nbytes for tensor in engine.tensors.values())
    there.close()
    here.close()
    return Stall(memory, install, nbytes, updates, alone, meanwhile)
