"""Forms of boxes in bytes: what lies packed, how far one reaches, and what blocks change of that."""

import pytest

from tensorhub_common.programs.regions import Blocks, Sizes, StridedForm


def form(shape: Sizes, to_strides: Sizes, origin_strides: Sizes | None = None, to_itemsize: int = 2) -> StridedForm:
    return StridedForm(shape, to_strides, to_strides if origin_strides is None else origin_strides, 4, to_itemsize)


def test_a_box_has_its_bytes_at_either_end() -> None:
    """Four bytes there become two here."""
    box = form((3, 5), (64, 2), (32, 4))
    assert (box.elements, box.nbytes, box.origin_nbytes) == (15, 30, 60)
    assert (box.span_bytes, box.origin_span_bytes) == (2 * 64 + 4 * 2 + 2, 2 * 32 + 4 * 4 + 4)
    assert box.origin_shape == (3, 5)


def test_one_element_of_no_dimension_is_a_box() -> None:
    box = form((), ())
    assert (box.elements, box.nbytes, box.span_bytes, box.is_packed_here, box.is_packed_there) == (1, 2, 2, True, True)


@pytest.mark.parametrize(
    ("shape", "strides", "is_packed"),
    [
        ((3, 5), (10, 2), True),
        ((3, 5), (12, 2), False),
        ((3, 5), (10, 4), False),
        ((1, 5), (999, 2), True),
        ((3, 1), (2, 999), True),
        ((3, 1, 4), (8, 999, 2), True),
        ((3, 2, 4), (8, 8, 2), False),
    ],
)
def test_packed_is_what_follows_on_one_another(shape: Sizes, strides: Sizes, *, is_packed: bool) -> None:
    """How far apart the elements of a dimension would lie that has one says nothing."""
    assert form(shape, strides, (1,) * len(shape)).is_packed_here == is_packed
    there = tuple(2 * stride for stride in strides)
    assert form(shape, (1,) * len(shape), there).is_packed_there == is_packed


def test_what_is_made_of_blocks_is_as_large_as_those_there() -> None:
    """A box of two scales is made of 128 rows of 256 elements."""
    box = StridedForm((1, 2), (16, 4), (1024, 4), 4, 4, "float32>x", Blocks((128, 256), (0, 0)))
    assert (box.nbytes, box.origin_shape, box.origin_nbytes) == (8, (128, 256), 128 * 256 * 4)
    assert box.origin_span_bytes == 128 * 1024
    assert box.is_packed_there
    assert box.is_packed_here
