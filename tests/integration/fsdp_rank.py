"""A rank of an FSDP2 trainer (test_mapping.py), which takes the orders of tests/kit/worker.py: `step` and `save`."""

import sys
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from tests.kit.models import UNEVEN, made
from tests.kit.worker import serve
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tensorhub
from tensorhub import mapping

VOCABULARY: Final = 101
QUESTIONS: Final = torch.arange(VOCABULARY * 2).remainder(VOCABULARY)[:200].view(8, 25)
"""What every model is asked: each token of the vocabulary is in it."""


def main() -> None:
    rank, ranks = map(int, sys.argv[1:3])
    kind, directory, dtype = sys.argv[3], Path(sys.argv[4]), getattr(torch, sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/ranks", rank=rank, world_size=ranks)
    # HSDP: two halves of the ranks have the same.
    hybrid = {"mesh_shape": (2, ranks // 2), "mesh_dim_names": ("replicate", "shard")}
    mesh = init_device_mesh("cpu", **(hybrid if kind == "hsdp" else {"mesh_shape": (ranks,)}))
    model = made("Qwen3", 0, **UNEVEN).to(dtype)
    names = mapping.for_model(model.config, "hf")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parameters = dict(model.named_parameters())
    with tensorhub.connect() as hub:
        policy = hub.register("m", model, replica="trainer", shard=rank, shards=ranks, mapping=names)
        assert all(parameters[name] is parameter for name, parameter in model.named_parameters())

        def step(version: int) -> float:
            """Learn from a batch of this rank's own, and publish what was learnt."""
            torch.manual_seed(100 * version + rank)
            tokens = QUESTIONS[torch.randint(8, (4,))]
            loss = model(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            with policy.overwriting(publish=True, version=version):
                optimizer.step()
            return float(loss.item())

        def save(version: int) -> list[list[int]]:
            """Save the whole of each parameter and the logits; return the shapes of this rank's parts."""
            locals_, wholes = {}, {}
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                local = locals_[name] = parameter.to_local().detach()
                wholes[name] = parameter.full_tensor().detach()
                assert torch.equal(policy.tensors[name], local)
                assert policy.tensors[name].numel() == 0 or policy.tensors[name].data_ptr() == local.data_ptr()
            with torch.no_grad():
                logits = model(QUESTIONS).logits
            if rank == 0:
                torch.save({"tensors": wholes, "logits": logits}, directory / f"{version}.pt")
            return [list(local.shape) for local in locals_.values()]

        serve({"step": step, "save": save}.__getitem__)
    dist.destroy_process_group()
