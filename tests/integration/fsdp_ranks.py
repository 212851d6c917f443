"""The ranks of test_fsdp_to_tp.py: each is a process, and does in turn what it reads from its standard input.

Orders and answers are those of tests/kit/worker.py.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.kit.llama import CONFIG, Llama, Ranks, questions
from tests.kit.llama_divided import bits, divided
from tests.kit.worker import serve
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tensorhub
from tensorhub import mapping
from tensorhub.sync.hub import Shard

Orders = dict[str, Callable[..., Any]]


def main() -> None:
    """Be the rank that the arguments name."""
    role, rank, ranks, directory, dtype = sys.argv[1:6]
    torch.set_num_threads(1)
    if int(ranks) > 1:
        store = f"file://{directory}/{role}.ranks"
        dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=int(ranks))
    with tensorhub.connect() as hub:
        make = {"trainer": _trainer, "hybrid": _hybrid, "tp": _tensor_parallel, "whole": _whole}[role]
        orders = make(hub, int(rank), int(ranks), Path(directory), getattr(torch, dtype))
        serve(orders.__getitem__)
    if dist.is_initialized():
        dist.destroy_process_group()


def _trainer(hub: tensorhub.Hub, rank: int, ranks: int, directory: Path, dtype: torch.dtype) -> Orders:
    """FSDP2 over all ranks."""
    return _trained(hub, rank, ranks, init_device_mesh("cpu", (ranks,)), directory, dtype)


def _hybrid(hub: tensorhub.Hub, rank: int, ranks: int, directory: Path, dtype: torch.dtype) -> Orders:
    """HSDP: two halves of the ranks have the same."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    return _trained(hub, rank, ranks, mesh, directory, dtype)


def _trained(
    hub: tensorhub.Hub, rank: int, ranks: int, mesh: DeviceMesh, directory: Path, dtype: torch.dtype
) -> Orders:
    torch.manual_seed(0)
    model = Llama().to(dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parameters = dict(model.named_parameters())
    policy = hub.register("policy", model, replica="trainer", shard=rank, shards=ranks)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())

    def step(version: int) -> float:
        """Learn from a batch of this rank's own, and publish what was learnt."""
        torch.manual_seed(100 * version + rank)
        tokens = questions()[torch.randint(8, (4,))]
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        with policy.overwriting(publish=True, version=version):
            optimizer.step()
        return loss.item()

    def save(version: int) -> list[list[int]]:
        """Save the whole of each parameter and the logits; return the shapes of this rank's parts."""
        locals_, wholes = {}, {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            locals_[name], wholes[name] = parameter.to_local().detach(), parameter.full_tensor().detach()
            assert torch.equal(policy.tensors[name], locals_[name])
            assert policy.tensors[name].numel() == 0 or policy.tensors[name].data_ptr() == locals_[name].data_ptr()
        with torch.no_grad():
            logits = model(questions())
        if rank == 0:
            torch.save({"tensors": wholes, "logits": logits}, directory / f"trainer-{version}.pt")
        return [list(local.shape) for local in locals_.values()]

    return {"step": step, "save": save}


def _tensor_parallel(hub: tensorhub.Hub, rank: int, ranks: int, directory: Path, dtype: torch.dtype) -> Orders:
    with torch.device("meta"):
        model = Llama(Ranks(rank, ranks)).to(dtype)
    declared = mapping.llama(CONFIG, "vllm", tp_rank=rank, tp_size=ranks)
    engine = hub.register("policy", model, replica="tp", shard=rank, shards=ranks, mapping=declared)

    def load(version: int) -> None:
        """Load another engine from what the trainer has saved, without the hub, and save what that says."""
        whole = torch.load(directory / f"trainer-{version}.pt")["tensors"]
        held = divided({name: bits(tensor) for name, tensor in whole.items()}, rank, ranks)
        other = Llama(Ranks(rank, ranks)).to(dtype)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                parameter.copy_(torch.from_numpy(held[name]).view(dtype))
            torch.save(other(questions()), directory / f"tp{rank}-loaded-{version}.pt")

    return {**_engine(engine, model, directory / f"tp{rank}"), "load": load}


def _whole(hub: tensorhub.Hub, _rank: int, _ranks: int, directory: Path, dtype: torch.dtype) -> Orders:
    with torch.device("meta"):
        model = Llama().to(dtype)
    return _engine(hub.register("policy", model, replica="whole"), model, directory / "whole")


def _engine(engine: Shard, model: nn.Module, stem: Path) -> Orders:
    def replicate(version: int) -> int:
        return engine.replicate(version)

    def save(version: int) -> None:
        with torch.no_grad():
            logits = model(questions())
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        torch.save({"tensors": tensors, "logits": logits}, f"{stem}-{version}.pt")

    return {"replicate": replicate, "save": save}
