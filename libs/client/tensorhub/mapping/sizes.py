"""What a mapping has to know of a model: its sizes, as its Hugging Face configuration names them. Pure.

Always true: every size is a whole number and at least 1; what the configuration leaves out has the default that
transformers gives it.
"""

from collections.abc import Callable

import msgspec

Lookup = Callable[[str], object]
"""Returns what the configuration has under a name, or None."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder's sizes, in elements."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether the head's matrix is the embedding's."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a mixture of experts."""

    count: int
    intermediate: int
    shared_intermediate: int = 0
    """Of the shared experts together; 0: there are none."""


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of multi-head latent attention."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


def sizes_of(lookup: Lookup) -> Sizes:
    """Read a decoder's sizes. Raises `ValueError` naming what is missing or no size."""
    heads = _size(lookup, "num_attention_heads")
    head_dim = _optional(lookup, "head_dim")
    return Sizes(
        layers=_size(lookup, "num_hidden_layers"),
        heads=heads,
        kv_heads=_optional(lookup, "num_key_value_heads") or heads,
        head_dim=head_dim or _size(lookup, "hidden_size") // heads,
        intermediate=_size(lookup, "intermediate_size"),
        vocabulary=_size(lookup, "vocab_size"),
        tied=bool(lookup("tie_word_embeddings")),
    )


def experts_sizes_of(lookup: Lookup) -> Experts:
    """Read the sizes of a mixture of experts. Raises `ValueError` naming what is missing or no size."""
    intermediate = _size(lookup, "moe_intermediate_size")
    return Experts(
        count=_size(lookup, "num_experts", "n_routed_experts", "num_local_experts"),
        intermediate=intermediate,
        # Where there are none some configurations say 0, and others nothing.
        shared_intermediate=intermediate * _size(lookup, "n_shared_experts") if lookup("n_shared_experts") else 0,
    )


def latent_sizes_of(lookup: Lookup) -> Latent:
    """Read the sizes of multi-head latent attention. Raises `ValueError` naming what is missing or no size."""
    return Latent(
        heads=_size(lookup, "num_attention_heads"),
        q_rank=_optional(lookup, "q_lora_rank"),
        kv_rank=_size(lookup, "kv_lora_rank"),
        nope_dim=_size(lookup, "qk_nope_head_dim"),
        rope_dim=_size(lookup, "qk_rope_head_dim"),
        v_dim=_size(lookup, "v_head_dim"),
    )


def _size(lookup: Lookup, *names: str) -> int:
    """Return the first of these that the configuration has."""
    for name in names:
        found = _optional(lookup, name)
        if found is not None:
            return found
    raise ValueError(f"the model's configuration has no {' or '.join(names)}: is it the one of this family?")


def _optional(lookup: Lookup, name: str) -> int | None:
    value = lookup(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r:.80} in the model's configuration; it is a whole number, at least 1")
    return value
