"""FSDP2 on four ranks trains; an engine of two tensor-parallel ranks with fused tensors, and one undivided, follow.

No program converts weights. Each trainer rank registers the module that FSDP has sharded, each engine the tensors that
it computes with, and a mapping says what the fused and divided ones among these consist of.

tensorhub up &
python examples/fsdp_to_tp.py
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import get_context
from torch.nn.functional import cross_entropy, silu

import tensorhub
from tensorhub.mapping import Mapping, Rule, concat, share, tensor

TRAINERS, ENGINES = 4, 2
VOCABULARY, WIDTH, INNER, LAYERS = 50, 22, 30, 2
WAIT_S = 60


class Mlp(nn.Module):
    """As a trainer has it: each matrix whole, and by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to `x`."""
        result: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class FusedMlp(nn.Module):
    """As a rank of an engine has it: its rows of gate and up in one matrix, and its columns of down."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * INNER // ENGINES, bias=False)
        self.down_proj = nn.Linear(INNER // ENGINES, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to `x`, the same on every rank."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        partial: Tensor = self.down_proj(silu(gate) * up)
        dist.all_reduce(partial)
        return partial


def fused(rank: int) -> Mapping:
    """Say what a rank's tensors consist of. For real models there are ready ones: `tensorhub.mapping.llama`, ….

    What no rule is for is a whole tensor of the model, by its own name.
    """
    mine = share(INNER, rank, ENGINES)
    at = "layers.{layer}"
    return Mapping(
        title=f"rank {rank} of the engine",
        rules=(
            Rule(
                f"{at}.gate_up_proj.weight",
                concat(tensor(f"{at}.gate_proj.weight", mine), tensor(f"{at}.up_proj.weight", mine)),
            ),
            Rule(f"{at}.down_proj.weight", tensor("{name}", None, mine)),
        ),
        unknown="keep",
    )


class Model(nn.Module):
    """A language model in small."""

    def __init__(self, mlp: type[Mlp | FusedMlp] = Mlp) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(mlp() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each token's successor."""
        x: Tensor = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        result: Tensor = self.head(x)
        return result


class Shared(NamedTuple):
    """What all processes of this example share. A real trainer waits for no engine, and reports no logits."""

    store: str
    """A file by which the ranks of a group find each other."""
    versions: int
    all_have_read: Barrier
    logits: "Queue[tuple[str, int, list[float]]]"

    def join(self, group: str, rank: int, ranks: int) -> None:
        """Become a rank of a group that talks over gloo."""
        dist.init_process_group("gloo", init_method=f"file://{self.store}/{group}", rank=rank, world_size=ranks)

    def report(self, name: str, version: int, model: Model) -> None:
        """Report the logits of every token, and wait for all the other ranks."""
        with torch.no_grad():
            logits = model(torch.arange(VOCABULARY))
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.logits.put((name, version, logits.flatten().tolist()))
        self.all_have_read.wait(timeout=WAIT_S)


def train(shared: Shared, rank: int) -> None:
    """Be a rank of the trainer."""
    shared.join("trainer", rank, TRAINERS)
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (TRAINERS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    with tensorhub.connect() as hub:
        # The sharded parameters move into hub memory, and stay the objects that they were; nothing is copied later.
        policy = hub.register("sharded", model, replica="trainer", shard=rank, shards=TRAINERS)
        for version in range(1, shared.versions + 1):
            tokens = torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(8 * version + rank))
            optimizer.zero_grad()
            cross_entropy(model(tokens), (tokens + 1) % VOCABULARY).backward()
            with policy.overwriting(publish=True):
                optimizer.step()
            shared.report("trainer", version, model)
    dist.destroy_process_group()


def generate_divided(shared: Shared, rank: int) -> None:
    """Be a tensor-parallel rank of an engine."""
    shared.join("engine", rank, ENGINES)
    with torch.device("meta"):
        model = Model(FusedMlp)
    with tensorhub.connect() as hub:
        engine = hub.register("sharded", model, replica="divided", shard=rank, shards=ENGINES, mapping=fused(rank))
        for version in range(1, shared.versions + 1):
            engine.replicate(version)
            shared.report("divided engine", version, model)
    dist.destroy_process_group()


def generate_alone(shared: Shared, _rank: int) -> None:
    """Be an engine that is not divided."""
    with torch.device("meta"):
        model = Model()
    with tensorhub.connect() as hub:
        engine = hub.register("sharded", model, replica="undivided")
        for version in range(1, shared.versions + 1):
            engine.replicate(version)
            shared.report("undivided engine", version, model)


def main() -> None:
    """Start all ranks, and compare what they say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=3)
    versions = parser.parse_args().versions
    # Forked, so that torch is imported once for all. Nothing has been started yet that could not be forked.
    context = get_context("fork")
    ranks: list[tuple[Callable[[Shared, int], None], int]] = [
        *((train, rank) for rank in range(TRAINERS)),
        *((generate_divided, rank) for rank in range(ENGINES)),
        (generate_alone, 0),
    ]
    with tempfile.TemporaryDirectory() as store:
        shared = Shared(store, versions, context.Barrier(len(ranks)), context.Queue())
        processes = [context.Process(target=rank, args=(shared, number), daemon=True) for rank, number in ranks]
        # Ctrl-C in a terminal reaches all processes. The ranks ignore it, and this one ends them.
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for process in processes:
            process.start()
        signal.signal(signal.SIGINT, on_interrupt)
        try:
            for version in range(1, versions + 1):
                reports = [shared.logits.get(timeout=WAIT_S) for _ in range(3)]
                compare(version, {name: torch.tensor(logits) for name, _, logits in reports})
            for process in processes:
                process.join()
        finally:
            # All of them before any is waited for: a rank that lives longer would say that it misses the others.
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def compare(version: int, logits: dict[str, Tensor]) -> None:
    """Print how far the logits of the engines differ from the trainer's."""
    trainer = logits.pop("trainer")
    for name, found in sorted(logits.items()):
        differs = (found - trainer).abs().max().item()
        print(f"version {version}: the {name}'s logits differ from the trainer's by at most {differs:.2g}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
