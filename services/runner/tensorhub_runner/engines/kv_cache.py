"""Keys and values of the tokens that are computed, in memory that is bounded by tokens.

Each layer has one tensor of keys and one of values, with a row for each place. `schedule` says which token has which
place. The memory of a layer is taken when the layer is computed first, whole, and is never given back.
"""

import torch


class KvCache:
    """The cache of one engine."""

    def __init__(self, tokens_max: int) -> None:
        """Take no memory yet."""
        self._tokens_max = tokens_max
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """How much memory it has taken, in bytes."""
        return sum(each.nbytes for layer in self._layers.values() for each in layer)

    @property
    def layers(self) -> list[int]:
        """The layers that were written."""
        return sorted(self._layers)

    def write(self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep keys[n, heads, d] and values[n, heads, e] at places[n]."""
        if layer not in self._layers:
            self._layers[layer] = (
                keys.new_empty((self._tokens_max, *keys.shape[1:])),
                values.new_empty((self._tokens_max, *values.shape[1:])),
            )
        for kept, given in zip(self._layers[layer], (keys, values), strict=True):
            kept.index_copy_(0, places, given)

    def read(self, layer: int, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of the keys and values at places[...]: [..., heads, d] and [..., heads, e]."""
        keys, values = self._layers[layer]
        return keys[places], values[places]
