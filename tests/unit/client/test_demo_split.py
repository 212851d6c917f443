"""Splitting a model: every tensor in exactly one shard, under its own name, as the same object."""

import pytest
import torch
from torch import nn

from tensorhub.demo.split import shard_modules
from tensorhub_common.errors import LayoutMismatch


class Decoder(nn.Module):
    """The outline of a decoder, with a head that may be the embedding."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Embedding(8, 4)
        self.model.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4))
        self.model.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.model.embed.weight


def named(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_every_tensor_is_in_exactly_one_shard(shards: int) -> None:
    model = Decoder()
    found = [named(shard) for shard in shard_modules(model, shards)]
    assert len(found) == shards
    assert all(found)
    assert [name for shard in found for name in shard] != []
    assert sum(map(len, found)) == len(named(model))
    merged = {name: tensor for shard in found for name, tensor in shard.items()}
    assert merged.keys() == named(model).keys()
    assert all(merged[name] is tensor for name, tensor in named(model).items())


def test_halves_are_the_first_and_the_last_layers() -> None:
    first, second = (named(shard) for shard in shard_modules(Decoder(), 2))
    assert {name.rsplit(".", 2)[0] for name in first} == {"model", "model.layers.0", "model.layers.1"}
    assert "model.embed.weight" in first
    assert {"model.layers.3.0.weight", "model.norm.weight", "head.weight"} <= second.keys()
    assert {name: tensor.shape for name, tensor in first.items()} == {
        name: tensor.shape for name, tensor in named(shard_modules(Decoder(), 2)[0]).items()
    }


@pytest.mark.parametrize("shards", [2, 3])
def test_tied_parts_stay_in_one_shard(shards: int) -> None:
    found = [named(shard) for shard in shard_modules(Decoder(tied=True), shards)]
    assert {"model.embed.weight", "head.weight"} <= found[0].keys()
    assert sum(map(len, found)) == len(named(Decoder()))


def test_a_part_tied_to_two_others_brings_them_together() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight, model[2].bias = model[0].weight, model[1].bias
    one, other = (named(shard).keys() for shard in shard_modules(model, 2))
    assert {name[0] for name in one} == {"0", "1", "2"}
    assert {name[0] for name in other} == {"3"}


def test_what_cannot_be_split_is_refused() -> None:
    for shards in (0, 8):
        with pytest.raises(LayoutMismatch, match=f"7 parts can't be split into {shards} shards"):
            shard_modules(Decoder(), shards)
    with pytest.raises(LayoutMismatch, match="holds tensors itself"):
        shard_modules(nn.Linear(2, 2), 1)
