"""Layouts and their canonical pieces: what is checked, what is equal, where everything stands."""

import re
import time
from ast import literal_eval
from collections.abc import Iterator
from itertools import product
from unittest import mock

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout import parts as parts_module
from tensorhub_common.layout.layout import (
    ALIGNMENT_BYTES,
    PIECE_BYTES_MAX,
    Box,
    Layout,
    TensorEntry,
    difference,
    layout_digest,
    layout_of,
    payload_bytes,
    pieces,
    placements,
    segment_bytes,
    shared_mismatch,
)
from tensorhub_common.layout.parts import NAME_BYTES_MAX, SIZE_MAX, Part, Shape, check_parts, named, padding

MIB = 1024 * 1024


def entry(
    name: str,
    shape: Shape,
    *,
    itemsize: int = 4,
    whole: Shape | None = None,
    offset: Shape | None = None,
    dtype: str = "float32",
) -> TensorEntry:
    """Return an entry that is whole unless something else is said."""
    return TensorEntry(
        name, dtype, itemsize, shape, shape if whole is None else whole, (0,) * len(shape) if offset is None else offset
    )


def boxes(layout: Layout) -> list[Box]:
    table = pieces(layout)
    return [table.box(piece) for piece in range(len(table))]


def test_whatever_else_differs_makes_another_digest() -> None:
    base = entry("a", (2, 2), whole=(4, 4))
    others = [
        entry("b", (2, 2), whole=(4, 4)),
        entry("a", (2, 2), whole=(4, 4), dtype="int32"),
        entry("a", (2, 2), whole=(4, 4), itemsize=8),
        entry("a", (2, 1), whole=(4, 4)),
        entry("a", (2, 2), whole=(4, 5)),
        entry("a", (2, 2), whole=(4, 4), offset=(0, 1)),
    ]
    digests = {layout_digest(layout_of([each])) for each in [base, *others]}
    assert len(digests) == len(others) + 1


def test_a_layouts_digest_is_the_same_in_every_version_of_the_hub() -> None:
    """Agents of two versions must name one layout alike: this constant is part of the protocol."""
    layout = layout_of([entry("w", (2, 3), whole=(4, 3), offset=(2, 0)), entry("b", (), dtype="bfloat16", itemsize=2)])
    assert layout_digest(layout) == "b996adfe1be9b807ff5a7052fc4dc57188bc9aab0bd886f2b51d9443400730af"


TOO_LARGE = PIECE_BYTES_MAX + 1
BAD_NAMES = ["", "x" * (NAME_BYTES_MAX + 1), "ü" * NAME_BYTES_MAX, "\ud800"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        *((entry(name, (1,)), "tensor name") for name in BAD_NAMES),
        *((entry("a", (1,), itemsize=size), "itemsize") for size in [0, -4, TOO_LARGE, 10**30]),
        (entry("ok", (2,)), "'ok' is given twice"),
        (entry("w", (2,), whole=(2, 2), offset=(0,)), "'w'"),
        (entry("w", (2,), offset=(0, 0)), "'w'"),
        (entry("w", (-1,), whole=(2,), offset=(0,)), "'w'"),
        (entry("w", (2,), offset=(-1,)), "'w'"),
        (entry("w", (2,), offset=(1,)), "'w'"),
        (entry("w", (2,), whole=(1,)), "'w'"),
        (entry("w", (0,), whole=(2,), offset=(3,)), "'w'"),
        (entry("w", (2**63,)), "'w'"),
        (entry("w", (2**40, 2**40)), "'w'"),
        (entry("w", (0, 2**64)), "'w'"),
    ],
)
def test_an_entry_that_can_not_be_is_refused_and_the_tensor_named(wrong: TensorEntry, said: str) -> None:
    for name in ["a.b", " ", "ü", "\n", "x" * NAME_BYTES_MAX]:
        assert layout_of([entry(name, (1,))]).tensors[0].name == name
    with pytest.raises(LayoutMismatch, match=said):
        layout_of([entry("ok", (1,)), wrong])


