"""fp8 with scales: bit for bit what torch computes from each engine's formula, for any box of whole blocks."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples_of import examples
from tests.unit.agent.casting.torch_bits import bits_in, is_nan, tensor_of
from tests.unit.agent.casting.torch_fp8 import referred, weight

from tensorhub_agent.casting import fp8
from tensorhub_agent.casting.floats import Bits, bits_of
from tensorhub_agent.casting.fp8 import Floats, fill_scales, fill_values, fold_amax, quantise
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.casts import FP8_SCHEMES, FP8_SOURCES, Fp8Scheme

SHAPES = [(1, 1), (128, 128), (127, 129), (300, 517), (1, 1000), (1000, 1), (2, 3, 200, 140), (3, 1, 130), (40, 70_000)]


def quantised(source: Bits, dtype: str, scheme: Fp8Scheme) -> tuple[Bits, Floats]:
    values, scales = np.full(source.shape, 0xA5, np.uint8), np.full(scheme.scales_shape(source.shape), -1, np.float32)
    quantise(source, dtype, scheme, values, scales)
    return values, scales


def assert_as_referred(source: Bits, dtype: str, scheme: Fp8Scheme) -> None:
    (values, scales), (their_values, their_scales) = quantised(source, dtype, scheme), referred(source, dtype, scheme)
    np.testing.assert_array_equal(scales.view(np.uint32), their_scales.view(np.uint32))
    np.testing.assert_array_equal(values, their_values)


SCHEMES = pytest.mark.parametrize("scheme", FP8_SCHEMES.values(), ids=list(FP8_SCHEMES))


@SCHEMES
@pytest.mark.parametrize("dtype", FP8_SOURCES)
def test_every_scheme_is_bit_for_bit_its_formula(scheme: Fp8Scheme, dtype: str) -> None:
    for seed, shape in enumerate(SHAPES):
        assert_as_referred(weight(shape, dtype, seed), dtype, scheme)
    for shape in [(0, 0), (0, 130), (130, 0), (0, 128, 128)]:
        values, scales = quantised(np.zeros(shape, bits_of(dtype)), dtype, scheme)
        assert (values.shape, scales.shape) == (shape, scheme.scales_shape(shape))
    zeros = np.zeros((130, 130), bits_of(dtype))
    assert_as_referred(zeros, dtype, scheme)
    values, scales = quantised(zeros, dtype, scheme)
    back = tensor_of(values, "float8_e4m3fn").float() * torch.from_numpy(scales).max()
    assert (back == 0).all(), "a scale gives zeros back"


@SCHEMES
@settings(max_examples=examples(0.3))
@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(FP8_SOURCES),
    size=st.sampled_from([0.0, 1e-30, 1e-12, 1e-5, 0.02, 448.0, 3e4]),
)
def test_any_matrix(scheme: Fp8Scheme, shape: tuple[int, int], seed: int, dtype: str, size: float) -> None:
    floats = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape) * size)
    assert_as_referred(bits_in(floats.clamp(-6e4, 6e4).to(getattr(torch, dtype)), dtype), dtype, scheme)


@SCHEMES
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_infinite_weight_spoils_its_own_block_alone(scheme: Fp8Scheme, bad: float) -> None:
    clean = weight((300, 300), "float32").view(np.float32)
    spoilt = clean.copy()
    spoilt[150, 10] = bad
    values, scales = quantised(clean.view(np.uint32), "float32", scheme)
    bad_values, bad_scales = quantised(spoilt.view(np.uint32), "float32", scheme)
    start, stop = scheme.values_need((150, 10), (151, 11), clean.shape)
    there = (slice(start[0], stop[0]), slice(start[1], stop[1]))
    values[there] = bad_values[there]
    np.testing.assert_array_equal(values, bad_values)
    assert (scales.view(np.uint32) != bad_scales.view(np.uint32)).sum() <= 1
    if not scheme.saturate:
        their_values, their_scales = referred(spoilt.view(np.uint32), "float32", scheme)
        np.testing.assert_array_equal(bad_scales, their_scales)
        nan = is_nan(their_values, "float8_e4m3fn")
        np.testing.assert_array_equal(is_nan(bad_values, "float8_e4m3fn"), nan)
        np.testing.assert_array_equal(bad_values[~nan], their_values[~nan])


@SCHEMES
@settings(max_examples=examples(0.5))
@given(data=st.data())
def test_a_box_comes_out_of_the_box_it_needs(scheme: Fp8Scheme, data: st.DataObject) -> None:
    """Any box of values is that of the whole tensor, made of no more of the source than the geometry says."""
    shape = tuple(data.draw(st.tuples(st.integers(1, 2), st.integers(1, 400), st.integers(1, 400))))
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    stop = tuple(data.draw(st.integers(a + 1, size)) for a, size in zip(start, shape, strict=True))
    source = weight(shape, "bfloat16", data.draw(st.integers(0, 99)))
    values, scales = quantised(source, "bfloat16", scheme)
    box = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
    first, last = scheme.values_need(start, stop, shape)
    needed = source[tuple(slice(a, b) for a, b in zip(first, last, strict=True))]
    some, their = quantised(needed, "bfloat16", scheme)
    inner = tuple(slice(a - c, b - c) for a, b, c in zip(start, stop, first, strict=True))
    np.testing.assert_array_equal(some[inner], values[box])
    s_first, s_last = scheme.scales_of(start, stop, shape)
    np.testing.assert_array_equal(their, scales[tuple(slice(a, b) for a, b in zip(s_first, s_last, strict=True))])


@SCHEMES
def test_parts_of_a_block_fold_into_one_amax(scheme: Fp8Scheme) -> None:
    """The largest magnitude of a row, a tensor or a block may come from several sources, in any order."""
    source = weight((120, 100), "float32")
    whole_values, whole_scales = quantised(source, "float32", scheme)
    amax = np.zeros(scheme.scales_shape(source.shape), np.float32)
    values, scales = np.zeros(source.shape, np.uint8), np.zeros_like(amax)
    parts = [(slice(a, a + 40), slice(b, b + 50)) for a, b in product((80, 0, 40), (50, 0))]
    rows = [part[0] if amax.shape[0] > 1 else slice(None) for part in parts]
    for part, row in zip(parts, rows, strict=True):
        fold_amax(source[part], "float32", scheme, amax[row])
    fill_scales(amax, scheme, scales)
    for part, row in zip(parts, rows, strict=True):
        fill_values(source[part], "float32", amax[row], scheme, values[part])
    np.testing.assert_array_equal(scales, whole_scales)
    np.testing.assert_array_equal(values, whole_values)


@SCHEMES
def test_views_of_larger_arrays(scheme: Fp8Scheme) -> None:
    source = weight((260, 300), "bfloat16")
    values, scales = quantised(source, "bfloat16", scheme)
    wide, room = np.zeros((260, 2, 301), np.uint16), np.full((262, 305), 0xA5, np.uint8)
    wide[:, 1, 1:] = source
    scale_room = np.full((scales.shape[0], 2 * scales.shape[1]), -1, np.float32)
    quantise(wide[:, 1, 1:], "bfloat16", scheme, room[1:-1, 2:-3], scale_room[:, ::2])
    np.testing.assert_array_equal(room[1:-1, 2:-3], values)
    np.testing.assert_array_equal(scale_room[:, ::2], scales)
    room[1:-1, 2:-3] = 0xA5
    assert (room == 0xA5).all()
    assert (scale_room[:, 1::2] == -1).all()


@SCHEMES
def test_the_size_of_a_tile_changes_nothing(scheme: Fp8Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    source = weight((2, 12, 150), "float16")
    expected = quantised(source, "float16", scheme)
    for elements in (1, 12 * 128 - 1, 12 * 128, 12 * 128 * 2):
        monkeypatch.setattr(fp8, "BLOCK_ELEMENTS_MAX", elements)
        for ours, theirs in zip(quantised(source, "float16", scheme), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_what_it_is_not_made_of_is_refused() -> None:
    scheme, out, scales = FP8_SCHEMES["fp8-block-128"], np.zeros((4, 4), np.uint8), np.zeros((1, 1), np.float32)
    with pytest.raises(LayoutMismatch, match="float64 can't become fp8-block-128: it is made of float32, bfloat16"):
        quantise(np.zeros((4, 4), np.uint64), "float64", scheme, out, scales)
    with pytest.raises(LayoutMismatch, match=r"shape \(4,\) can't become fp8-block-128: blocks need rows and columns"):
        scheme.check_source((4,), "float32")
    with pytest.raises(ValueError, match="elements of bfloat16 are taken as uint16, not as uint32"):
        quantise(np.zeros((4, 4), np.uint32), "bfloat16", scheme, out, scales)
    with pytest.raises(ValueError, match=r"values of shape \(4, 4\) and uint8 do not take uint8 of \(4, 5\)"):
        fill_values(np.zeros((4, 5), bits_of("float32")), "float32", scales, scheme, out)
    with pytest.raises(ValueError, match=r"amax of shape \(1, 1\) and float32 is not float32 of \(2, 1\)"):
        fold_amax(np.zeros((129, 5), bits_of("float32")), "float32", scheme, scales)


@SCHEMES
def test_a_nans_scale_is_the_same_however_the_box_is_cut(scheme: Fp8Scheme) -> None:
    """A wide box is folded a few rows at a time, a narrow one at once; two readers may have either."""
    source = np.full((128, 4096), 0x3F80, np.uint16)
    source[5, 3], source[100, 9] = 0x7FC1, 0xFFFF
    whole, narrow = quantised(source, "bfloat16", scheme)[1], quantised(source[:, :128], "bfloat16", scheme)[1]
    assert set(whole[np.isnan(whole)].view(np.uint32).tolist()) <= {0x7FC00000}
    np.testing.assert_array_equal(whole.view(np.uint32)[:, 0], narrow.view(np.uint32)[:, 0])
