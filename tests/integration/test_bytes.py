"""What a reader holds is, byte for byte, what a trainer published: every dtype, shape, stride, name and bit pattern.

One reader stands on another agent of the trainer's host, and one on another host, so the same bytes go by shared memory
and over ucxx. Once more with digests off, where pieces count by the source's word.
"""

import importlib.util
from collections.abc import AsyncIterator, Mapping

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
import zstandard
from tests.integration.hubs import RunningHub, assert_same_bytes, running_hub

import tensorhub
from tensorhub.specs import DTYPES

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1024 * 1024
HOSTS = 2 if importlib.util.find_spec("ucxx") else 1
"""Agents 0 and 2 stand on one host, agent 1 on the other, if there is a way between them."""

TRANSPORTS = ("ucxx" if HOSTS == 2 else "local", "local")
Given = Mapping[str, torch.Tensor]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningHub]:
    async with running_hub(tmp_path_factory.mktemp("hub"), agents=3, hosts=HOSTS) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undigested(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningHub]:
    async with running_hub(tmp_path_factory.mktemp("hub"), agents=3, hosts=HOSTS, TENSORHUB_DIGESTS="off") as running:
        yield running


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bits; of bool only the two values that a bool may have."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    octets = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, np.uint8))
    if dtype is torch.bool:
        octets &= 1
    return octets.view(dtype).reshape(shape)


async def brought(hub: RunningHub, given: Given) -> tuple[Given, ...]:
    """Publish, and replicate to the other host, then within this one; return the tensors of all as copies."""
    async with hub.connected(agents=3) as (here, there, beside):
        trainer = await here.register("m", given, replica="trainer")
        readers = [await at.register("m", specs_of(given), replica=name) for name, at in (("r", there), ("l", beside))]
        assert await trainer.publish() == 1
        for reader, transport in zip(readers, TRANSPORTS, strict=True):
            assert await reader.replicate() == 1
            assert reader.last_read is not None
            assert {source.transport for source in reader.last_read.sources} <= {transport}
        return tuple(copies(shard.tensors) for shard in (*readers, trainer))


def specs_of(given: Given) -> dict[str, tensorhub.TensorSpec]:
    return {name: tensorhub.TensorSpec(tuple(each.shape), each.dtype) for name, each in given.items()}