def test_every_tensor_starts_aligned_and_an_empty_one_takes_no_room() -> None:
    layout = layout_of([entry("a", (1,)), entry("b", (0, 5)), entry("c", ()), entry("d", (65,))])
    assert placements(layout) == [0, 256, 256, 512]
    assert segment_bytes(layout) == 512 + 2 * ALIGNMENT_BYTES
    assert payload_bytes(layout) == 4 + 0 + 4 + 260
    assert boxes(layout_of([entry("scalar", ()), entry("empty", (3, 0))])) == [Box("scalar", (), ())]
    assert boxes(layout_of([entry("w", (2, 3), whole=(8, 3), offset=(4, 0))])) == [Box("w", (4, 0), (6, 3))]
    nothing = layout_of([])
    assert (segment_bytes(nothing), payload_bytes(nothing), len(pieces(nothing))) == (0, 0, 0)
    assert pieces(nothing).piece_at(0) == -1
    assert layout_of([entry("at the end", (0,), whole=(2,), offset=(2,))]).tensors[0].nbytes == 0


def test_a_piece_is_found_by_its_place() -> None:
    table = pieces(layout_of([entry("a", (3 * MIB,)), entry("b", (1,))]))
    assert table.nbytes == [4 * MIB, 4 * MIB, 4 * MIB, 4]
    assert [table.piece_at(at) for at in (0, 4 * MIB - 1, 4 * MIB, 12 * MIB - 1, 12 * MIB)] == [0, 0, 1, 2, 3]
    assert pieces(layout_of([])).piece_at(0) == -1


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((PIECE_BYTES_MAX,), 1, [((0,), (PIECE_BYTES_MAX,))]),
        ((PIECE_BYTES_MAX + 1,), 1, [((0,), (PIECE_BYTES_MAX,)), ((PIECE_BYTES_MAX,), (PIECE_BYTES_MAX + 1,))]),
        ((2, 3 * MIB), 1, [((0, 0), (1, 3 * MIB)), ((1, 0), (2, 3 * MIB))]),
        ((2, 5 * MIB), 1, [((i, at), (i + 1, end)) for i in (0, 1) for at, end in ((0, 4 * MIB), (4 * MIB, 5 * MIB))]),
        ((1, 1, 4, MIB), 2, [((0, 0, 0, 0), (1, 1, 2, MIB)), ((0, 0, 2, 0), (1, 1, 4, MIB))]),
        ((3,), PIECE_BYTES_MAX, [((0,), (1,)), ((1,), (2,)), ((2,), (3,))]),
    ],
)
def test_a_tensor_is_cut_along_its_first_dimension_that_yields_small_enough_slices(
    shape: Shape, itemsize: int, expected: list[tuple[Shape, Shape]]
) -> None:
    assert boxes(layout_of([entry("w", shape, itemsize=itemsize)])) == [Box("w", *each) for each in expected]


@pytest.mark.parametrize(
    "layout",
    [
        layout_of([entry("w", (1 << 20, 3))]),
        layout_of([entry("w", (2**29,))]),
        layout_of([entry("w", (2, 1 << 28))]),
        layout_of([entry(f"t{number}", (3,)) for number in range(5000)]),
        layout_of([entry("w", (1,) * 60 + (1 << 24,))]),
    ],
    ids=["tall", "2 GiB flat", "2 GiB in two rows", "5,000 tiny", "60 dimensions"],
)
def test_huge_layouts_are_cut_fast(layout: Layout) -> None:
    began = time.thread_time()
    table = pieces(layout)
    assert time.thread_time() - began < 1.0
    assert sum(table.nbytes) == payload_bytes(layout)
    assert max(table.nbytes) <= PIECE_BYTES_MAX


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (entry("w", (2, 4), whole=(4, 4), offset=(2, 0)), None),
        (entry("v", (9,), dtype="int8"), None),
        (entry("w", (2, 4), whole=(6, 4)), "global shape (6, 4)"),
        (entry("w", (2, 4), whole=(4, 4), dtype="int32"), "int32"),
    ],
)
def test_what_siblings_share_must_be_one_global_tensor(other: TensorEntry, said: str | None) -> None:
    mine = layout_of([entry("w", (2, 4), whole=(4, 4))])
    why = shared_mismatch(mine, layout_of([other]))
    assert why is None if said is None else why is not None and said in why


