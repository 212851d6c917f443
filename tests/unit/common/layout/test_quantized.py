"""What is computed of a global tensor: which box gives which, what a part may say of it, and the layout's digest."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.casts import FP8_SCHEMES, Fp8Scheme, ScaleOrder, Span
from tensorhub_common.layout.layout import TensorEntry, difference, layout_digest, layout_of
from tensorhub_common.layout.parts import Part, Shape, padding
from tensorhub_common.layout.quantized import DERIVED, QuantizedKind, quantized_kind

SMALL = [
    Fp8Scheme("small", block, ScaleOrder.MULTIPLY) for block in [(3, 4), (1, None), (None, None), (None, 2), (5, 1)]
]
VALUES, SCALES = "fp8-block-128:values", "fp8-block-128:scales"


def of_box(box: Span) -> set[Shape]:
    return set(product(*(range(a, b) for a, b in zip(*box, strict=True))))


@given(st.data())
def test_given_is_what_needs_nothing_outside(data: st.DataObject) -> None:
    kind = QuantizedKind("x", data.draw(st.sampled_from(SMALL)), data.draw(st.booleans()))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
    start = tuple(data.draw(st.integers(0, size)) for size in shape)
    stop = tuple(data.draw(st.integers(a, size)) for a, size in zip(start, shape, strict=True))
    box = of_box((start, stop))
    found = of_box(kind.given(start, stop, shape))
    for index in of_box(((0,) * len(shape), kind.shape(shape))):
        needed = of_box(kind.need(index, tuple(i + 1 for i in index), shape))
        assert (needed <= box) == (index in found), index


def test_grain_and_steps_divide_a_block_between_them() -> None:
    values, scales = quantized_kind(VALUES), quantized_kind(SCALES)
    assert (values.grain((2, 300, 400)), values.steps((2, 300, 400))) == ((1, 128, 128), (1, 1, 1))
    assert (scales.grain((2, 300, 400)), scales.steps((2, 300, 400))) == ((1, 1, 1), (1, 128, 128))
    assert (values.shape((300, 400)), scales.shape((300, 400))) == ((300, 400), (3, 4))
    assert len(DERIVED) == 2 * len(FP8_SCHEMES)
    assert all(quantized_kind(name).name == name for name in DERIVED)


def test_suffixes_are_those_of_engines() -> None:
    assert quantized_kind(VALUES).scheme.suffix == "_scale_inv"
    assert quantized_kind("fp8-channel:scales").scheme.suffix == "_scale"


def part(cast: str, whole: Shape, extent: Shape, offset: Shape | None = None) -> Part:
    return Part("w", whole, offset or (0,) * len(extent), extent, (0,) * len(extent), extent, cast)


def entry(dtype: str, *parts: Part, name: str = "mine") -> TensorEntry:
    shape = parts[0].shape
    return TensorEntry(name, dtype, 1 if "8" in dtype else 4, shape, shape, (0,) * len(shape), parts)


def test_values_and_scales_of_one_tensor_are_a_layout() -> None:
    values = entry("float8_e4m3fn", part(VALUES, (300, 400), (300, 400)))
    scales = entry("float32", part(SCALES, (300, 400), (3, 4)), name="scales")
    layout = layout_of([values, scales])
    plain = layout_of([entry("float8_e4m3fn", part("", (300, 400), (300, 400))), scales])
    assert layout_digest(layout) != layout_digest(plain)
    assert "w as fp8-block-128:values at [0, 0]" in difference(layout, plain)


def test_layouts_without_it_have_the_digest_that_they_had() -> None:
    q = Part("q", (8, 4), (2, 0), (4, 4), (0, 0), (4, 4))
    fused = TensorEntry("qk", "float32", 4, (6, 4), (6, 4), (0, 0), (q, padding((4, 0), (2, 4))))
    assert layout_digest(layout_of([fused])) == "126efe28b5a93093d91b9f4b9a7b0dfef882ef74efcee198f88e82630c5db8f0"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (entry("float32", part(VALUES, (8, 8), (8, 8))), r"\('w'\) is fp8-block-128:values in a tensor of float32"),
        (entry("float8_e4m3fn", part(SCALES, (8, 8), (1, 1))), "register it as float32"),
        (entry("float32", part(SCALES, (300, 8), (3, 1), (1, 0))), r"does not fit .*:scales .*, which are \(3, 1\)"),
        (entry("float8_e4m3fn", part(VALUES, (8, 8), (8, 8), (0, 1))), "of extent .* does not fit"),
        (
            entry("float32", part("fp7:scales", (8, 8), (1, 1))),
            "no cast 'fp7:scales'; possible are fp8-block-128:values, fp8-block-128:scales, ",
        ),
        (entry("float8_e4m3fn", part(VALUES, (8,), (8,))), "blocks need rows and columns"),
        (
            entry("float32", part("fp8-tensor:scales", (4096, 4096), (1, 1))),
            "4096 × 4096 .* a block may have 1048576. Take",
        ),
        (entry("float32", part("fp8-tensor:scales", (1024, 1025), (1, 1))), "1024 × 1025 .* not in this version"),
    ],
)
def test_what_a_part_may_not_say_is_refused_by_name(wrong: TensorEntry, said: str) -> None:
    with pytest.raises(LayoutMismatch, match=f"tensor 'mine': .*{said}"):
        layout_of([wrong])


def test_the_largest_block() -> None:
    layout_of([entry("float32", part("fp8-tensor:scales", (1024, 1024), (1, 1)))])


def test_padding_is_computed_of_nothing() -> None:
    bad = Part("", (), (), (), (0,), (4,), VALUES)
    with pytest.raises(LayoutMismatch, match="is padding of a global tensor"):
        layout_of([TensorEntry("w", "float8_e4m3fn", 1, (4,), (4,), (0,), (bad,))])
