"""The geometry of casts: which box of the source a box of values or of scales is made of."""

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
from tensorhub_common.layout.parts import Shape

BLOCKED = fp8_scheme("fp8-block-128")
SMALL = [
    Fp8Scheme("small", block, ScaleOrder.MULTIPLY) for block in [(3, 4), (1, None), (None, None), (None, 2), (5, 1)]
]


def test_a_deepseek_weight() -> None:
    assert BLOCKED.scales_shape((7168, 18432)) == (56, 144)
    assert BLOCKED.scales_shape((256, 2048, 7168)) == (256, 16, 56)
    assert BLOCKED.scales_shape((576, 7168)) == (5, 56)


def test_a_box_needs_the_blocks_that_it_touches() -> None:
    assert BLOCKED.values_need((130, 0), (140, 129), (576, 7168)) == ((128, 0), (256, 256))
    assert BLOCKED.values_need((575, 7167), (576, 7168), (576, 7168)) == ((512, 7040), (576, 7168))
    assert BLOCKED.values_need((7, 0, 0), (8, 1, 1), (256, 64, 7168)) == ((7, 0, 0), (8, 64, 128))
    assert BLOCKED.scales_of((130, 0), (140, 129), (576, 7168)) == ((1, 0), (2, 2))
    assert BLOCKED.scales_need((4, 55), (5, 56), (576, 7168)) == ((512, 7040), (576, 7168))


def test_a_row_and_a_tensor_are_blocks_too() -> None:
    channel, tensor = fp8_scheme("fp8-channel"), fp8_scheme("fp8-tensor")
    assert channel.scales_shape((576, 7168)) == (576, 1)
    assert channel.values_need((3, 100), (5, 200), (576, 7168)) == ((3, 0), (5, 7168))
    assert tensor.scales_shape((8, 576, 7168)) == (8, 1, 1)
    assert tensor.values_need((2, 3, 100), (3, 5, 200), (8, 576, 7168)) == ((2, 0, 0), (3, 576, 7168))


def of_box(start: Shape, stop: Shape) -> set[Shape]:
    return set(product(*(range(a, b) for a, b in zip(start, stop, strict=True))))


def block_of(index: Shape, scheme: Fp8Scheme) -> Shape:
    return (*index[:-2], *(0 if step is None else i // step for i, step in zip(index[-2:], scheme.block, strict=True)))


@given(st.data())
def test_needed_is_every_element_of_every_block_and_no_other(data: st.DataObject) -> None:
    scheme = data.draw(st.sampled_from(SMALL))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
    start = tuple(data.draw(st.integers(0, size)) for size in shape)
    stop = tuple(data.draw(st.integers(a, size)) for a, size in zip(start, shape, strict=True))
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


def test_a_scheme_is_refused_with_what_to_do() -> None:
    with pytest.raises(LayoutMismatch, match="there is no fp8 scheme 'fp8-block-64'; possible are fp8-block-128, "):
        fp8_scheme("fp8-block-64")
    with pytest.raises(
        LayoutMismatch, match="int8 can't become fp8-block-128: it is made of float32, bfloat16, float16"
    ):
        BLOCKED.check_source((4, 4), "int8")
    with pytest.raises(LayoutMismatch, match=r"shape \(4,\) can't become fp8-block-128: blocks need rows and columns"):
        BLOCKED.check_source((4,), "float32")
    BLOCKED.check_source((4, 4), "bfloat16")


@pytest.mark.parametrize(("one", "other"), list(product(CASTABLE, CASTABLE)))
def test_floats_become_one_another(one: str, other: str) -> None:
    check_value_cast(one, other)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int32", "int64", "complex64", "float8_e8m0fnu", "float4_e2m1fn_x2"]
)
def test_anything_else_stays_what_it_is(dtype: str) -> None:
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
    with pytest.raises(LayoutMismatch, match="'float32' is no name of a cast"):
        dtypes_of("float32")


def test_tiles_are_every_index_once() -> None:
    assert tiles(0, 4) == []
    assert tiles(8, 4) == [(0, 4), (4, 8)]
    assert tiles(9, 4) == [(0, 4), (4, 8), (8, 9)]
