"""How large the demo's model is. It stands apart from the model, so that the showing process needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """What the model is built from. The default has 20.7 million parameters: 83 MB in float32.

    Wide and shallow, because that learns most in a few dozen steps and generates fastest on a CPU.
    """

    width: int = 640
    layers: int = 4
    heads: int = 10
    hidden: int = 1792
    """Width of the feed-forward part; about 8/3 of `width`, as in Llama."""
    context_tokens: int = 512
    tied: bool = False
    """Whether the head is the embedding (one parameter under two names)."""
