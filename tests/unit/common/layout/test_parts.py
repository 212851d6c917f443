"""Parts of registered tensors: each element in exactly one, and what is planted wrong is refused by name."""

import math
from itertools import product
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout import parts as parts_module
from tensorhub_common.layout.layout import Layout, TensorEntry, difference, layout_digest, layout_of, shared_mismatch
from tensorhub_common.layout.parts import NAME_BYTES_MAX, PARTS_MAX, Part, Shape, check_parts, named, padding


def rows(name: str, whole: int, first: int, count: int, at: int) -> Part:
    """Return `count` rows of a global tensor of `whole` rows and 4 columns, standing from row `at` on."""
    return Part(name, (whole, 4), (first, 0), (count, 4), (at, 0), (count, 4))


QKV = (rows("q", 8, 4, 4, 0), rows("k", 4, 2, 2, 4), rows("v", 4, 2, 2, 6))


def fused(*parts: Part, name: str = "qkv", dtype: str = "float32", itemsize: int = 4) -> TensorEntry:
    return TensorEntry(name, dtype, itemsize, (8, 4), (8, 4), (0, 0), parts)


# ------------------------------------------------------------------------------------------------------ well formed


def test_parts_that_cover_a_tensor_once_are_a_layout() -> None:
    layout = layout_of([fused(*QKV)])
    assert layout.tensors[0].parts == QKV
    assert layout_digest(layout) != layout_digest(layout_of([fused()]))


def test_padding_is_a_part_without_a_name() -> None:
    rest = padding((6, 0), (2, 4))
    check_parts("qkv", (8, 4), (*QKV[:2], rest))
    assert rest.is_padding
    assert not QKV[0].is_padding


def test_dimensions_of_one_element_in_front_are_left_out() -> None:
    stacked = [Part(f"e{e}", (6, 4), (0, 0), (6, 4), (e, 0, 0), (1, 6, 4)) for e in range(3)]
    check_parts("w13", (3, 6, 4), stacked)
    check_parts("one", (1, 1), [Part("scalar", (), (), (), (0, 0), (1, 1))])
    check_parts("row", (4,), [Part("of", (2, 9), (1, 3), (1, 4), (0,), (4,))])


WRONG = {
    "a gap between": ((QKV[0], QKV[2]), r"no part has its elements from \(4, 0\) to \(6, 4\)"),
    "a gap at the end": (QKV[:2], r"no part has its elements from \(6, 0\) to \(8, 4\)"),
    "a gap within": (
        (*QKV[:2], Part("v", (4, 4), (2, 0), (2, 3), (6, 0), (2, 3))),
        r"no part has its elements from \(6, 3\) to \(8, 4\)",
    ),
    "an overlap": ((*QKV[:2], rows("v", 4, 0, 3, 5)), r"part 1 \('k'\) and part 2 \('v'\) overlap"),
    "an overlap with padding": ((*QKV, padding((7, 0), (1, 4))), r"part 2 \('v'\) and part 3 \(padding\) overlap"),
    "outside of the tensor": ((*QKV[:2], rows("v", 4, 1, 3, 6)), r"part 2 \('v'\) of shape .* does not fit into the"),
    "before the tensor": ((rows("q", 8, 0, 4, -1),), r"part 0 \('q'\) of shape .* does not fit into the tensor"),
    "outside of the global one": (
        (*QKV[:2], rows("v", 4, 3, 2, 6)),
        r"part 2 \('v'\) of extent .* global shape",
    ),
    "an empty part": ((*QKV, rows("w", 4, 0, 0, 0)), r"part 3 \('w'\) of shape .* is empty"),
    "other sizes there": (
        (*QKV[:2], Part("v", (4, 4), (0, 0), (4, 2), (6, 0), (2, 4))),
        r"part 2 \('v'\) has shape \(2, 4\) in the tensor and extent \(4, 2\)",
    ),
    "other dimensions here": ((Part("v", (8,), (0,), (8,), (0,), (8,)),), r"part 0 \('v'\) has start \(0,\)"),
    "other dimensions there": ((Part("v", (8, 4), (0,), (8, 4), (0, 0), (8, 4)),), r"part 0 \('v'\) has global shape"),
    "padding of something": ((Part("", (8, 4), (0, 0), (8, 4), (0, 0), (8, 4)),), r"part 0 \(padding\) is padding of"),
    "no text": ((rows("\ud800", 8, 0, 8, 0),), r"part 0 .* has a name that is no text"),
}


