"""What vLLM's weight loaders leave in a rank's parameters, written from what they do: tensor by tensor of a checkpoint.

Nothing here knows of `tensorhub.mapping`. A loader is asked for each tensor of the checkpoint, in the checkpoint's
names, finds the parameter by replacing a part of the name, and copies the slice that belongs to the rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and the worker that loads it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    padding_to: int
    tp_rank: int
    tp_size: int
    experts: int = 0
    expert_intermediate: int = 0
    shared: int = 0
    dense_layers: int = 0
    """With experts: the first layers, which have none."""
    expert_map: tuple[int, ...] = ()
    """Global numbers of the local experts."""
    expert_tp: tuple[int, int] = (0, 1)
    q_rank: int | None = None
    kv_rank: int = 0
    nope: int = 0
    rope: int = 0
    v_dim: int = 0
    latent: bool = False
    bias: bool = False
    tied: bool = False
    stack: str = "experts"


@dataclass
class Worker:
    """The parameters of one rank, as they stand after all tensors were loaded. What nobody wrote is -1."""

    model: Shape
    parameters: dict[str, Array] = field(default_factory=dict)

    def parameter(self, name: str, *shape: int) -> Array:
        return self.parameters.setdefault(name, np.full(shape, -1, np.int64))

    def load(self, checkpoint: Mapping[str, Array]) -> dict[str, Array]:
        for name, tensor in checkpoint.items():
            if self.model.tied and name == "lm_head.weight":
                continue
            self._load(name, tensor)
        return self.parameters

    def _load(self, name: str, tensor: Array) -> None:
        for weight, loader in (
            (".mlp.experts.", self._expert),
            (".q_proj.", self._query if self.model.latent else self._qkv),
            (".k_proj.", self._qkv),
            (".v_proj.", self._qkv),
            (".q_a_proj.", self._latent),
            (".kv_a_proj_with_mqa.", self._latent),
            (".q_b_proj.", self._columns),
            (".kv_b_proj.", self._columns),
            (".gate_proj.", self._gate_up),
            (".up_proj.", self._gate_up),
            (".o_proj.", self._rows),
            (".down_proj.", self._rows),
            ("embed_tokens.", self._vocabulary),
            ("lm_head.", self._vocabulary),
        ):
            if weight in name:
                loader(name, tensor)
                return
        self.parameter(name, *tensor.shape)[...] = tensor

    def _qkv(self, name: str, tensor: Array) -> None:
        m = self.model
        heads = m.heads // m.tp_size
        if m.tp_size >= m.kv_heads:
            kv_heads, replicas = 1, m.tp_size // m.kv_heads
        else:
            kv_heads, replicas = m.kv_heads // m.tp_size, 1
        which = name.split(".")[-2][0]
        at = {"q": 0, "k": heads * m.head_dim, "v": (heads + kv_heads) * m.head_dim}[which]
        size = (heads if which == "q" else kv_heads) * m.head_dim
        shard = m.tp_rank if which == "q" else m.tp_rank // replicas
        whole = self.parameter(
            name.replace(f"{which}_proj", "qkv_proj"), (heads + 2 * kv_heads) * m.head_dim, *tensor.shape[1:]
        )
        whole[at : at + size] = tensor[shard * size : (shard + 1) * size]

    def _latent(self, name: str, tensor: Array) -> None:
        m = self.model
        if m.q_rank is None:
            self.parameter(name, *tensor.shape)[...] = tensor
            return
        first = ".q_a_proj." in name
        fused = name.replace("q_a_proj" if first else "kv_a_proj_with_mqa", "fused_qkv_a_proj")
        whole = self.parameter(fused, m.q_rank + m.kv_rank + m.rope, tensor.shape[1])
        at = 0 if first else m.q_rank
        whole[at : at + len(tensor)] = tensor

    def _query(self, name: str, tensor: Array) -> None:
        self._columns(name, tensor)

    def _columns(self, name: str, tensor: Array) -> None:
        """What vLLM calls column parallel: the output's dimension, which is the first of a weight."""
        size = len(tensor) // self.model.tp_size
        at = self.model.tp_rank * size
        self.parameter(name, size, *tensor.shape[1:])[...] = tensor[at : at + size]

    def _rows(self, name: str, tensor: Array) -> None:
        if tensor.ndim == 1:
            self.parameter(name, *tensor.shape)[...] = tensor
            return
        size = tensor.shape[1] // self.model.tp_size
        at = self.model.tp_rank * size
        self.parameter(name, tensor.shape[0], size)[...] = tensor[:, at : at + size]

    def _gate_up(self, name: str, tensor: Array) -> None:
        m = self.model
        number = 0 if ".gate_proj." in name else 1
        size = len(tensor) // m.tp_size
        fused = name.replace("gate_proj" if number == 0 else "up_proj", "gate_up_proj")
        whole = self.parameter(fused, 2 * size, *tensor.shape[1:])
        whole[number * size : (number + 1) * size] = tensor[m.tp_rank * size : (m.tp_rank + 1) * size]

    def _expert(self, name: str, tensor: Array) -> None:
        m = self.model
        head, tail = name.split(".experts.")
        number, which = int(tail.split(".")[0]), tail.split(".")[1]
        if number not in m.expert_map:
            return
        rank, ranks = m.expert_tp
        size = m.expert_intermediate // ranks
        at = rank * size
        # Redundant experts have several places.
        for local in [place for place, other in enumerate(m.expert_map) if other == number]:
            if which == "down_proj":
                stack = self.parameter(f"{head}.{m.stack}.w2_weight", len(m.expert_map), m.hidden, size)
                stack[local] = tensor[:, at : at + size]
            else:
                stack = self.parameter(f"{head}.{m.stack}.w13_weight", len(m.expert_map), 2 * size, m.hidden)
                half = stack[local, :size] if which == "gate_proj" else stack[local, size:]
                half[...] = tensor[at : at + size]

    def _vocabulary(self, name: str, tensor: Array) -> None:
        m = self.model
        padded = -(-m.vocabulary // m.padding_to) * m.padding_to
        size = padded // m.tp_size
        first = min(m.tp_rank * size, m.vocabulary)
        last = min((m.tp_rank + 1) * size, m.vocabulary)
        whole = self.parameter(name, size, *tensor.shape[1:])
        whole[: last - first] = tensor[first:last]
        whole[last - first :] = 0


def checkpoint(model: Shape) -> dict[str, Array]:
    """Return a model's checkpoint in Hugging Face naming; every element has a value of its own, from 1 on."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocabulary, model.hidden)}
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}": shape for name, shape in _attention(model).items()}
        is_moe = bool(model.experts) and layer >= model.dense_layers
        shapes |= {f"{at}.mlp.{name}": shape for name, shape in (_experts(model) if is_moe else _dense(model)).items()}
        shapes |= {f"{at}.{norm}_layernorm.weight": (model.hidden,) for norm in ("input", "post_attention")}
    shapes["model.norm.weight"] = (model.hidden,)
    shapes["lm_head.weight"] = (model.vocabulary, model.hidden)
    tensors, begin = {}, 1
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        tensors[name] = np.arange(begin, begin + count).reshape(shape)
        begin += count
    if model.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def _attention(m: Shape) -> dict[str, tuple[int, ...]]:
    if m.latent:
        query = m.heads * (m.nope + m.rope)
        low = {} if m.q_rank is None else {"q_a_proj.weight": (m.q_rank, m.hidden), "q_a_layernorm.weight": (m.q_rank,)}
        high = {"q_proj.weight": (query, m.hidden)} if m.q_rank is None else {"q_b_proj.weight": (query, m.q_rank)}
        return {
            **low,
            **high,
            "kv_a_proj_with_mqa.weight": (m.kv_rank + m.rope, m.hidden),
            "kv_a_layernorm.weight": (m.kv_rank,),
            "kv_b_proj.weight": (m.heads * (m.nope + m.v_dim), m.kv_rank),
            "o_proj.weight": (m.hidden, m.heads * m.v_dim),
        }
    rows = {"q": m.heads * m.head_dim, "k": m.kv_heads * m.head_dim, "v": m.kv_heads * m.head_dim}
    return {
        **{f"{name}_proj.weight": (count, m.hidden) for name, count in rows.items()},
        **({f"{name}_proj.bias": (count,) for name, count in rows.items()} if m.bias else {}),
        "o_proj.weight": (m.hidden, m.heads * m.head_dim),
        **({"o_proj.bias": (m.hidden,)} if m.bias else {}),
        "q_norm.weight": (m.head_dim,),
        "k_norm.weight": (m.head_dim,),
    }


def _dense(m: Shape, size: int = 0, at: str = "") -> dict[str, tuple[int, ...]]:
    size = size or m.intermediate
    return {
        f"{at}gate_proj.weight": (size, m.hidden),
        f"{at}up_proj.weight": (size, m.hidden),
        f"{at}down_proj.weight": (m.hidden, size),
        **({f"{at}gate_proj.bias": (size,), f"{at}up_proj.bias": (size,)} if m.bias else {}),
        **({f"{at}down_proj.bias": (m.hidden,)} if m.bias else {}),
    }


def _experts(m: Shape) -> dict[str, tuple[int, ...]]:
    return {
        "gate.weight": (m.experts, m.hidden),
        **({"gate.e_score_correction_bias": (m.experts,)} if m.latent else {}),
        **{
            name: shape
            for expert in range(m.experts)
            for name, shape in {
                f"experts.{expert}.gate_proj.weight": (m.expert_intermediate, m.hidden),
                f"experts.{expert}.up_proj.weight": (m.expert_intermediate, m.hidden),
                f"experts.{expert}.down_proj.weight": (m.hidden, m.expert_intermediate),
            }.items()
        },
        **(_dense(m, m.shared * m.expert_intermediate, "shared_experts.") if m.shared else {}),
    }
