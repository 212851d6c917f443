"""Forms that are computed of whole blocks: cut into the same elements, checked, and computed at the source."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_agent.compute.conversion import CastUnknown, converter
from tensorhub_agent.primitives.block_forms import PART_AMAX_BYTES_MAX, amax_bytes, block_parts
from tensorhub_agent.primitives.forms import (
    InvalidForm,
    check_amax,
    check_form,
    normalized,
    packed_strides,
    receiver_form,
    sender_form,
)
from tensorhub_agent.transports.ucxx.protocol.frames import AMAX_BYTES_MAX, COMPUTED_BYTES_MAX
from tensorhub_agent.transports.ucxx.protocol.gather_plan import gather_batches
from tensorhub_common.layout.quantized import BLOCK_BYTES_MAX, DERIVED
from tensorhub_common.programs.regions import DIMS_MAX, Blocks, Sizes, StridedCopies, StridedForm

VALUES, SCALES = "bfloat16>fp8-block-128:values", "bfloat16>fp8-block-128:scales"


def form_of(cast: str, blocks: Sizes, shape: Sizes, skip: Sizes | None = None, itemsize: int = 2) -> StridedForm:
    """Return a form that is packed at both ends."""
    size = 4 if cast.endswith("scales") else 1
    box = Blocks(blocks, skip or (0,) * len(blocks))
    return StridedForm(shape, packed_strides(shape, size), packed_strides(blocks, itemsize), itemsize, size, cast, box)


@st.composite
def forms(draw: st.DrawFn) -> StridedForm:
    blocks = tuple(draw(st.sampled_from([1, 3, 128, 130, 300, 515])) for _ in range(2))
    blocks = (*draw(st.sampled_from([(), (2,), (2, 1)])), *blocks)
    kind = DERIVED[
        f"{draw(st.sampled_from(['fp8-block-128', 'fp8-channel']))}:{draw(st.sampled_from(['values', 'scales']))}"
    ]
    if kind.is_scales:
        return form_of(f"bfloat16>{kind.name}", blocks, kind.shape(blocks))
    skip = tuple(draw(st.integers(0, size - 1)) for size in blocks)
    shape = tuple(draw(st.integers(1, size - a)) for size, a in zip(blocks, skip, strict=True))
    return form_of(f"bfloat16>{kind.name}", blocks, shape, skip)


@given(forms(), st.sampled_from([1, 40_000, 100_000, 1 << 20]))
@settings(deadline=None)
def test_parts_are_every_element_once_made_of_what_it_was_made_of(form: StridedForm, nbytes_max: int) -> None:
    """An element's place and the beginning of its block are the same in the part as in the whole."""
    check_form(form)
    assert normalized(form) == form
    assert form.blocks is not None
    kind = DERIVED[form.cast.partition(">")[2]]
    block = kind.block(form.blocks.shape)
    seen = np.zeros(form.shape, np.int64)
    for to, origin, part in block_parts(form, nbytes_max):
        check_form(part)
        assert part.blocks is not None
        assert max(part.nbytes, part.origin_nbytes) <= max(
            nbytes_max, int(np.prod(block)) * form.itemsize, form.to_itemsize
        )
        first = np.unravel_index(to // form.to_itemsize, form.shape)
        there = np.unravel_index(origin // form.itemsize, form.blocks.shape)
        assert all(at % step == 0 for at, step in zip(there, block, strict=True))
        ends = [
            at + size == whole or size % step == 0
            for at, size, whole, step in zip(there, part.blocks.shape, form.blocks.shape, block, strict=True)
        ]
        assert all(ends), "a block is cut through"
        steps = kind.steps(form.blocks.shape)
        for a, skip, step, b, part_skip in zip(first, form.blocks.skip, steps, there, part.blocks.skip, strict=True):
            assert (a + skip) * step == b + part_skip
        seen[tuple(slice(a, a + size) for a, size in zip(first, part.shape, strict=True))] += 1
    assert (seen == 1).all()


def checked(form: StridedForm) -> StridedForm:
    check_form(form)
    return normalized(form)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (form_of("bfloat16>float32", (4, 4), (4, 4)), "as 'bfloat16>float32', which is not in this version"),
        (form_of("int32>fp8-block-128:values", (4, 4), (4, 4)), "not in this version"),
        (form_of("bfloat16>fp9:values", (4, 4), (4, 4)), "not in this version"),
        (form_of(VALUES, (4, 4), (4, 4), itemsize=4), "elements of 4 bytes are to become 1"),
        (form_of(VALUES, (4,), (4,)), "other dimensions"),
        (form_of(VALUES, (4, 4, 4), (4, 4)), "other dimensions|different lengths"),
        (form_of(VALUES, (4, 0), (4, 4)), "without size"),
        (form_of(VALUES, (4, 4), (2, 2), (-1, 0)), "begins before"),
        (form_of(VALUES, (4, 4), (4, 2), (0, 3)), "does not lie within"),
        (form_of(SCALES, (300, 300), (2, 3)), "does not lie within"),
        (form_of(SCALES, (300, 300), (3, 3), (1, 0)), "does not lie within"),
        (form_of("bfloat16>fp8-channel:scales", (1, BLOCK_BYTES_MAX), (1, 1)), "a block is longer than"),
        (form_of(VALUES, (1,) * DIMS_MAX + (4,), (1,) * DIMS_MAX + (4,)), "17 dimensions"),
    ],
)
def test_a_form_that_is_none_is_refused(form: StridedForm, said: str) -> None:
    with pytest.raises(InvalidForm, match=said):
        checked(form)


