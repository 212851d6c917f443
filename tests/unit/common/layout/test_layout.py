"""Layouts and their canonical pieces: what is checked, what is equal, where everything stands."""

import time

import pytest

from tensorhub_common.errors import LayoutMismatch
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
from tensorhub_common.layout.parts import NAME_BYTES_MAX, Shape

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


# ------------------------------------------------------------------------------------------------------ well formed


def test_the_order_of_the_tensors_makes_no_difference() -> None:
    one, two = entry("a", (2,)), entry("b", (3,))
    assert layout_of([one, two]) == layout_of([two, one])
    assert layout_digest(layout_of([one, two])) == layout_digest(layout_of([two, one]))


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


def test_a_layout_without_a_tensor_is_one_of_no_bytes() -> None:
    layout = layout_of([])
    assert (segment_bytes(layout), payload_bytes(layout), len(pieces(layout))) == (0, 0, 0)


@pytest.mark.parametrize("name", ["", "x" * (NAME_BYTES_MAX + 1), "ü" * NAME_BYTES_MAX, "\ud800"])
def test_a_name_that_can_not_be_written_is_refused(name: str) -> None:
    with pytest.raises(LayoutMismatch, match="tensor name"):
        layout_of([entry(name, (1,))])


@pytest.mark.parametrize("name", ["a.b", " ", "ü", "\n", "x" * NAME_BYTES_MAX])
def test_any_other_name_is_possible(name: str) -> None:
    assert layout_of([entry(name, (1,))]).tensors[0].name == name


def test_a_name_that_is_given_twice_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="'a' is given twice"):
        layout_of([entry("a", (1,)), entry("b", (1,)), entry("a", (2,))])


@pytest.mark.parametrize(
    ("shape", "whole", "offset"),
    [
        ((2,), (2, 2), (0,)),
        ((2,), (2,), (0, 0)),
        ((-1,), (2,), (0,)),
        ((2,), (2,), (-1,)),
        ((2,), (2,), (1,)),
        ((2,), (1,), (0,)),
        ((0,), (2,), (3,)),
        ((2**63,), (2**63,), (0,)),
        ((2**40, 2**40), (2**40, 2**40), (0, 0)),
        ((0, 2**64), (0, 2**64), (0, 0)),
    ],
)
def test_a_box_that_does_not_fit_is_refused_and_the_tensor_named(shape: Shape, whole: Shape, offset: Shape) -> None:
    with pytest.raises(LayoutMismatch, match="'weight'"):
        layout_of([entry("ok", (1,)), entry("weight", shape, whole=whole, offset=offset)])


@pytest.mark.parametrize("itemsize", [0, -4, PIECE_BYTES_MAX + 1, 10**30])
def test_an_itemsize_that_is_none_is_refused(itemsize: int) -> None:
    with pytest.raises(LayoutMismatch, match="itemsize"):
        layout_of([entry("a", (1,), itemsize=itemsize)])


def test_an_empty_box_at_the_end_of_its_tensor_fits() -> None:
    assert layout_of([entry("a", (0,), whole=(2,), offset=(2,))]).tensors[0].nbytes == 0


# ------------------------------------------------------------------------------------------------------- in the segment


def test_every_tensor_starts_aligned_and_an_empty_one_takes_no_room() -> None:
    layout = layout_of([entry("a", (1,)), entry("b", (0, 5)), entry("c", ()), entry("d", (65,))])
    assert placements(layout) == [0, 256, 256, 512]
    assert segment_bytes(layout) == 512 + 2 * ALIGNMENT_BYTES
    assert payload_bytes(layout) == 4 + 0 + 4 + 260


def test_scalars_and_empty_tensors() -> None:
    layout = layout_of([entry("scalar", ()), entry("empty", (3, 0))])
    assert boxes(layout) == [Box("scalar", (), ())]


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
        (
            (2, 5 * MIB),
            1,
            [
                ((0, 0), (1, 4 * MIB)),
                ((0, 4 * MIB), (1, 5 * MIB)),
                ((1, 0), (2, 4 * MIB)),
                ((1, 4 * MIB), (2, 5 * MIB)),
            ],
        ),
        ((1, 1, 4, MIB), 2, [((0, 0, 0, 0), (1, 1, 2, MIB)), ((0, 0, 2, 0), (1, 1, 4, MIB))]),
        ((3,), PIECE_BYTES_MAX, [((0,), (1,)), ((1,), (2,)), ((2,), (3,))]),
    ],
)
def test_a_tensor_is_cut_along_its_first_dimension_that_yields_small_enough_slices(
    shape: Shape, itemsize: int, expected: list[tuple[Shape, Shape]]
) -> None:
    assert boxes(layout_of([entry("w", shape, itemsize=itemsize)])) == [Box("w", *each) for each in expected]


def test_a_piece_is_a_box_in_global_index_space() -> None:
    layout = layout_of([entry("w", (2, 3), whole=(8, 3), offset=(4, 0))])
    assert boxes(layout) == [Box("w", (4, 0), (6, 3))]


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


# ----------------------------------------------------------------------------------------------------------- comparing


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


def test_the_difference_of_many_tensors_stays_short() -> None:
    many = layout_of([entry(f"t{number}", (1,)) for number in range(1000)])
    assert difference(many, layout_of([]), names_max=2).endswith("and 998 more")
