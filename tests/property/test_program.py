"""Any sharding to any other: what a program copies is what numpy says stands there, and every byte is written once."""

from typing import Final
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples_of import examples
from tests.property.shardings import Cutting, Model, carry_out, cuttings, fused, memory, models

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout, layout_digest, placements, segment_bytes
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import decoded, encoded
from tensorhub_planner.compiler import overlaps
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex

SMALL_UNIT_BYTES: Final = 24
"""So that small boxes are cut in every way in which huge ones are."""


def by_digest(*replicas: Cutting) -> dict[str, Layout]:
    return {layout_digest(layout): layout for replica in replicas for layout in replica}


def marks(layout: Layout) -> np.ndarray:
    """Return 1 for each byte of a segment that belongs to a tensor, and 0 for what lies between."""
    found = np.zeros(segment_bytes(layout), np.uint8)
    for entry, at in zip(layout.tensors, placements(layout), strict=True):
        found[at : at + entry.nbytes] = 1
    return found


def check(model: Model, reader: Layout, layouts: dict[str, Layout], chance: np.random.Generator) -> None:
    """Fill a reader's memory unit by unit, each from a source drawn among those that have it."""
    program = compile_program(layout_digest(reader), reader, LayoutIndex(layouts))
    assert decoded(encoded(program)) == program
    execution = NumberedProgram(program)
    givers: list[list[str]] = [[] for _ in range(len(execution))]
    for digest in layouts:
        for first, count in execution.given_by(digest):
            for unit in range(first, first + count):
                givers[unit].append(digest)
    found = chance.integers(0, 256, segment_bytes(reader), dtype=np.uint8)
    before, written = found.copy(), np.zeros(len(found), np.uint8)
    segments = {digest: memory(model, layout) for digest, layout in layouts.items()}
    sizes = execution.nbytes()
    assert len(sizes) == len(execution)
    for unit, able in enumerate(givers):
        digest = able[chance.integers(len(able))]
        regions = execution.regions(digest, [(unit, 1)])
        assert sum(form.nbytes for form in regions.form) == sizes[unit]
        carry_out(regions, segments[digest], found, written)
    np.testing.assert_array_equal(written, marks(reader))
    np.testing.assert_array_equal(found, np.where(marks(reader), memory(model, reader), before))


@pytest.mark.long
@given(st.data(), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(2.0))
def test_any_sharding_becomes_any_other(data: st.DataObject, seed: int) -> None:
    """FSDP, TP by rows and columns, meshes, PP, EP, replicated and uneven; fused at either end; several replicas."""
    chance = np.random.default_rng(seed)
    model = data.draw(models())
    replicas = [data.draw(cuttings(model)) for _ in range(data.draw(st.integers(1, 3)))]
    if data.draw(st.booleans()):
        replicas[0] = tuple(fused(layout, chance) for layout in replicas[0])
    reader = data.draw(st.sampled_from(data.draw(cuttings(model))))
    if data.draw(st.booleans()):
        reader = fused(reader, chance)
    with mock.patch.object(overlaps, "PIECE_BYTES_MAX", data.draw(st.sampled_from([SMALL_UNIT_BYTES, 4 << 20]))):
        check(model, reader, by_digest(*replicas), chance)


@given(st.data(), st.integers(0, 2**32 - 1))
def test_partial_replicas_together_are_a_source(data: st.DataObject, seed: int) -> None:
    """Shards that are left of several replicas fill a reader where together they have everything."""
    model = data.draw(models())
    shards = [layout for _ in range(3) for layout in data.draw(cuttings(model))]
    left = data.draw(st.lists(st.sampled_from(shards), min_size=1, unique_by=layout_digest))
    reader = data.draw(st.sampled_from(data.draw(cuttings(model))))
    covered = {tensor.name: np.zeros(tensor.shape, bool) for tensor in model}
    for entry in (entry for layout in left for entry in layout.tensors):
        covered[entry.name][tuple(slice(a, a + n) for a, n in zip(entry.offset, entry.shape, strict=True))] = True
    needed = [
        covered[entry.name][tuple(slice(a, a + n) for a, n in zip(entry.offset, entry.shape, strict=True))]
        for entry in reader.tensors
    ]
    if all(each.all() for each in needed):
        check(model, reader, by_digest(tuple(left)), np.random.default_rng(seed))
    else:
        gap = next(entry for entry, each in zip(reader.tensors, needed, strict=True) if not each.all())
        with pytest.raises(LayoutMismatch, match=gap.name):
            compile_program("x", reader, LayoutIndex(by_digest(tuple(left))))