def test_without_blocks_nothing_is_computed() -> None:
    with pytest.raises(CastUnknown, match="not in this version"):
        converter(VALUES)


def test_it_is_computed_at_the_source() -> None:
    """Scales are larger than an element of what they are made of, and far fewer."""
    for form in (form_of(VALUES, (300, 300), (100, 70), (100, 0)), form_of(SCALES, (300, 300), (3, 3))):
        sent, received = sender_form(form), receiver_form(form)
        assert (sent.cast, sent.blocks, sent.origin_strides) == (form.cast, form.blocks, form.origin_strides)
        assert sent.to_strides == packed_strides(form.shape, form.to_itemsize)
        assert received == StridedForm(form.shape, form.to_strides, sent.to_strides, form.to_itemsize, form.to_itemsize)


def test_a_source_computes_a_bounded_part_for_each_question() -> None:
    """A gigabyte of weights has few scales, which would fit into one question."""
    form = form_of(SCALES, (32_768, 16_384), (256, 128))
    lots = list(gather_batches(StridedCopies([0], [0], [form])))
    assert sum(lot.nbytes for lot in lots) == form.nbytes
    computed = [lot.computed_bytes for lot in lots]
    assert sum(computed) == form.origin_nbytes == 1 << 30
    assert COMPUTED_BYTES_MAX // 2 < max(computed) <= COMPUTED_BYTES_MAX
    assert all(message.computed_bytes <= COMPUTED_BYTES_MAX for lot in lots for message in lot.messages)


BY_AMAX = StridedForm((300, 260), (260, 1), (520, 2), 2, 1, VALUES)
"""Values that are computed by the largest magnitudes of their 3 × 3 blocks."""


@pytest.mark.parametrize("nbytes_max", [1, 40_000, 100_000, 1 << 20])
def test_parts_of_values_by_amax_are_runs_of_their_blocks(nbytes_max: int) -> None:
    """So that what comes with a box is cut by counting."""
    blocks = []
    seen = np.zeros(BY_AMAX.shape, int)
    for part in block_parts(BY_AMAX, nbytes_max):
        row, column = divmod(part.to, 260)
        seen[row : row + part.form.shape[0], column : column + part.form.shape[1]] += 1
        assert (row % 128, column % 128, part.origin) == (0, 0, 2 * part.to)
        down, across = (-(-size // 128) for size in part.form.shape)
        blocks += [(row // 128 + i, column // 128 + j) for i in range(down) for j in range(across)]
        assert amax_bytes(part.form) == 4 * down * across
    assert (seen == 1).all()
    assert blocks == [(i, j) for i in range(3) for j in range(3)]


def test_a_part_of_values_by_amax_has_a_bounded_number_of_blocks() -> None:
    """Rows of one element each: what comes with them is longer than they are."""
    thin = StridedForm((10_000, 1), (1, 1), (2, 2), 2, 1, "bfloat16>fp8-channel:values")
    sizes = [amax_bytes(part.form) for part in block_parts(thin, 1 << 20)]
    assert max(sizes) == PART_AMAX_BYTES_MAX
    assert sum(sizes) == 40_000


def test_lots_are_bounded_in_what_comes_with_them() -> None:
    thin = StridedForm((20_000, 1), (1, 1), (2, 2), 2, 1, "bfloat16>fp8-channel:values")
    amax = np.arange(20_000, dtype=np.float32).tobytes()
    lots = list(gather_batches(StridedCopies([0], [0], [thin], [amax])))
    assert max(lot.amax_bytes for lot in lots) <= AMAX_BYTES_MAX
    assert b"".join(lot.frame(1, sums=False).amax for lot in lots) == amax


@pytest.mark.parametrize("amax", [(), (b"",), (bytes(32),), (bytes(40),)])
def test_what_comes_with_boxes_must_be_that_of_their_blocks(amax: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError, match="largest magnitudes"):
        check_amax(StridedCopies([0], [0], [BY_AMAX], amax))
    with pytest.raises(ValueError, match="largest magnitudes"):
        check_amax(StridedCopies([0], [0], [StridedForm((4,), (1,), (1,), 1, 1)], (bytes(36),)))
