"""A trainer of the tests: a small model whose versions are drawn from their numbers."""

from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

import tensorhub


class Trainer:
    """One model, published by number. Its versions have weights so large that greedy tokens differ between any two."""

    def __init__(self, hub: tensorhub.AsyncHub, shard: tensorhub.AsyncShard, module: Qwen2ForCausalLM) -> None:
        self.hub, self.shard, self.module = hub, shard, module

    @classmethod
    async def at(cls, hub: tensorhub.AsyncHub, folder: Path) -> "Trainer":
        module = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return cls(hub, await hub.register("policy", module, replica="trainer", resume="values"), module)

    async def publish(self, seed: int) -> int:
        async with self.shard.overwriting():
            draw(self.module, seed)
        return await self.shard.publish()

    def logits(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = self.module(torch.tensor([ids])).logits[0]
        return made


@torch.no_grad()
def draw(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for each in module.parameters():
        each.copy_(torch.randn(each.shape, generator=generator) * 0.2 if each.dim() > 1 else torch.ones(each.shape))