def copies(tensors: Given) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def of_every_dtype() -> Given:
    """Return random bits of all dtypes of torch that have whole bytes."""
    shapes = [(1,), (3,), (5, 7), (1001,)]
    return {
        f"{name}-{number}": random_bits(shape, getattr(torch, name), seed=number)
        for name in DTYPES
        for number, shape in enumerate(shapes)
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
async def test_every_dense_dtype(hub: RunningHub) -> None:
    """All dtypes of torch that have whole bytes arrive with the random bits that they left with."""
    given = of_every_dtype()
    for found in await brought(hub, given):
        assert_same_bytes(found, given)


def of_all_shapes() -> Given:
    """Return tensors with odd shapes and sizes."""
    piece = 4 * MIB
    return {
        "no dimension": torch.tensor(-0.0),
        "no dimension, one byte": torch.tensor(7, dtype=torch.uint8),
        "empty": torch.empty(0),
        "empty inside": torch.empty(3, 0, 5, dtype=torch.float64),
        "ones": torch.ones(1, 1, 1, 1, 1, 1),
        **{f"bytes {size}": random_bits((size,), torch.uint8, size) for size in (1, 63, 64, 65, 4095, 4096, 4097)},
        **{f"piece {more:+}": random_bits((piece + more,), torch.uint8, 9) for more in (-1, 0, 1)},
        "rows over pieces": random_bits((3, 5, 333_333), torch.bfloat16),
        "last": torch.empty(0, dtype=torch.bool),
    }


async def test_shapes_of_all_sorts(hub: RunningHub) -> None:
    """Tensors without dimensions, without elements, with odd sizes, and sizes around those of a page and a piece."""
    given = of_all_shapes()
    for found in await brought(hub, given):
        assert_same_bytes(found, given)


async def test_nothing_but_empty_tensors(hub: RunningHub) -> None:
    """A model without a single byte has versions like any other."""
    given = {"none": torch.empty(0), "nothing": torch.empty(0, 4)}
    for found in await brought(hub, given):
        assert_same_bytes(found, given)


def of_all_strides() -> Given:
    """Return tensors that are not contiguous."""
    base = random_bits((12, 10, 8), torch.float32)
    wave = random_bits((40,), torch.complex64)
    return {
        "transposed": base.transpose(0, 2),
        "every third": base[::3, 1::2],
        "expanded": base[0, 0].expand(5, 8),
        "offset": base.view(-1)[13:],
        "channels last": random_bits((2, 3, 4, 5), torch.float16).to(memory_format=torch.channels_last),
        "conjugated": wave.conj(),
        "negated": wave.conj().imag,
    }


async def test_strides_of_all_sorts(hub: RunningHub) -> None:
    """What is not contiguous is published as the values that it shows."""
    given = of_all_strides()
    for found in await brought(hub, given):
        assert_same_bytes(found, given)


async def test_numpy_arrays(hub: RunningHub) -> None:
    """Arrays that are reversed, read-only or byte-swapped arrive as the values that they show."""
    numbers = np.arange(1000, dtype=np.float64)
    frozen = numbers.copy()
    frozen.flags.writeable = False
    given = {"reversed": numbers[::-1], "read-only": frozen, "swapped": numbers.astype(">f8")}
    async with hub.connected() as (here, there):
        trainer = await here.register("m", given, replica="trainer")
        reader = await there.register("m", {name: torch.zeros(1000).double() for name in given}, replica="reader")
        await trainer.publish()
        await reader.replicate()
        for name, array in given.items():
            assert reader.tensors[name].numpy().tobytes() == array.astype("<f8").tobytes()


async def test_names_of_all_sorts(hub: RunningHub) -> None:
    """A tensor's name is any text that is not empty."""
    names = [
        "model.layers.0.self_attn.q_proj.weight",
        "a/b/../c",
        "..",
        "with space",
        " ",
        "tab\tand\nline",
        "größe",
        "重み",
        "🤖",
        "e\u0301",
        "\u00e9",
        "nul\0inside",
        "*",
        ">",
        "$JS.API",
        "\u202eright to left",
        "x" * 4096,
    ]
    given = {name: random_bits((3, 5), torch.int32, number) for number, name in enumerate(names)}
    for found in await brought(hub, given):
        assert_same_bytes(found, given)


async def test_nans_and_their_payloads(hub: RunningHub) -> None:
    """Every pattern of 16 bits, and special ones of the wider floats: NaNs keep their payload and their sign."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    wide = [0x7FC00001, 0x7F800001, -0x400000, -1, 0x7F800000, -0x80000000, 1]
    given = {
        "every bfloat16": every.view(torch.bfloat16),
        "every float16": every.view(torch.float16),
        "float32": torch.tensor(wide, dtype=torch.int64).to(torch.int32).view(torch.float32),
        "float64": torch.tensor([0x7FF0000000000001, -1, -(2**63)], dtype=torch.int64).view(torch.float64),
    }
    assert given["every bfloat16"].isnan().any()
    for found in await brought(hub, given):
        assert_same_bytes(found, given)


@pytest.mark.long
async def test_layout_larger_than_a_message(hub: RunningHub) -> None:
    """5,000 tiny tensors with long names: their layout goes beside the log, whose messages it would not fit into."""
    random = np.random.default_rng(0)
    given = {
        f"{number}.{random.bytes(400).hex()}": random_bits((1 + number % 7,), torch.int16, number)
        for number in range(5_000)
    }
    async with hub.connected(agents=1) as (here,):
        shard = await here.register("m", given, replica="trainer")
        packed = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(shard.layout))
        assert len(packed) > MIB, "the layout is too small for this test"
    for found in await brought(hub, given):
        assert_same_bytes(found, given)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
async def test_all_of_it_with_digests_off(undigested: RunningHub) -> None:
    """Every dtype, shape and stride, and many tiny tensors, in one model."""
    tiny = {f"tiny {number}": random_bits((1 + number % 7,), torch.int16, number) for number in range(2_000)}
    given = {**of_every_dtype(), **of_all_shapes(), **of_all_strides(), **tiny}
    for found in await brought(undigested, given):
        assert_same_bytes(found, given)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_one_tensor_of_2_gib(hub: RunningHub) -> None:
    """Sizes beyond 31 bits: one tensor of 2 GiB and a bit."""
    size = 2048 * MIB + 12_345
    needed = 3 * size
    free = psutil.virtual_memory().available
    if free < needed:
        pytest.skip(f"it takes {needed / 2**30:.0f} GiB of memory, and {free / 2**30:.1f} are free")
    spec = {"large": tensorhub.TensorSpec((size,), torch.uint8)}
    async with hub.connected() as (here, there):
        trainer = await here.register("m", spec, replica="trainer")
        reader = await there.register("m", spec, replica="reader")
        random = np.random.default_rng(1)
        ours = trainer.tensors["large"].numpy()
        for at in range(0, size, 64 * MIB):
            part = ours[at : at + 64 * MIB]
            part[:] = np.frombuffer(random.bytes(part.nbytes), dtype=np.uint8)
        await trainer.publish()
        await reader.replicate()
        assert torch.equal(reader.tensors["large"], trainer.tensors["large"])
