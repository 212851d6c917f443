"""The large model of the benchmarks: 291 tensors of a Llama of 32 layers, scaled so that they take exactly `mib`.

A whole Llama of 7 billion has as many tensors in the same proportions. What the layers leave goes to the two tables of
words, which is why these differ by a row.
"""

from typing import Final

LAYERS: Final = 32
TENSORS: Final = 291
ELEMENT_BYTES: Final = 2
MIB: Final = 1024 * 1024
INNER_SIXTEENTHS: Final = 44
"""The inner width of the feed-forward part, in sixteenths of the width."""

Shapes = dict[str, tuple[int, ...]]


def shapes(mib: int) -> Shapes:
    """Return the tensors' shapes by name; as bfloat16 they take `mib` MiB, to the byte."""
    elements = mib * MIB // ELEMENT_BYTES
    hidden = 16
    while _layers(2 * hidden) + 3 * 2 * hidden < elements * 9 // 10:
        hidden *= 2
    words = elements - _layers(hidden) - hidden
    rows = words // hidden
    found: Shapes = {"model.embed_tokens.weight": ((rows + 1) // 2, hidden), "lm_head.weight": (rows // 2, hidden)}
    for number in range(LAYERS):
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in _layer(hidden).items()}
    found["model.norm.weight"] = (hidden,)
    assert len(found) == TENSORS
    assert words % hidden == 0, "widths are powers of two, so whole rows are left"
    return found


def _layer(hidden: int) -> Shapes:
    inner = hidden * INNER_SIXTEENTHS // 16
    attention: Shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    mlp: Shapes = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    norms: Shapes = {f"{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    return attention | mlp | norms


def _layers(hidden: int) -> int:
    """Return how many elements all layers have."""
    return LAYERS * (4 * hidden * hidden + 3 * hidden * (hidden * INNER_SIXTEENTHS // 16) + 2 * hidden)