def test_the_difference_names_the_tensors() -> None:
    one = layout_of([entry("a", (1,)), entry("b", (2,)), entry("c", (3,))])
    two = layout_of([entry("a", (1,)), entry("b", (4,)), entry("d", (3,))])
    told = difference(one, two)
    assert "'b' (float32[2] of [2] at [0] against float32[4] of [4] at [0])" in told
    assert "'c' (float32[3] of [3] at [0] against absent)" in told
    assert "'d' (absent against" in told
    assert "'a'" not in told
    assert difference(one, one) == ""
    many = layout_of([entry(f"t{number}", (1,)) for number in range(1000)])
    assert difference(many, layout_of([]), names_max=2).endswith("and 998 more")
    told = difference(Layout((fused(*QKV),)), Layout((fused(rows("q", 8, 0, 4, 0), *QKV[1:]),)))
    assert "of q at [4, 0], k at [2, 0], v at [2, 0] against" in told
    assert "of q at [0, 0], k at" in told


def rows(name: str, whole: int, first: int, count: int, at: int) -> Part:
    """Return `count` rows of a global tensor of `whole` rows and 4 columns, standing from row `at` on."""
    return Part(name, (whole, 4), (first, 0), (count, 4), (at, 0), (count, 4))


QKV = (rows("q", 8, 4, 4, 0), rows("k", 4, 2, 2, 4), rows("v", 4, 2, 2, 6))


def fused(*parts: Part, name: str = "qkv", dtype: str = "float32", itemsize: int = 4) -> TensorEntry:
    return TensorEntry(name, dtype, itemsize, (8, 4), (8, 4), (0, 0), parts)


def test_parts_that_cover_a_tensor_once_are_a_layout() -> None:
    layout = layout_of([fused(*QKV)])
    assert layout.tensors[0].parts == QKV
    assert layout_digest(layout) != layout_digest(layout_of([fused()]))


