"""The demo's training: it learns, in hub memory as well, and the same way every time."""

from collections.abc import Iterator

import pytest
import torch

from tensorhub._tensors.description import bind, describe
from tensorhub.demo.learning import Learner
from tensorhub.demo.model import build
from tensorhub.demo.size import Size
from tensorhub.demo.split import shard_modules
from tensorhub_common.layout.layout import segment_bytes

TINY = Size(width=64, layers=2, heads=2, hidden=128)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A model of this size costs several threads more than it takes one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def learner() -> Learner:
    return Learner(build(TINY), rows=8, row_tokens=32, rate=1e-2)


def test_loss_falls_and_steps_are_counted() -> None:
    learning = learner()
    steps = [learning.step() for _ in range(25)]
    assert [step.number for step in steps] == list(range(1, 26))
    assert steps[0].loss > 5
    assert steps[-1].loss < 3
    assert all(step.seconds > 0 for step in steps)


def test_learning_in_two_shards_of_hub_memory_is_the_same() -> None:
    """The optimizer is built first; then each half of the model is adopted by a registration of its own."""
    plain, moved = learner(), learner()
    tensors: dict[str, torch.Tensor] = {}
    for shard in shard_modules(moved.model, 2):
        described = describe(shard)
        tensors |= bind(described, bytearray(segment_bytes(described.layout)))
    losses = [(plain.step().loss, moved.step().loss) for _ in range(6)]
    assert [one for one, _ in losses] == pytest.approx([other for _, other in losses], rel=1e-5)
    for name, parameter in moved.model.named_parameters():
        assert tensors[name].data_ptr() == parameter.data_ptr()
