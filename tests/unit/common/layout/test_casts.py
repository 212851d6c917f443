"""The geometry of casts: which box of the source a box of values or of scales is made of."""

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.casts import (
    CASTABLE,
    FP8_SCHEMES,
    Fp8Scheme,
    ScaleOrder,
    cast_name,
    check_value_cast,
    dtypes_of,
    fp8_scheme,
    tiles,
)
from tensorhub_common.layout.layout import TensorEntry, difference, layout_digest, layout_of
from tensorhub_common.layout.parts import Part, Shape, padding
from tensorhub_common.layout.quantized import DERIVED, QuantizedKind, quantized_kind

BLOCKED = fp8_scheme("fp8-block-128")
SMALL = [
    Fp8Scheme("small", block, ScaleOrder.MULTIPLY) for block in [(3, 4), (1, None), (None, None), (None, 2), (5, 1)]
]


def test_a_deepseek_weight() -> None:
    channel, tensor = fp8_scheme("fp8-channel"), fp8_scheme("fp8-tensor")
    assert BLOCKED.scales_shape((256, 2048, 7168)) == (256, 16, 56)
    assert (BLOCKED.scales_shape((576, 7168)), channel.scales_shape((576, 7168))) == ((5, 56), (576, 1))
    assert tensor.scales_shape((8, 576, 7168)) == (8, 1, 1)
    assert BLOCKED.values_need((575, 7167), (576, 7168), (576, 7168)) == ((512, 7040), (576, 7168))
    assert BLOCKED.scales_of((130, 0), (140, 129), (576, 7168)) == ((1, 0), (2, 2))
    assert BLOCKED.scales_of((1, 130, 0), (1, 140, 129), (2, 576, 7168)) == ((1, 1, 0), (1, 1, 0)), "an empty box"
    assert BLOCKED.scales_need((4, 55), (5, 56), (576, 7168)) == ((512, 7040), (576, 7168))
    assert [tiles(size, 4) for size in (0, 8, 9)] == [[], [(0, 4), (4, 8)], [(0, 4), (4, 8), (8, 9)]]