def test_dimensions_of_one_element_in_front_are_left_out() -> None:
    stacked = [Part(f"e{e}", (6, 4), (0, 0), (6, 4), (e, 0, 0), (1, 6, 4)) for e in range(3)]
    check_parts("w13", (3, 6, 4), stacked)
    rest = padding((6, 0), (2, 4))
    check_parts("qkv", (8, 4), (*QKV[:2], rest))
    assert (rest.is_padding, QKV[0].is_padding) == (True, False)
    scalar = Part("s", (), (), (), (), ())
    check_parts("w", (), [scalar])
    with pytest.raises(LayoutMismatch, match=r"part 0 .* and part 1 .* overlap"):
        check_parts("w", (), [scalar, scalar])
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
    "an overlap of what is not in order": (
        (rows("q", 8, 0, 3, 0), rows("k", 8, 0, 3, 5), rows("v", 8, 0, 2, 1)),
        r"part 0 \('q'\) and part 2 \('v'\) overlap",
    ),
    "before the tensor": ((rows("q", 8, 0, 4, -1),), r"part 0 \('q'\) of shape .* does not fit into the tensor"),
    "outside of the global one": ((*QKV[:2], rows("v", 4, 3, 2, 6)), r"part 2 \('v'\) of extent .* global shape"),
    "before the global one": ((*QKV[:2], rows("v", 4, -1, 2, 6)), r"part 2 \('v'\) of extent .* global shape"),
    "too large a global one": (
        (*QKV[:2], rows("v", SIZE_MAX + 1, 0, 2, 6)),
        rf"part 2 \('v'\) has global shape .*: a dimension has at most {SIZE_MAX} elements",
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


def test_there_is_a_bound_on_names_in_bytes_and_on_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Part("x" * 81, (4,), (0,), (4,), (0,), (4,))
    assert named(3, whole) == f"part 3 ('{'x' * 80}')"
    assert named(0, padding((0,), (4,))) == "part 0 (padding)"
    check_parts("w", (4,), [msgspec.structs.replace(whole, name="ä" * (NAME_BYTES_MAX // 2))])
    with pytest.raises(LayoutMismatch, match=f"longer than {NAME_BYTES_MAX} bytes: rename it"):
        check_parts("w", (4,), [msgspec.structs.replace(whole, name="ä" * (NAME_BYTES_MAX // 2) + "x")])
    check_parts("w", (8, 4), [*QKV[:2], rows("v", SIZE_MAX, 0, 2, 6)])
    monkeypatch.setattr(parts_module, "PARTS_MAX", 3)
    check_parts("w", (8, 4), QKV)
    monkeypatch.setattr(parts_module, "PARTS_MAX", 2)
    with pytest.raises(LayoutMismatch, match="has 3 parts; at most 2 are possible: split it"):
        check_parts("w", (8, 4), QKV)


def test_a_global_tensor_is_one_shape_and_dtype_within_a_shard() -> None:
    with pytest.raises(LayoutMismatch, match=r"global shape \(4, 4\) \(a part of 'qkv'\) elsewhere in the shard"):
        layout_of([fused(*QKV), TensorEntry("k", "float32", 4, (3, 4), (3, 4), (0, 0))])
    with pytest.raises(LayoutMismatch, match="tensor 'q' is"):
        layout_of([fused(*QKV), fused(*QKV, name="other", dtype="bfloat16", itemsize=2)])


def test_siblings_are_compared_by_the_global_tensors_of_their_parts() -> None:
    mine = layout_of([fused(*QKV)])
    other_half = (rows("q", 8, 0, 4, 0), rows("k", 4, 0, 2, 4), rows("v", 4, 0, 2, 6))
    assert shared_mismatch(mine, layout_of([fused(*other_half)])) is None
    assert shared_mismatch(mine, layout_of([TensorEntry("k", "float32", 4, (4, 4), (4, 4), (0, 0))])) is None
    # What each of them registered under one name need not be alike: padded in the last shard, say.
    longer = TensorEntry("qkv", "float32", 4, (9, 4), (9, 4), (0, 0), (*other_half, padding((8, 0), (1, 4))))
    assert shared_mismatch(mine, layout_of([longer])) is None
    assert "int32" in (shared_mismatch(mine, layout_of([fused(*other_half, dtype="int32")])) or "")
    assert shared_mismatch(mine, layout_of([entry("others", (9,), dtype="int8")])) is None
    why = shared_mismatch(mine, layout_of([fused(rows("q", 9, 0, 4, 0), *other_half[1:])]))
    assert why == (
        "tensor 'q' is float32 of global shape (9, 4) (a part of 'qkv') here and float32 of global shape (8, 4) "
        "(a part of 'qkv') in a sibling shard"
    )


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


def inside(start: Shape, stop: Shape) -> Iterator[Shape]:
    return product(*map(range, start, stop))


QUARTERS = [padding((2 * row, 2 * column), (2, 2)) for row, column in product((0, 1), repeat=2)]


@example(((4, 4), QUARTERS), 0)
@example(((4, 4), QUARTERS[:3]), 0)
@example(((4, 4), [QUARTERS[1], QUARTERS[0], QUARTERS[2]]), 0)
@example(((2, 2, 2), [padding((0, 0, 0), (1, 2, 2))]), 0)
@example(((2, 3), [padding((0, 1), (2, 2))]), 0)
@given(_boxes(), st.sampled_from([0, parts_module.TILED_DIMS_MAX]))
def test_parts_pass_when_each_element_is_painted_once_and_else_never(
    drawn: tuple[Shape, list[Part]], dims_max: int
) -> None:
    """By their corners, and compared with one another."""
    shape, parts = drawn
    painted = dict.fromkeys(product(*map(range, shape)), 0)
    for part in parts:
        for index in inside(part.start, part.stop):
            painted[index] += 1
    with mock.patch.object(parts_module, "TILED_DIMS_MAX", dims_max):
        if set(painted.values()) == {1}:
            check_parts("w", shape, parts)
        else:
            with pytest.raises(LayoutMismatch) as refused:
                check_parts("w", shape, parts)
            said = str(refused.value)
            if max(painted.values()) > 1:
                one, other = (parts[int(number)] for number in re.findall(r"part (\d+)", said))
                assert set(inside(one.start, one.stop)) & set(inside(other.start, other.stop))
            else:
                start, stop = (literal_eval(each) for each in re.findall(r"(?:from|to) (\(.*?\))", said))
                assert {painted[index] for index in inside(start, stop)} == {0}


def test_good_parts_are_not_compared_with_one_another() -> None:
    """A grid of parts is as many comparisons as it has parts, times those in a row of it."""
    grid = [Part("w", (64, 64), (2 * i, 2 * j), (1, 1), (i, j), (1, 1)) for i in range(32) for j in range(32)]
    compared = mock.patch.object(parts_module, "_overlap", side_effect=AssertionError)
    with compared, mock.patch.object(parts_module, "TILED_DIMS_MAX", 2):
        check_parts("w", (32, 32), grid)
