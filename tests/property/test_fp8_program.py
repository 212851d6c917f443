"""Any sharding of a published tensor to any of its fp8 values and scales: bit for bit what torch makes of the whole."""

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.examples_of import examples
from tests.unit.agent.casting.torch_fp8 import referred, weight

from tensorhub_agent.casting.floats import Bits
from tensorhub_agent.compute.amax_table import NumpyAmaxTable
from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.strided_copy import copy_boxes
from tensorhub_agent.primitives.block_forms import amax_bytes
from tensorhub_agent.primitives.forms import cut_form, receiver_form, sender_form
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.casts import CASTABLE, FP8_SOURCES
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_digest, layout_of, placements, segment_bytes
from tensorhub_common.layout.parts import Part, Shape
from tensorhub_common.layout.quantized import DERIVED, QuantizedKind
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import decoded, encoded
from tensorhub_common.programs.regions import StridedCopies, StridedForm
from tensorhub_planner.compiler import overlaps
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex

SCHEMES: Final = ("fp8-block-128", "fp8-block-128-nemo", "fp8-channel")
UNIT_BYTES: Final = (128 * 128, 3 * 128 * 128, 4 << 20)
"""So that small matrices are cut in every way in which huge ones are."""
PART_BYTES: Final = (1000, 150_000, 1 << 20)
WIRE_BYTES: Final = 100_000
ITEMSIZES: Final = {"float8_e4m3fn": 1, "bfloat16": 2, "int32": 4, "float32": 4}
Box = tuple[Shape, Shape]


@dataclass(frozen=True)
class Global:
    dtype: str
    bits: Bits
    answers: dict[str, Bits]

    @classmethod
    def of(cls, shape: Shape, dtype: str, scheme: str, seed: int) -> "Global":
        bits = weight(shape, dtype, seed)
        kinds = [DERIVED[f"{scheme}:values"], DERIVED[f"{scheme}:scales"]]
        return cls(
            dtype,
            bits,
            dict(zip([kind.name for kind in kinds], referred(bits, dtype, kinds[0].scheme), strict=True)),  # type: ignore[arg-type]
        )


def sliced(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(*box, strict=True))


def source_entry(tensor: Global, box: Box) -> TensorEntry:
    shape = tuple(b - a for a, b in zip(*box, strict=True))
    return TensorEntry("w", tensor.dtype, CASTABLE[tensor.dtype], shape, tensor.bits.shape, box[0])


def reader_entry(name: str, kind: QuantizedKind, whole: Shape, boxes: list[Box]) -> TensorEntry:
    """Return a tensor in which boxes of values or scales stand one after another in a new first dimension."""
    stacked = tuple(max(b[1][d] - b[0][d] for b in boxes) for d in range(len(whole)))
    consists: list[Part] = []
    for number, (start, stop) in enumerate(boxes):
        extent = tuple(b - a for a, b in zip(start, stop, strict=True))
        assert extent == stacked
        at = (number, *(0,) * len(whole))
        consists.append(Part("w", whole, start, extent, at, (1, *extent), kind.name))
    shape = (len(boxes), *stacked)
    return TensorEntry(name, kind.dtype, kind.itemsize, shape, shape, (0,) * len(shape), tuple(consists))