def of_box(start: Shape, stop: Shape) -> set[Shape]:
    return set(product(*(range(a, b) for a, b in zip(start, stop, strict=True))))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Shape, Shape, Shape]:
    """Draw a tensor's shape, and a box of it."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
    start = tuple(draw(st.integers(0, size)) for size in shape)
    return shape, start, tuple(draw(st.integers(a, size)) for a, size in zip(start, shape, strict=True))


def block_of(index: Shape, scheme: Fp8Scheme) -> Shape:
    return (*index[:-2], *(0 if step is None else i // step for i, step in zip(index[-2:], scheme.block, strict=True)))


@given(st.sampled_from(SMALL), boxes())
def test_needed_is_every_element_of_every_block_and_no_other(
    scheme: Fp8Scheme, box: tuple[Shape, Shape, Shape]
) -> None:
    shape, start, stop = box
    touched = {block_of(index, scheme) for index in of_box(start, stop)}
    needed = {index for index in of_box((0,) * len(shape), shape) if block_of(index, scheme) in touched}
    assert of_box(*scheme.values_need(start, stop, shape)) == needed
    assert of_box(*scheme.scales_of(start, stop, shape)) == touched
    assert touched <= of_box((0,) * len(shape), scheme.scales_shape(shape))


@pytest.mark.parametrize("scheme", FP8_SCHEMES.values(), ids=list(FP8_SCHEMES))
def test_an_empty_tensor_has_no_blocks(scheme: Fp8Scheme) -> None:
    for shape in [(0, 128), (128, 0), (0, 0)]:
        assert of_box((0, 0), scheme.scales_shape(shape)) == set()
        assert of_box(*scheme.values_need((0, 0), shape, shape)) == set()


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: fp8_scheme("fp8-block-64"), "there is no fp8 scheme 'fp8-block-64'; possible are fp8-block-128, "),
        (lambda: BLOCKED.check_source((4, 4), "int8"), "int8 can't become fp8-block-128: it is made of float32, bfl"),
        (lambda: BLOCKED.check_source((4,), "float32"), r"shape \(4,\) can't .*: blocks need rows and columns"),
        (lambda: dtypes_of("float32"), "'float32' is no name of a cast"),
    ],
)
def test_a_scheme_is_refused_with_what_to_do(ask: Callable[[], object], said: str) -> None:
    BLOCKED.check_source((4, 4), "bfloat16")
    with pytest.raises(LayoutMismatch, match=said):
        ask()


OTHERS = ["bool", "uint8", "int32", "int64", "complex64", "float8_e8m0fnu", "float4_e2m1fn_x2"]


@pytest.mark.parametrize("dtype", OTHERS)
def test_floats_become_one_another_and_anything_else_stays_what_it_is(dtype: str) -> None:
    for one, other in product(CASTABLE, CASTABLE):
        check_value_cast(one, other)
    check_value_cast(dtype, dtype)
    for one, other in [(dtype, "float32"), ("float32", dtype), (dtype, "uint16")]:
        told = f"{one} can't become {other} on the way: casts are possible between float64, float32, .*; register it"
        with pytest.raises(LayoutMismatch, match=told):
            check_value_cast(one, other)


def test_a_cast_is_named_after_what_becomes_what() -> None:
    assert cast_name("float32", "float32") == ""
    assert cast_name("float32", "bfloat16") == "float32>bfloat16"
    assert dtypes_of("float32>bfloat16") == ("float32", "bfloat16")
    assert dtypes_of("float32>fp8>x") == ("float32", "fp8>x")


VALUES, SCALES = "fp8-block-128:values", "fp8-block-128:scales"


@given(kind=st.builds(QuantizedKind, st.just("x"), st.sampled_from(SMALL), st.booleans()), box=boxes())
def test_given_is_what_needs_nothing_outside(kind: QuantizedKind, box: tuple[Shape, Shape, Shape]) -> None:
    shape, start, stop = box
    found, inside = of_box(*kind.given(start, stop, shape)), of_box(start, stop)
    for index in of_box((0,) * len(shape), kind.shape(shape)):
        needed = of_box(*kind.need(index, tuple(i + 1 for i in index), shape))
        assert (needed <= inside) == (index in found), index


def test_grain_and_steps_divide_a_block_between_them() -> None:
    values, scales = quantized_kind(VALUES), quantized_kind(SCALES)
    assert (values.grain((2, 300, 400)), values.steps((2, 300, 400))) == ((1, 128, 128), (1, 1, 1))
    assert (scales.grain((2, 300, 400)), scales.steps((2, 300, 400))) == ((1, 1, 1), (1, 128, 128))
    assert (values.shape((300, 400)), scales.shape((300, 400))) == ((300, 400), (3, 4))
    assert (values.scheme.suffix, quantized_kind("fp8-channel:scales").scheme.suffix) == ("_scale_inv", "_scale")
    assert len(DERIVED) == 2 * len(FP8_SCHEMES)
    assert all(quantized_kind(name).name == name for name in DERIVED)


def part(cast: str, whole: Shape, extent: Shape, offset: Shape | None = None) -> Part:
    return Part("w", whole, offset or (0,) * len(extent), extent, (0,) * len(extent), extent, cast)


def entry(dtype: str, *parts: Part, name: str = "mine") -> TensorEntry:
    shape = parts[0].shape
    return TensorEntry(name, dtype, 1 if "8" in dtype else 4, shape, shape, (0,) * len(shape), parts)


def test_values_and_scales_of_one_tensor_are_a_layout() -> None:
    values = entry("float8_e4m3fn", part(VALUES, (300, 400), (300, 400)))
    scales = entry("float32", part(SCALES, (300, 400), (3, 4)), name="scales")
    layout = layout_of([values, scales])
    layout_of([entry("float32", part("fp8-tensor:scales", (1024, 1024), (1, 1)))])  # The largest block.
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
            "no cast 'fp7:scales'; possible are fp8-block-128:values, f",
        ),
        (entry("float8_e4m3fn", part(VALUES, (8,), (8,))), "blocks need rows and columns"),
        (entry("float32", part("fp8-tensor:scales", (4096, 4096), (1, 1))), "4096 × 4096 .* may have 1048576. Take"),
        (entry("float32", part("fp8-tensor:scales", (1024, 1025), (1, 1))), "1024 × 1025 .* not in this version"),
        (entry("float8_e4m3fn", Part("", (), (), (), (0,), (4,), VALUES)), "is padding of a global tensor"),
    ],
)
def test_what_a_part_may_not_say_is_refused_by_name(wrong: TensorEntry, said: str) -> None:
    with pytest.raises(LayoutMismatch, match=f"tensor 'mine': .*{said}"):
        layout_of([wrong])