@pytest.mark.parametrize(("parts", "said"), WRONG.values(), ids=WRONG)
def test_what_is_planted_wrong_is_refused_by_name(parts: tuple[Part, ...], said: str) -> None:
    with pytest.raises(LayoutMismatch, match=rf"^tensor 'qkv'.*{said}"):
        layout_of([fused(*parts)])


def test_a_part_is_called_by_its_number_and_the_beginning_of_its_name() -> None:
    whole = Part("x" * 81, (4,), (0,), (4,), (0,), (4,))
    assert named(3, whole) == f"part 3 ('{'x' * 80}')"
    assert named(0, padding((0,), (4,))) == "part 0 (padding)"


def test_there_is_a_bound_on_names() -> None:
    """In bytes, not in letters."""
    check_parts("w", (4,), [Part("ä" * (NAME_BYTES_MAX // 2), (4,), (0,), (4,), (0,), (4,))])
    with pytest.raises(LayoutMismatch, match=f"longer than {NAME_BYTES_MAX} bytes: rename it"):
        check_parts("w", (4,), [Part("ä" * (NAME_BYTES_MAX // 2) + "x", (4,), (0,), (4,), (0,), (4,))])


def test_there_is_a_bound_on_parts() -> None:
    with pytest.raises(LayoutMismatch, match=f"has {PARTS_MAX + 1} parts"):
        check_parts("w", (8, 4), QKV[:1] * (PARTS_MAX + 1))


def test_a_tensor_without_dimensions_has_one_part() -> None:
    scalar = Part("s", (), (), (), (), ())
    check_parts("w", (), [scalar])
    with pytest.raises(LayoutMismatch, match=r"part 0 .* and part 1 .* overlap"):
        check_parts("w", (), [scalar, scalar])


def test_a_global_tensor_is_one_shape_and_dtype_within_a_shard() -> None:
    with pytest.raises(LayoutMismatch, match=r"global shape \(4, 4\) \(a part of 'qkv'\) elsewhere in the shard"):
        layout_of([fused(*QKV), TensorEntry("k", "float32", 4, (3, 4), (3, 4), (0, 0))])
    with pytest.raises(LayoutMismatch, match="tensor 'q' is"):
        layout_of([fused(*QKV), fused(*QKV, name="other", dtype="bfloat16", itemsize=2)])


# --------------------------------------------------------------------------------------------------------- siblings


def test_siblings_are_compared_by_the_global_tensors_of_their_parts() -> None:
    mine = layout_of([fused(*QKV)])
    other_half = (rows("q", 8, 0, 4, 0), rows("k", 4, 0, 2, 4), rows("v", 4, 0, 2, 6))
    assert shared_mismatch(mine, layout_of([fused(*other_half)])) is None
    assert shared_mismatch(mine, layout_of([TensorEntry("k", "float32", 4, (4, 4), (4, 4), (0, 0))])) is None
    # What each of them registered under one name need not be alike: padded in the last shard, say.
    longer = TensorEntry("qkv", "float32", 4, (9, 4), (9, 4), (0, 0), (*other_half, padding((8, 0), (1, 4))))
    assert shared_mismatch(mine, layout_of([longer])) is None
    why = shared_mismatch(mine, layout_of([fused(rows("q", 9, 0, 4, 0), *other_half[1:])]))
    assert why == (
        "tensor 'q' is float32 of global shape (9, 4) (a part of 'qkv') here and float32 of global shape (8, 4) "
        "(a part of 'qkv') in a sibling shard"
    )


def test_layouts_that_differ_in_parts_alone_are_told_apart_in_words() -> None:
    other = Layout((fused(rows("q", 8, 0, 4, 0), *QKV[1:]),))
    said = difference(Layout((fused(*QKV),)), other)
    assert "of q at [4, 0], k at [2, 0], v at [2, 0] against" in said
    assert "of q at [0, 0], k at" in said


# ------------------------------------------------------------------------------------------------------------ chance


@st.composite
def _cut(draw: st.DrawFn) -> tuple[Shape, list[Part]]:
    """Cut a tensor into boxes at random, again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes: list[tuple[Shape, Shape]] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        for begin, length in ((start[dim], at), (start[dim] + at, size[dim] - at)):
            if length:
                boxes.append(
                    ((*start[:dim], begin, *start[dim + 1 :]), (*size[:dim], length, *size[dim + 1 :])),
                )
    return shape, [Part(f"g{n}", size, (0,) * len(size), size, at, size) for n, (at, size) in enumerate(boxes)]


@given(cut=_cut(), chosen=st.integers(0))
def test_any_cut_into_boxes_passes_and_no_planted_fault_does(cut: tuple[Shape, list[Part]], chosen: int) -> None:
    shape, parts = cut
    check_parts("w", shape, parts)
    one = parts[chosen % len(parts)]
    with pytest.raises(LayoutMismatch, match="overlap"):
        check_parts("w", shape, [*parts, one])
    missing = [part for part in parts if part is not one]
    with pytest.raises(LayoutMismatch, match="no part has its elements") as caught:
        check_parts("w", shape, missing)
    told = [tuple(map(int, text.split(",")[: len(shape)])) for text in _bounds(str(caught.value))]
    inside = set(product(*(range(a, b) for a, b in zip(one.start, one.stop, strict=True))))
    said = set(product(*(range(a, b) for a, b in zip(*told, strict=True))))
    assert said
    assert said <= inside
    assert math.prod(one.shape) >= len(said)


def _bounds(text: str) -> tuple[str, str]:
    first = text.split("from (", 1)[1]
    return first.split(")", 1)[0].rstrip(","), first.split("to (", 1)[1].split(")", 1)[0].rstrip(",")


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[Shape, list[Part]]:
    """Draw boxes of a tensor that may overlap, or leave something out, or do both and have the right volume in all."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(1, 5))):
        begin = tuple(draw(st.integers(0, size - 1)) for size in shape)
        extent = tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, begin, strict=True))
        boxes.append(padding(begin, extent))
    return shape, boxes


@given(_boxes(), st.sampled_from([0, parts_module.TILED_DIMS_MAX]))
def test_parts_pass_when_each_element_is_painted_once_and_else_never(
    drawn: tuple[Shape, list[Part]], dims_max: int
) -> None:
    """By their corners, and compared with one another."""
    shape, parts = drawn
    painted = dict.fromkeys(product(*map(range, shape)), 0)
    for part in parts:
        for index in product(*map(range, part.start, part.stop)):
            painted[index] += 1
    with mock.patch.object(parts_module, "TILED_DIMS_MAX", dims_max):
        if set(painted.values()) == {1}:
            check_parts("w", shape, parts)
        else:
            with pytest.raises(LayoutMismatch, match="overlap" if max(painted.values()) > 1 else "no part has"):
                check_parts("w", shape, parts)


def test_good_parts_are_not_compared_with_one_another() -> None:
    """A grid of parts is as many comparisons as it has parts, times those in a row of it."""
    grid = [Part("w", (64, 64), (2 * i, 2 * j), (1, 1), (i, j), (1, 1)) for i in range(32) for j in range(32)]
    with mock.patch.object(parts_module, "_overlap", side_effect=AssertionError):
        check_parts("w", (32, 32), grid)
