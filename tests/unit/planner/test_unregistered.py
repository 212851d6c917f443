"""What all shards of a replica leave out, beside what sets of names say."""

import random

import pytest

from tensorhub_common.layout.layout import Layout, TensorEntry, layout_digest, layout_of
from tensorhub_common.layout.parts import Part
from tensorhub_common.programs.program import UNREAD_MAX
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.planning.unregistered import Unregistered, global_names, unregistered


def of(names: list[str]) -> Layout:
    return layout_of([TensorEntry(name, "uint8", 1, (2,), (2,), (0,)) for name in names])


@pytest.mark.parametrize("seed", range(50))
def test_what_is_missing_is_what_no_layout_names(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"w{number}" for number in range(chance.randrange(1, 40))]
    sources = [of(chance.sample(names, chance.randrange(1, len(names) + 1))) for _ in range(chance.randrange(1, 4))]
    index = LayoutIndex({layout_digest(layout): layout for layout in sources})
    there = list(index.tensors)
    readers = [chance.sample(there, chance.randrange(len(there) + 1)) for _ in range(chance.randrange(1, 5))]
    lacking = [name for name in there if not any(name in reader for reader in readers)]
    found = unregistered([global_names(of(reader)) for reader in readers], index)
    assert found == Unregistered(tuple(lacking[:UNREAD_MAX]), len(lacking))


def test_what_a_fused_tensor_consists_of_is_not_missing() -> None:
    parts = (Part("q", (4,), (0,), (4,), (0,), (4,)), Part("k", (2,), (0,), (2,), (4,), (2,)))
    fused = layout_of([TensorEntry("qk", "uint8", 1, (6,), (6,), (0,), parts)])
    rows = {"q": 4, "k": 2, "qk": 2, "v": 2}
    each = [TensorEntry(name, "uint8", 1, (count,), (count,), (0,)) for name, count in rows.items()]
    source = layout_of(each)
    index = LayoutIndex({layout_digest(source): source})
    assert unregistered([global_names(fused)], index) == Unregistered(("qk", "v"), 2)