@st.composite
def grids(draw: st.DrawFn, shape: Shape, grain: Shape) -> list[Box]:
    """Cut a tensor along up to two dimensions, at multiples of a grain."""
    edges = []
    for size, step in zip(shape, grain, strict=True):
        inner = draw(st.lists(st.integers(0, size // step), max_size=2))
        edges.append(sorted({0, size, *(step * each for each in inner)}))
    cuts = [list(pairwise(some)) for some in edges]
    boxes: list[Box] = [((), ())]
    for dim in cuts:
        boxes = [((*a, c), (*b, d)) for a, b in boxes for c, d in dim]
    return boxes


@st.composite
def inner_boxes(draw: st.DrawFn, shape: Shape) -> Box:
    spans_ = [sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for size in shape]
    return tuple(a for a, _ in spans_), tuple(b for _, b in spans_)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    sides = st.sampled_from([1, 100, 128, 129, 256, 300, 400])
    return (*draw(st.sampled_from([(), (), (2,)])), draw(sides), draw(sides))


def segment(layout: Layout, contents: dict[str, Bits]) -> memoryview:
    found = np.zeros(segment_bytes(layout), np.uint8)
    for entry, at in zip(layout.tensors, placements(layout), strict=True):
        found[at : at + entry.nbytes] = np.ascontiguousarray(contents[entry.name]).reshape(-1).view(np.uint8)
    return memoryview(found.tobytes())


def expected(tensor: Global, entry: TensorEntry) -> Bits:
    boxes = [
        tensor.answers[part.cast][tuple(slice(a, a + n) for a, n in zip(part.offset, part.extent, strict=True))]
        for part in entry.parts
    ]
    return np.stack(boxes)


def add(regions: StridedCopies, to: int, origin: int, form: StridedForm) -> None:
    for column, value in ((regions.to, to), (regions.origin, origin), (regions.form, form)):
        column.append(value)  # type: ignore[union-attr]


def bring(destination: memoryview, source: memoryview, regions: StridedCopies, *, by_wire: bool) -> None:
    """Copy regions as the transports do: on one host box by box, over a wire packed at the source."""

    async def run() -> None:
        pool = CopyPool(1)
        try:
            if not by_wire:
                await copy_boxes(pool, destination, source, regions).done()
                return
            packed, unpacked = StridedCopies([], [], [], []), StridedCopies([], [], [])
            at = 0
            amax = regions.amax or [b""] * len(regions.to)
            for to, origin, form, largest in zip(regions.to, regions.origin, regions.form, amax, strict=True):
                taken = 0
                for part in cut_form(form, WIRE_BYTES):
                    add(packed, at, origin + part.origin, sender_form(part.form))
                    size = amax_bytes(part.form)
                    packed.amax.append(largest[taken : taken + size])  # type: ignore[attr-defined]
                    add(unpacked, to + part.to, at, receiver_form(part.form))
                    at += part.form.nbytes
                    taken += size
            wire = memoryview(bytearray(at))
            await copy_boxes(pool, wire, source, packed).done()
            await copy_boxes(pool, destination, wire, unpacked).done()
        finally:
            pool.close()

    asyncio.run(run())


def fill(reader: Layout, sources: dict[str, tuple[Layout, memoryview]], originals: set[str], *, by_wire: bool) -> bytes:
    """Fill a reader by the program, each unit once, from each source what only it has; first all that is folded."""
    index = LayoutIndex({digest: layout for digest, (layout, _) in sources.items()}, originals)
    program = compile_program(layout_digest(reader), reader, index)
    assert decoded(encoded(program)) == program
    execution = NumberedProgram(program)
    destination = bytearray(b"\xa5" * segment_bytes(reader))
    table = NumpyAmaxTable(execution)
    brought: set[int] = set()

    def fresh(digest: str, first: int, last: int) -> list[tuple[int, int]]:
        given = (unit for begin, count in execution.given_by(digest) for unit in range(begin, begin + count))
        found = [unit for unit in given if first <= unit < last and unit not in brought]
        brought.update(found)
        return [(unit, 1) for unit in found]

    for number, (digest, (_, source)) in enumerate(sources.items()):
        partials = fresh(digest, 0, execution.partials)
        if not partials:
            continue
        memory, regions = table.batch_buffer(digest, partials)
        bring(memory, source, regions, by_wire=by_wire)
        table.batch_arrived(number, partials, memory)
        table.fold(number, partials)
    assert brought == set(range(execution.partials))
    table.write_scales([(execution.partials, execution.scales - execution.partials)], memoryview(destination))
    brought |= set(range(execution.scales))
    for digest, (_, source) in sources.items():
        units = fresh(digest, 0, len(execution))
        if not units:
            continue
        regions = execution.regions(digest, units)
        regions = StridedCopies(regions.to, regions.origin, regions.form, table.amax(digest, units))
        bring(memoryview(destination), source, regions, by_wire=by_wire)
    assert brought == set(range(len(execution)))
    return bytes(destination)


@given(st.data(), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=examples(0.4))
def test_any_sharding_becomes_values_and_scales(data: st.DataObject, seed: int, by_wire: bool) -> None:  # noqa: FBT001
    """Boxes of values and of scales with any edges, out of shards with any edges, between blocks and through them."""
    shape, scheme = data.draw(shapes()), data.draw(st.sampled_from(SCHEMES))
    tensor = Global.of(shape, data.draw(st.sampled_from(FP8_SOURCES)), scheme, seed)
    values, scales = DERIVED[f"{scheme}:values"], DERIVED[f"{scheme}:scales"]
    shards = data.draw(grids(shape, data.draw(st.sampled_from([values.grain(shape), (1,) * len(shape)]))))
    layouts = [layout_of([source_entry(tensor, box)]) for box in shards]
    sources = {
        layout_digest(layout): (layout, segment(layout, {"w": tensor.bits[sliced(box)]}))
        for layout, box in zip(layouts, shards, strict=True)
    }
    entries = [
        reader_entry("v", values, shape, [data.draw(inner_boxes(shape))]),
        reader_entry("s", scales, shape, [data.draw(inner_boxes(scales.shape(shape)))]),
    ]
    reader = layout_of(entries)
    unit_bytes, part_bytes = data.draw(st.sampled_from(UNIT_BYTES)), data.draw(st.sampled_from(PART_BYTES))
    with (
        mock.patch.object(overlaps, "PIECE_BYTES_MAX", unit_bytes),
        mock.patch("tensorhub_agent.compute.strided_copy.PART_BYTES_MAX", part_bytes),
    ):
        found = fill(reader, sources, set(sources), by_wire=by_wire)
    assert found == bytes_of(reader, tensor)


def bytes_of(reader: Layout, tensor: Global) -> bytes:
    """Return the reader's memory as it is to be; what lies between tensors stays as it was."""
    answer = np.full(segment_bytes(reader), 0xA5, np.uint8)
    for entry, at in zip(reader.tensors, placements(reader), strict=True):
        answer[at : at + entry.nbytes] = np.ascontiguousarray(expected(tensor, entry)).reshape(-1).view(np.uint8)
    return answer.tobytes()


@given(st.data())
@settings(max_examples=examples(0.6))
def test_what_is_lacking_of_a_block_that_is_cut_is_named(data: st.DataObject) -> None:
    """Of three shards whose edges lie within blocks one is missing: the refusal says which of its elements are."""
    shape = (400, 200)
    edges = sorted(data.draw(st.lists(st.integers(1, 399), min_size=2, max_size=2, unique=True)))
    assume(all(edge % 128 for edge in edges))
    tensor = Global("float32", np.zeros(shape, np.uint32), {})
    boxes: list[Box] = [((0, 0), (edges[0], 200)), ((edges[1], 0), shape)]
    layouts = {layout_digest(each): each for each in (layout_of([source_entry(tensor, box)]) for box in boxes)}
    kind = DERIVED["fp8-block-128:" + data.draw(st.sampled_from(["values", "scales"]))]
    reader = layout_of([reader_entry("r", kind, shape, [((0, 0), kind.shape(shape))])])
    with pytest.raises(LayoutMismatch) as refused:
        compile_program("x", reader, LayoutIndex(layouts, set(layouts)))
    said = str(refused.value)
    assert f"of 'w' as {kind.name} is computed of " in said
    # What begins within a block is looked for as far as that goes.
    assert f"no holder has [{edges[0]}:{min(edges[1], -(-edges[0] // 128) * 128)}, 0:" in said


def test_a_source_of_another_kind_is_none() -> None:
    """Values are no source of the published tensor, nor of values by another formula; integers are none of anything."""
    shape = (128, 128)
    ours, theirs = (DERIVED[f"{name}:values"] for name in ("fp8-block-128", "fp8-block-128-nemo"))
    mine, other = (layout_of([reader_entry("r", kind, shape, [((0, 0), shape)])]) for kind in (ours, theirs))
    plain, counts, half = (plain_of(shape, dtype) for dtype in ("float8_e4m3fn", "int32", "bfloat16"))
    for reader, source in ((plain, mine), (other, mine), (other, plain), (other, counts), (mine, half)):
        originals = () if source is half else ("s",)
        with pytest.raises(LayoutMismatch, match="'w' is"):
            compile_program("x", reader, LayoutIndex({"s": source}, originals))


def plain_of(shape: Shape, dtype: str) -> Layout:
    return layout_of([TensorEntry("w", dtype, ITEMSIZES[dtype], shape, shape, (0, 0))])


def scales_of(shape: Shape, dtype: str, scheme: str) -> NumberedProgram:
    """Return the program that computes all scales of a tensor."""
    kind = DERIVED[f"{scheme}:scales"]
    reader = layout_of([reader_entry("s", kind, shape, [((0, 0), kind.shape(shape))])])
    return NumberedProgram(compile_program("x", reader, LayoutIndex({"s": plain_of(shape, dtype)}, {"s"})))


def test_a_unit_of_scales_is_computed_of_a_bounded_box() -> None:
    """However many scales fit into a message, each unit of them is made of at most 16 MiB."""
    execution = scales_of((8192, 4096), "float32", "fp8-block-128")
    forms: list[StridedForm] = list(execution.regions("s", [(0, len(execution))]).form)
    assert len(forms) == 8
    assert {form.origin_nbytes for form in forms} == {16 << 20}


def test_a_unit_is_no_longer_than_a_piece_where_scales_are_larger_than_what_they_are_made_of() -> None:
    """A scale for each row of one element."""
    assert scales_of((4 << 20, 1), "bfloat16", "fp8-channel").nbytes() == [4 << 20] * 4
