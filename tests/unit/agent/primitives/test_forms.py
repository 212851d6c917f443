"""Forms are refused when they are bad, and what is derived from a good one names the same bytes in the same order.

Also those that are computed of whole blocks, at the source.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.unit.agent.boxes import forms, places, rows

from tensorhub_agent.casting.conversion import CastUnknown, converter
from tensorhub_agent.primitives.block_forms import PART_AMAX_BYTES_MAX, amax_bytes, block_parts
from tensorhub_agent.primitives.forms import (
    InvalidForm,
    check_amax,
    check_boxes,
    check_form,
    cut_form,
    is_run,
    normalized,
    packed_strides,
    receiver_form,
    run_bytes,
    run_form,
    sender_form,
)
from tensorhub_agent.transports.ucxx.protocol.frames import AMAX_BYTES_MAX, COMPUTED_BYTES_MAX
from tensorhub_agent.transports.ucxx.protocol.gather_plan import gather_batches
from tensorhub_common.layout.quantized import BLOCK_BYTES_MAX, DERIVED
from tensorhub_common.programs.regions import DIMS_MAX, Blocks, Sizes, StridedCopies, StridedForm

VALUES, SCALES = "bfloat16>fp8-block-128:values", "bfloat16>fp8-block-128:scales"
SQUARE = StridedForm((2, 3), (12, 4), (24, 4), 4, 4)
MANY = DIMS_MAX + 1
APART = tuple(4 ** (MANY - dim) for dim in range(MANY))


def form_of(cast: str, blocks: Sizes, shape: Sizes, skip: Sizes | None = None, itemsize: int = 2) -> StridedForm:
    """Return a form that is computed of blocks, packed at both ends."""
    size = 4 if cast.endswith("scales") else 1
    box = Blocks(blocks, skip or (0,) * len(blocks))
    return StridedForm(shape, packed_strides(shape, size), packed_strides(blocks, itemsize), itemsize, size, cast, box)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (replace(SQUARE, shape=(2,)), "different lengths"),
        (replace(SQUARE, shape=(2, 0)), "without size"),
        (replace(SQUARE, shape=(-2, 3)), "without size"),
        (replace(SQUARE, itemsize=0), "without size"),
        (replace(SQUARE, to_itemsize=-4), "without size"),
        (replace(SQUARE, origin_strides=(24, -4)), "negative stride"),
        (replace(SQUARE, to_strides=(-1, 4)), "negative stride"),
        (replace(SQUARE, to_itemsize=2), "no cast says how"),
        (replace(SQUARE, cast="a>b", itemsize=3), "can't be converted"),
        (StridedForm((2,) * MANY, APART, APART, 1, 1), f"{DIMS_MAX} are allowed"),
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
def test_what_no_box_can_be_is_refused(form: StridedForm, why: str) -> None:
    def checked() -> StridedForm:
        check_form(form)
        return normalized(form)

    with pytest.raises(InvalidForm, match=why):
        checked()


@given(forms())
def test_a_normal_form_names_the_same_bytes(form: StridedForm) -> None:
    check_form(form)
    found = normalized(form)
    assert np.array_equal(places(found, found.to_strides), places(form, form.to_strides))
    assert np.array_equal(places(found, found.origin_strides), places(form, form.origin_strides))
    assert 1 not in found.shape
    assert normalized(found) == found
    assert (found.span_bytes, found.origin_span_bytes) == (form.span_bytes, form.origin_span_bytes)
    whole = form.is_packed_here and form.is_packed_there
    assert is_run(found) == whole
    assert not whole or found == run_form(form.nbytes)


def test_dimensions_are_joined_but_elements_that_are_converted_never_to_runs() -> None:
    strides = tuple(2 ** (MANY - 1 - dim) for dim in range(MANY))
    assert normalized(StridedForm((2,) * MANY, strides, strides, 1, 1)) == run_form(2**MANY)
    found = normalized(StridedForm((4, 1, 8), (16, 99, 2), (32, 7, 4), 4, 2, "float32>bfloat16"))
    assert found == StridedForm((32,), (2,), (4,), 4, 2, "float32>bfloat16")
    assert run_bytes(found) == 4
    assert not is_run(found)


@given(forms(), st.integers(1, 5000))
def test_parts_are_the_whole_in_its_order_and_not_too_long(form: StridedForm, nbytes_max: int) -> None:
    whole = normalized(form)
    cut = list(cut_form(whole, nbytes_max))
    to = [part.to + places(part.form, part.form.to_strides) for part in cut]
    origin = [part.origin + places(part.form, part.form.origin_strides) for part in cut]
    assert np.array_equal(np.concatenate(to), places(whole, whole.to_strides))
    assert np.array_equal(np.concatenate(origin), places(whole, whole.origin_strides))
    assert all(part.form.nbytes <= nbytes_max for part in cut)
    assert len({id(part.form) for part in cut}) <= 2 * max(len(whole.shape), 1), "parts that are alike have one form"


@given(forms())
def test_two_halves_make_the_whole(form: StridedForm) -> None:
    whole = normalized(form)
    sent, received = sender_form(whole), receiver_form(whole)
    assert sent.is_packed_here
    assert received.is_packed_there
    packed = np.arange(whole.nbytes)
    assert np.array_equal(places(sent, sent.to_strides), packed)
    assert np.array_equal(places(received, received.origin_strides), packed)
    assert np.array_equal(places(sent, sent.origin_strides), places(whole, whole.origin_strides))
    assert np.array_equal(places(received, received.to_strides), places(whole, whole.to_strides))


def test_the_half_that_casts_is_the_one_that_makes_less_to_send_and_blocks_are_computed_at_the_source() -> None:
    """Scales are larger than an element of what they are made of, and far fewer."""
    smaller = StridedForm((4,), (5,), (9,), 4, 2, "narrow")
    assert sender_form(smaller) == StridedForm((4,), (2,), (9,), 4, 2, "narrow")
    assert receiver_form(smaller) == StridedForm((4,), (5,), (2,), 2, 2)
    larger = StridedForm((4,), (9,), (5,), 2, 4, "widen")
    assert sender_form(larger) == StridedForm((4,), (2,), (5,), 2, 2)
    assert receiver_form(larger) == StridedForm((4,), (9,), (2,), 2, 4, "widen")
    for form in (form_of(VALUES, (300, 300), (100, 70), (100, 0)), form_of(SCALES, (300, 300), (3, 3))):
        sent, size = packed_strides(form.shape, form.to_itemsize), form.to_itemsize
        assert sender_form(form) == replace(form, to_strides=sent)
        assert receiver_form(form) == StridedForm(form.shape, form.to_strides, sent, size, size)
    with pytest.raises(CastUnknown, match="not in this version"):
        converter(VALUES)


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        *((StridedCopies([to], [0], [rows(2, 4, 8, 8)]), "not in the destination of 16") for to in (-1, 5, 1 << 70)),
        (StridedCopies([0], [0, 1], [rows(2, 4, 8, 8)]), "different lengths"),
        # Its elements all stand in one place, so it spans little; nobody has memory for what it brings.
        (StridedCopies([0], [0], [StridedForm((1 << 40,), (0,), (0,), 1, 1)]), "not in the destination"),
    ],
)
def test_boxes_that_do_not_fit_the_destination_are_refused(boxes: StridedCopies, why: str) -> None:
    check_boxes(StridedCopies([0, 4], [1 << 70, 0], [rows(2, 4, 8, 8)] * 2), 16)
    with pytest.raises(ValueError, match=why):
        check_boxes(boxes, 16)


# Forms that are computed of whole blocks.


@st.composite
def block_forms(draw: st.DrawFn) -> StridedForm:
    blocks = tuple(draw(st.sampled_from([1, 3, 128, 130, 300, 515])) for _ in range(2))
    blocks = (*draw(st.sampled_from([(), (2,), (2, 1)])), *blocks)
    names = [f"{form}:{part}" for form in ("fp8-block-128", "fp8-channel") for part in ("values", "scales")]
    kind = DERIVED[draw(st.sampled_from(names))]
    if kind.is_scales:
        return form_of(f"bfloat16>{kind.name}", blocks, kind.shape(blocks))
    skip = tuple(draw(st.integers(0, size - 1)) for size in blocks)
    shape = tuple(draw(st.integers(1, size - a)) for size, a in zip(blocks, skip, strict=True))
    return form_of(f"bfloat16>{kind.name}", blocks, shape, skip)


@given(block_forms(), st.sampled_from([1, 40_000, 100_000, 1 << 20]))
@settings(deadline=None)
def test_parts_are_every_element_once_made_of_what_it_was_made_of(form: StridedForm, nbytes_max: int) -> None:
    """An element's place and the beginning of its block are the same in the part as in the whole."""
    check_form(form)
    assert normalized(form) == form
    assert form.blocks is not None
    kind = DERIVED[form.cast.partition(">")[2]]
    block, steps = kind.block(form.blocks.shape), kind.steps(form.blocks.shape)
    part_bytes_max = max(nbytes_max, int(np.prod(block)) * form.itemsize, form.to_itemsize)
    seen = np.zeros(form.shape, np.int64)
    for to, origin, part in block_parts(form, nbytes_max):
        check_form(part)
        assert part.blocks is not None
        assert max(part.nbytes, part.origin_nbytes) <= part_bytes_max
        first = np.unravel_index(to // form.to_itemsize, form.shape)
        there = np.unravel_index(origin // form.itemsize, form.blocks.shape)
        sizes = zip(there, part.blocks.shape, form.blocks.shape, block, strict=True)
        for at, size, whole, step in sizes:
            assert at % step == 0
            assert at + size == whole or size % step == 0, "a block is cut through"
        for a, skip, step, b, part_skip in zip(first, form.blocks.skip, steps, there, part.blocks.skip, strict=True):
            assert (a + skip) * step == b + part_skip
        seen[tuple(slice(a, a + size) for a, size in zip(first, part.shape, strict=True))] += 1
    assert (seen == 1).all()


BY_AMAX = StridedForm((300, 260), (260, 1), (520, 2), 2, 1, VALUES)
"""Values that are computed by the largest magnitudes of their 3 × 3 blocks."""


def thin(elements: int) -> StridedForm:
    """Return rows of one element each: what comes with them is longer than they are."""
    return StridedForm((elements, 1), (1, 1), (2, 2), 2, 1, "bfloat16>fp8-channel:values")


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


def test_what_is_computed_and_what_comes_with_it_is_bounded() -> None:
    """A gigabyte of weights has few scales, which would fit into one question."""
    form = form_of(SCALES, (32_768, 16_384), (256, 128))
    lots = list(gather_batches(StridedCopies([0], [0], [form])))
    assert sum(lot.nbytes for lot in lots) == form.nbytes
    computed = [lot.computed_bytes for lot in lots]
    assert sum(computed) == form.origin_nbytes == 1 << 30
    assert COMPUTED_BYTES_MAX // 2 < max(computed) <= COMPUTED_BYTES_MAX
    assert all(message.computed_bytes <= COMPUTED_BYTES_MAX for lot in lots for message in lot.messages)
    sizes = [amax_bytes(part.form) for part in block_parts(thin(10_000), 1 << 20)]
    assert (max(sizes), sum(sizes)) == (PART_AMAX_BYTES_MAX, 40_000)
    amax = np.arange(20_000, dtype=np.float32).tobytes()
    lots = list(gather_batches(StridedCopies([0], [0], [thin(20_000)], [amax])))
    assert max(lot.amax_bytes for lot in lots) <= AMAX_BYTES_MAX
    assert b"".join(lot.frame(1, sums=False).amax for lot in lots) == amax


@pytest.mark.parametrize(
    ("form", "amax"), [*((BY_AMAX, amax) for amax in ((), (b"",), (bytes(32),), (bytes(40),))), (SQUARE, (bytes(36),))]
)
def test_what_comes_with_boxes_must_be_that_of_their_blocks(form: StridedForm, amax: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError, match="largest magnitudes"):
        check_amax(StridedCopies([0], [0], [form], amax))
