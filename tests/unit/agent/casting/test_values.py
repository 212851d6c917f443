"""The value casts: bit for bit torch's, for every pair, every code of two bytes and millions of others."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples_of import examples
from tests.unit.agent.casting.torch_bits import is_nan, torch_cast

from tensorhub_agent.casting import kernels, values
from tensorhub_agent.casting.floats import Bits, bits_of
from tensorhub_agent.casting.kernels import BLOCK_ELEMENTS_MAX
from tensorhub_agent.casting.values import blocks, cast, view_bits
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.casts import CASTABLE

PAIRS = list(itertools.permutations(CASTABLE, 2))
WIDE_ELEMENTS = 1_000_000


def cast_new(source: Bits, from_dtype: str, to_dtype: str) -> Bits:
    out = np.full(source.shape, 0xA5, bits_of(to_dtype))
    cast(source, from_dtype, out, to_dtype)
    return out


def assert_as_torch(source: Bits, from_dtype: str, to_dtype: str) -> None:
    """Compare every bit of every number, and where the NaN stand; which ones they are is a test of its own."""
    ours, theirs = cast_new(source, from_dtype, to_dtype), torch_cast(source, from_dtype, to_dtype)
    nan = is_nan(source, from_dtype)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    assert is_nan(ours[nan], to_dtype).all()
    assert is_nan(theirs[nan], to_dtype).all()


@cache
def interesting(dtype: str) -> Bits:
    """Return all codes of a dtype of at most two bytes; of wider ones random bits, ties and what is next to them."""
    unsigned = bits_of(dtype)
    if CASTABLE[dtype] <= 2:
        return np.arange(1 << 8 * CASTABLE[dtype]).astype(unsigned)
    rng = np.random.default_rng(5)
    random = rng.integers(0, 1 << 8 * CASTABLE[dtype], WIDE_ELEMENTS, dtype=np.uint64).astype(unsigned)
    if dtype == "float64":
        # Random exponents of float64 are nearly all beyond float32.
        near = rng.standard_normal(WIDE_ELEMENTS) * np.exp2(rng.integers(-160, 135, WIDE_ELEMENTS))
        return np.concatenate([random, near.view(np.uint64), on_float32_ties(rng)])
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    # What is cut off from bfloat16, from float16 and from fp8: nothing, just below a tie, the tie, just above it, all.
    lower = (0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    return np.concatenate([random, *(upper | np.uint32(bits) for bits in lower)])


def on_float32_ties(rng: np.random.Generator) -> Bits:
    """Return float64 on, just below and just above the middle of two float32."""
    exponents = rng.integers(1023 - 150, 1023 + 129, WIDE_ELEMENTS, dtype=np.uint64) << np.uint64(52)
    kept = rng.integers(0, 1 << 23, WIDE_ELEMENTS, dtype=np.uint64) << np.uint64(29)
    offset = rng.integers(0, 3, WIDE_ELEMENTS, dtype=np.uint64) - np.uint64(1)
    return np.asarray((exponents | kept | np.uint64(1 << 28)) + offset)


@pytest.mark.parametrize(("from_dtype", "to_dtype"), PAIRS)
def test_every_pair_is_bit_for_bit_as_torch_in_any_shape(from_dtype: str, to_dtype: str) -> None:
    assert_as_torch(interesting(from_dtype), from_dtype, to_dtype)
    for shape in [(), (0,), (3, 0, 5), (1,), (7,), (1, 1, 1), (33, 65)]:
        assert_as_torch(np.resize(interesting(from_dtype), shape), from_dtype, to_dtype)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.sampled_from([to for to in CASTABLE if to != "float32"]))
def test_any_float32_is_bit_for_bit_as_torch(elements: list[int], to_dtype: str) -> None:
    assert_as_torch(np.array(elements, np.uint32), "float32", to_dtype)


@pytest.mark.parametrize("dtype", [*CASTABLE, "complex64"])
def test_equal_dtypes_are_copied_with_every_bit(dtype: str) -> None:
    source = interesting(dtype) if dtype in CASTABLE else np.arange(20, dtype=np.uint64)
    out = np.zeros_like(source)
    cast(source, dtype, out, dtype)
    np.testing.assert_array_equal(out, source)


@pytest.mark.parametrize(
    ("from_dtype", "nan", "to_dtype", "becomes"),
    [
        ("float64", 0xFFF0_0000_0000_0001, "float32", 0xFFC0_0000),  # Quiet, with its sign and the payload's top bits.
        ("float64", 0x7FF4_AAAA_AAAA_AAAA, "float32", 0x7FE5_5555),
        ("float64", 0xFFF8_0000_0000_0000, "bfloat16", 0x7FC0),  # bfloat16 has one NaN.
        ("float64", 0x7FF4_AAAA_AAAA_AAAA, "float16", 0x7F2A),
        ("float64", 0xFFF8_0000_0000_0000, "float8_e4m3fn", 0xFF),
        ("float32", 0x7F80_0001, "bfloat16", 0x7FC0),
        ("float32", 0x7FFF_FFFF, "bfloat16", 0x7FC0),
        ("float32", 0xFFFF_FFFF, "bfloat16", 0x7FC0),
        ("float32", 0xFF80_0001, "float16", 0xFE00),
        ("float32", 0x7FA1_2345, "float16", 0x7F09),
        ("float32", 0x7FA1_2345, "float64", 0x7FFC_2468_A000_0000),
        ("float32", 0xFF80_0001, "float8_e5m2", 0xFF),
        ("float32", 0xFFFF_FFFF, "float8_e4m3fnuz", 0x80),
        ("float16", 0xFC01, "float32", 0xFFC0_2000),
        ("float16", 0x7D23, "bfloat16", 0x7FC0),
        ("bfloat16", 0xFF81, "float32", 0xFF81_0000),  # Bits in front of zeros, so that a way back is exact.
        ("bfloat16", 0xFF81, "float16", 0xFE08),
        ("float8_e4m3fn", 0xFF, "float32", 0xFFF0_0000),
        ("float8_e5m2", 0x7D, "float32", 0x7FE0_0000),
        ("float8_e5m2", 0xFE, "float8_e4m3fn", 0xFF),
        ("float8_e4m3fnuz", 0x80, "float32", 0x7F80_0001),
        ("float8_e5m2fnuz", 0x80, "float16", 0x7E00),
    ],
)
def test_which_nan_it_becomes(from_dtype: str, nan: int, to_dtype: str, becomes: int) -> None:
    """The same one wherever it stands and whatever stands beside it."""
    source = np.array([nan, 0, nan, *([0] * 61), nan], bits_of(from_dtype))
    expected = np.where(source == nan, np.array(becomes, bits_of(to_dtype)), 0)
    np.testing.assert_array_equal(cast_new(source, from_dtype, to_dtype), expected)


@pytest.mark.parametrize(("from_dtype", "to_dtype"), PAIRS)
def test_strided_and_unaligned_views_and_nothing_beside_them(from_dtype: str, to_dtype: str) -> None:
    size, codes = CASTABLE[from_dtype], interesting(from_dtype)[:240]
    memory = memoryview(bytearray(b"?" + codes.tobytes()))
    source = view_bits(memory, from_dtype, (4, 2, 5), 1 + 3 * size, (60 * size, 30 * size, 2 * size))
    i, j, k = np.indices((4, 2, 5))
    expected = cast_new(codes[3 + 60 * i + 30 * j + 2 * k], from_dtype, to_dtype)
    room = bytearray(b"\xee" * 4096)
    step = CASTABLE[to_dtype]
    out = view_bits(memoryview(room), to_dtype, (4, 2, 5), 5, (64 * step, 32 * step, 3 * step))
    cast(source, from_dtype, out, to_dtype)
    np.testing.assert_array_equal(out, expected)
    out[...] = np.frombuffer(b"\xee" * step, bits_of(to_dtype))[0]
    assert room == b"\xee" * 4096


@pytest.mark.parametrize("to_dtype", ["bfloat16", "float16", "float8_e4m3fn", "float64"])
def test_more_than_a_block_in_odd_lengths_and_rows(to_dtype: str) -> None:
    source = np.resize(interesting("float32"), 3 * BLOCK_ELEMENTS_MAX + 17)
    assert_as_torch(source, "float32", to_dtype)
    wide = np.resize(source, (3, BLOCK_ELEMENTS_MAX + 11))
    assert_as_torch(wide[:, 1:], "float32", to_dtype)
    assert_as_torch(wide.T[:777], "float32", to_dtype)


def test_threads_cast_at_once() -> None:
    """Each has scratch of its own."""
    sources = [np.random.default_rng(seed).integers(0, 2**32, 300_000, np.uint32) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        outs = list(threads.map(lambda source: cast_new(source, "float32", "float8_e4m3fn"), sources))
    for source, out in zip(sources, outs, strict=True):
        nan = is_nan(source, "float32")
        np.testing.assert_array_equal(out[~nan], torch_cast(source, "float32", "float8_e4m3fn")[~nan])
    cast_new(sources[0], "float32", "float8_e4m3fn")
    assert sum(array.nbytes for array in vars(kernels.SCRATCH).values()) == 20 * BLOCK_ELEMENTS_MAX


def test_no_element_depends_on_what_stands_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source = interesting("float32")[:5000]
    together = {to: cast_new(source, "float32", to) for to in CASTABLE}
    monkeypatch.setattr(values, "BLOCK_ELEMENTS_MAX", 7)
    for to, expected in together.items():
        np.testing.assert_array_equal(cast_new(source, "float32", to), expected)


@pytest.mark.parametrize(
    ("from_dtype", "to_dtype"),
    [("int64", "float32"), ("float32", "int8"), ("bool", "uint8"), ("complex64", "float32"), ("float32", "nonsense")],
)
def test_what_would_lose_its_meaning_is_refused(from_dtype: str, to_dtype: str) -> None:
    source, out = np.ones(3, np.uint64), np.full(3, 7, np.uint64)
    with pytest.raises(LayoutMismatch, match=f"{from_dtype} can't become {to_dtype} on the way: casts are possible"):
        cast(source, from_dtype, out, to_dtype)
    assert (out == 7).all()
    four = np.zeros(4, np.uint32)
    with pytest.raises(ValueError, match=r"a source of shape \(4,\) does not fill \(3,\)"):
        cast(four, "float32", np.zeros(3, np.uint16), "bfloat16")
    with pytest.raises(ValueError, match="elements of bfloat16 are taken as uint16, not as uint32"):
        cast(four, "float32", np.zeros(4, np.uint32), "bfloat16")


@given(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.integers(1, 50))
def test_blocks_are_every_element_once(shape: tuple[int, ...], elements_max: int) -> None:
    seen = np.zeros(shape, np.int64)
    for block in blocks(shape, elements_max):
        assert seen[block].size <= elements_max
        seen[block] += 1
    assert (seen == 1).all()


@settings(max_examples=examples(0.6))
@given(st.data())
def test_a_box_of_a_larger_array(data: st.DataObject) -> None:
    """Slices with steps, either way round, out of and into larger arrays."""
    from_dtype, to_dtype = data.draw(st.sampled_from(PAIRS))
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    cut = tuple(data.draw(st.slices(size)) for size in shape)
    source = np.resize(interesting(from_dtype)[data.draw(st.integers(0, 200)) :], shape)[cut]
    room = np.full(tuple(size + 2 for size in source.shape), 0xA5, bits_of(to_dtype))
    inner = (slice(1, -1),) * source.ndim
    cast(source, from_dtype, room[inner], to_dtype)
    np.testing.assert_array_equal(room[inner], cast_new(source.copy(), from_dtype, to_dtype))
    room[inner] = 0xA5
    assert (room == 0xA5).all()
