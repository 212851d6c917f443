"""The demo's comparison finds a byte that differs, and its text and model are what the programs expect."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tensorhub.demo import model, verify


class Small(nn.Module):
    """A parameter and a buffer, of types whose bytes are not their values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).to(torch.bfloat16))
        self.register_buffer("scale", torch.tensor([1, 2], dtype=torch.int64), persistent=False)


def test_one_wrong_bit_and_a_tensor_that_one_side_lacks_differ(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        verify.differing(tmp_path, 3, Small())
    verify.record(tmp_path, 3, Small())
    assert verify.differing(tmp_path, 3, Small()) == []
    assert verify.nbytes(Small()) == 6 * 2 + 2 * 8
    for name in ("weight", "scale"):
        wrong = Small()
        dict(verify.tensors(wrong))[name].detach().flatten().view(torch.uint8)[-1] ^= 1
        assert verify.differing(tmp_path, 3, wrong) == [name]
    fewer = Small()
    del fewer.scale
    assert verify.differing(tmp_path, 3, fewer) == ["scale"]
    verify.record(tmp_path, 4, fewer)
    assert verify.differing(tmp_path, 4, Small()) == ["scale"]


def test_the_empty_model_has_the_tensors_of_the_full_one_and_it_generates_printable_text() -> None:
    full, empty = model.build(), model.build_empty()
    shapes = [{name: tensor.shape for name, tensor in verify.tensors(each).items()} for each in (full, empty)]
    assert shapes[0] == shapes[1]
    assert all(tensor.is_meta for tensor in empty.parameters())
    assert model.generate(full.eval()).isprintable()
    assert torch.equal(next(model.batches()), next(model.batches()))
