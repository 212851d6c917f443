"""A small Llama with q, k and v each by itself, as a trainer has it, and fused and divided in two, as an engine has it.

Names are those of Hugging Face and of vLLM. Both compute in the same order, but that a divided engine adds what its
ranks have summed up each for itself. Sizes are uneven on purpose: four ranks of FSDP2 get parts of unlike lengths, and
the last one nothing of the norms of q and k; the vocabulary is padded for two ranks.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

LAYERS: Final = 2
CONFIG: Final = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 38,
    "intermediate_size": 50,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "tie_word_embeddings": False,
}
VOCABULARY: Final = 101
HIDDEN: Final = 38
INTERMEDIATE: Final = 50
HEADS: Final = 6
KV_HEADS: Final = 2
HEAD_DIM: Final = 6


@dataclass(frozen=True)
class Ranks:
    """How an engine is divided; alone, it is not."""

    rank: int = 0
    count: int = 1

    def added(self, partial: Tensor) -> Tensor:
        """Return the sum of what all ranks have."""
        if self.count > 1:
            dist.all_reduce(partial)
        return partial

    def gathered(self, part: Tensor, dim: int) -> Tensor:
        """Return what all ranks have, one after another."""
        if self.count == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.count)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=dim)


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        result: Tensor = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight
        return result


def rotated(x: Tensor) -> Tensor:
    """Turn heads (batch, heads, positions, head_dim) by their positions."""
    half = HEAD_DIM // 2
    angles = torch.outer(torch.arange(x.shape[2]).float(), 10_000.0 ** (-torch.arange(half).float() / half))
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attended(q: Tensor, k: Tensor, v: Tensor, norms: tuple[RMSNorm, RMSNorm]) -> Tensor:
    """Return what the heads of q, k and v (batch, positions, heads × head_dim) see of what stands before them."""
    query, key, value = (x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in (q, k, v))
    query, key = rotated(norms[0](query)), rotated(norms[1](key))
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = query @ key.transpose(-1, -2) * HEAD_DIM**-0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    seen: Tensor = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value
    return seen.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm, self.k_norm = RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        seen = attended(self.q_proj(x), self.k_proj(x), self.v_proj(x), (self.q_norm, self.k_norm))
        result: Tensor = self.o_proj(seen)
        return result


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class FusedAttention(nn.Module):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.sizes = [heads * HEAD_DIM // ranks.count for heads in (HEADS, KV_HEADS, KV_HEADS)]
        self.qkv_proj = nn.Linear(HIDDEN, sum(self.sizes))
        self.o_proj = nn.Linear(self.sizes[0], HIDDEN, bias=False)
        self.q_norm, self.k_norm = RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        return self.ranks.added(self.o_proj(attended(q, k, v, (self.q_norm, self.k_norm))))


class FusedMlp(nn.Module):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * INTERMEDIATE // ranks.count, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE // ranks.count, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.ranks.added(self.down_proj(functional.silu(gate) * up))


class Layer(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
        self.self_attn, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Body(nn.Module):
    def __init__(self, layers: list[Layer], ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.embed_tokens = nn.Embedding(-(-VOCABULARY // ranks.count), HIDDEN)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.ranks.rank * self.embed_tokens.num_embeddings
        mine = (tokens >= first) & (tokens < first + self.embed_tokens.num_embeddings)
        x = self.embed_tokens(torch.where(mine, tokens - first, 0))
        x = self.ranks.added(torch.where(mine[..., None], x, torch.zeros((), dtype=x.dtype)))
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.norm(x)
        return result


class Llama(nn.Module):
    """The trainer's; with ranks an engine's, fused and divided among them."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.ranks = ranks or Ranks()
        layers = [
            Layer(Attention(), Mlp()) if ranks is None else Layer(FusedAttention(ranks), FusedMlp(ranks))
            for _ in range(LAYERS)
        ]
        self.model = Body(layers, self.ranks)
        self.lm_head = nn.Linear(HIDDEN, -(-VOCABULARY // self.ranks.count), bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.ranks.gathered(self.lm_head(self.model(tokens)), dim=-1)
        return logits[..., :VOCABULARY]


def questions() -> Tensor:
    """Return what every model is asked: each token of the vocabulary is in it."""
    return torch.arange(VOCABULARY * 2).remainder(VOCABULARY)[:200].view(8, 25)
