"""Forms are refused when they are bad, and what is derived from a good one names the same bytes in the same order."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.agent.boxes import forms, places, rows

from tensorhub_agent.primitives.forms import (
    InvalidForm,
    check_boxes,
    check_form,
    cut_form,
    is_run,
    normalized,
    receiver_form,
    run_bytes,
    run_form,
    sender_form,
)
from tensorhub_common.programs.regions import DIMS_MAX, StridedCopies, StridedForm

SQUARE = StridedForm((2, 3), (12, 4), (24, 4), 4, 4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"shape": (2,)}, "different lengths"),
        ({"shape": (2, 0)}, "without size"),
        ({"shape": (-2, 3)}, "without size"),
        ({"itemsize": 0}, "without size"),
        ({"to_itemsize": -4}, "without size"),
        ({"origin_strides": (24, -4)}, "negative stride"),
        ({"to_strides": (-1, 4)}, "negative stride"),
        ({"to_itemsize": 2}, "no cast says how"),
        ({"cast": "a>b", "itemsize": 3}, "can't be converted"),
    ],
)
def test_what_no_box_can_be_is_refused(change: dict[str, object], why: str) -> None:
    check_form(SQUARE)
    with pytest.raises(InvalidForm, match=why):
        check_form(msgspec.structs.replace(SQUARE, **change))


def test_a_form_of_too_many_dimensions_is_refused_unless_they_can_be_joined() -> None:
    many = DIMS_MAX + 1
    strides = tuple(4 ** (many - dim) for dim in range(many))
    with pytest.raises(InvalidForm, match=f"{DIMS_MAX} are allowed"):
        normalized(StridedForm((2,) * many, strides, strides, 1, 1))
    strides = tuple(2 ** (many - 1 - dim) for dim in range(many))
    assert normalized(StridedForm((2,) * many, strides, strides, 1, 1)) == run_form(2**many)


@given(forms())
def test_a_normal_form_names_the_same_bytes(form: StridedForm) -> None:
    found = normalized(form)
    assert np.array_equal(places(found, found.to_strides), places(form, form.to_strides))
    assert np.array_equal(places(found, found.origin_strides), places(form, form.origin_strides))
    assert 1 not in found.shape
    assert normalized(found) == found
    assert (found.span_bytes, found.origin_span_bytes) == (form.span_bytes, form.origin_span_bytes)
    whole = form.is_packed_here and form.is_packed_there
    assert is_run(found) == whole
    assert not whole or found == run_form(form.nbytes)


def test_elements_that_are_converted_are_never_joined_to_runs() -> None:
    form = StridedForm((4, 1, 8), (16, 99, 2), (32, 7, 4), 4, 2, "float32>bfloat16")
    found = normalized(form)
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


def test_the_half_that_casts_is_the_one_that_makes_less_to_send() -> None:
    smaller = StridedForm((4,), (5,), (9,), 4, 2, "narrow")
    assert sender_form(smaller) == StridedForm((4,), (2,), (9,), 4, 2, "narrow")
    assert receiver_form(smaller) == StridedForm((4,), (5,), (2,), 2, 2)
    larger = StridedForm((4,), (9,), (5,), 2, 4, "widen")
    assert sender_form(larger) == StridedForm((4,), (2,), (5,), 2, 2)
    assert receiver_form(larger) == StridedForm((4,), (9,), (2,), 2, 4, "widen")


def test_boxes_that_do_not_fit_the_destination_are_refused() -> None:
    form = rows(2, 4, 8, 8)
    check_boxes(StridedCopies([0, 4], [1 << 70, 0], [form, form]), 16)
    for to in (-1, 5, 1 << 70):
        with pytest.raises(ValueError, match="not in the destination of 16"):
            check_boxes(StridedCopies([to], [0], [form]), 16)
    with pytest.raises(ValueError, match="different lengths"):
        check_boxes(StridedCopies([0], [0, 1], [form]), 16)
    with pytest.raises(ValueError, match="not in the destination"):
        # Its elements all stand in one place, so it spans little; nobody has memory for what it brings.
        check_boxes(StridedCopies([0], [0], [StridedForm((1 << 40,), (0,), (0,), 1, 1)]), 16)
