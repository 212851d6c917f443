"""What a reader holds is, byte for byte, what a trainer published: every dtype, shape, stride, name and bit pattern."""

from collections.abc import Callable

import msgspec
import numpy as np
import psutil
import pytest
import torch
import zstandard
from tests.kit.hubs import RunningHub, module_hub
from tests.kit.tensors import Tensors, assert_same_bytes, specs_of
from tests.kit.transports import HAS_UCX

import tensorhub
from tensorhub.specs import DTYPES

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

MIB = 1024 * 1024
HOSTS = 2 if HAS_UCX else 1
"""Agents 0 and 2 are on one host, agent 1 on the other, if there is a way between them."""

TRANSPORTS = ("ucxx" if HOSTS == 2 else "local", "local")
hub = module_hub(3, HOSTS)
undigested = module_hub(3, HOSTS, TENSORHUB_DIGESTS="off")


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    octets = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, np.uint8))
    if dtype is torch.bool:
        octets &= 1
    return octets.view(dtype).reshape(shape)


async def assert_arrives(hub: RunningHub, given: Tensors, *, digests: bool = True) -> None:
    """Publish, and replicate to the other host, then within this one; compare the tensors of all."""
    async with hub.connected(agents=3) as (here, there, beside):
        trainer = await here.register("m", given, replica="trainer")
        readers = [await at.register("m", specs_of(given), replica=name) for name, at in (("r", there), ("l", beside))]
        assert await trainer.publish() == 1
        for reader, transport in zip(readers, TRANSPORTS, strict=True):
            assert await reader.replicate() == 1
            assert reader.last_read is not None
            assert {source.transport for source in reader.last_read.sources} <= {transport}
        # The readers have the trainer's layout, so the log has one root for all; without digests it has none.
        roots = {reader.last_read.root for reader in readers if reader.last_read is not None}
        assert len(roots) == 1
        assert ("" not in roots) is digests
        for shard in (*readers, trainer):
            assert_same_bytes(shard.tensors, given)


def every_dtype() -> Tensors:
    shapes = [(1,), (3,), (5, 7), (1001,)]
    return {
        f"{name}-{number}": random_bits(shape, getattr(torch, name), seed=number)
        for name in DTYPES
        for number, shape in enumerate(shapes)
    }


def all_shapes() -> Tensors:
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


def only_empty_tensors() -> Tensors:
    """A model without a single byte has versions like any other."""
    return {"none": torch.empty(0), "nothing": torch.empty(0, 4)}


def all_strides() -> Tensors:
    """What is not contiguous is published as the values that it shows."""
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


def all_names() -> Tensors:
    names = [
        "model.layers.0.self_attn.q_proj.weight",
        "tab\tand\nline",
        "🤖",
        "e\u0301",
        "\u00e9",
        "nul\0inside",
        "\u202eright to left",
        "x" * 4096,
    ]
    return {name: random_bits((3, 5), torch.int32, number) for number, name in enumerate(names)}


def nans_and_their_payloads() -> Tensors:
    """Every pattern of 16 bits, and special ones of the wider floats: NaNs keep their payload and their sign."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    wide = [0x7FC00001, 0x7F800001, -0x400000, -1, 0x7F800000, -0x80000000, 1]
    return {
        "every bfloat16": every.view(torch.bfloat16),
        "every float16": every.view(torch.float16),
        "float32": torch.tensor(wide, dtype=torch.int64).to(torch.int32).view(torch.float32),
        "float64": torch.tensor([0x7FF0000000000001, -1, -(2**63)], dtype=torch.int64).view(torch.float64),
    }


MODELS = (every_dtype, all_shapes, only_empty_tensors, all_strides, all_names, nans_and_their_payloads)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
async def test_every_byte_arrives(hub: RunningHub, model: Callable[[], Tensors]) -> None:
    await assert_arrives(hub, model())


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
    await assert_arrives(hub, given)


@pytest.mark.long
async def test_all_of_it_with_digests_off(undigested: RunningHub) -> None:
    tiny = {f"tiny {number}": random_bits((1 + number % 7,), torch.int16, number) for number in range(2_000)}
    await assert_arrives(undigested, {**every_dtype(), **all_shapes(), **all_strides(), **tiny}, digests=False)


@pytest.mark.slow
async def test_one_tensor_of_2_gib(hub: RunningHub) -> None:
    """Sizes beyond 31 bits: one tensor of 2 GiB and a bit."""
    size = 2048 * MIB + 12_345
    free = psutil.virtual_memory().available
    if free < 3 * size:
        pytest.skip(f"it takes {3 * size / 2**30:.0f} GiB of memory, and {free / 2**30:.1f} are free")
    spec = {"large": tensorhub.TensorSpec((size,), torch.uint8)}
    async with hub.pair(spec, spec) as it:
        random = np.random.default_rng(1)
        ours = it.trainer.tensors["large"].numpy()
        for at in range(0, size, 64 * MIB):
            part = ours[at : at + 64 * MIB]
            part[:] = np.frombuffer(random.bytes(part.nbytes), dtype=np.uint8)
        await it.trainer.publish()
        await it.engine.replicate()
        assert torch.equal(it.engine.tensors["large"], it.trainer.tensors["large"])
