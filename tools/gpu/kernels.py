"""Each kernel once, over pieces and boxes of many sizes: what compute-sanitizer watches. It compares every byte."""

import sys

import numpy as np
import xxhash

from tensorhub_agent.casting.conversion import converter_of
from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_agent.devices.changes import changes_between
from tensorhub_agent.devices.cuda_engine import CudaEngine
from tensorhub_agent.encodings.patch import written
from tensorhub_common.devices.cuda import CudaDevice, cuda_device
from tensorhub_common.programs.regions import Blocks, StridedForm

LENGTHS = (1, 240, 241, 1023, 1024, 1025, 8191, 8192, 8193, 65_536, 100_001, 1 << 20)


def main() -> None:
    """Run them; exit with 1 where a byte or a digest is not the host's."""
    device = cuda_device(0)
    engine = CudaEngine(device)
    wrong = [*_pieces(device, engine, 0), *_pieces(device, engine, 3), *_boxes(device, engine), *_casts(device, engine)]
    wrong += [*_deltas(device, engine, 0), *_deltas(device, engine, 1)]
    if wrong:
        sys.exit("not as the host has it: " + ", ".join(wrong))
    print("every digest and byte is the host's")


def _pieces(device: CudaDevice, engine: CudaEngine, shift: int) -> list[str]:
    data = np.random.default_rng(shift).bytes(sum(LENGTHS))
    source, destination = device.allocate(len(data) + shift), device.allocate(len(data) + shift)
    _copy(device, source.address + shift, _address(data), len(data))
    begins = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    to = np.asarray(begins, np.int64) + destination.address + shift
    origin, sizes = to - destination.address + source.address, np.asarray(LENGTHS, np.int64)
    found = engine.copy_and_digest(to, origin, sizes)
    again = engine.digest(to, sizes)
    wrong = []
    for number, (begin, size) in enumerate(zip(begins, LENGTHS, strict=True)):
        expected = xxhash.xxh3_128_digest(data[begin : begin + size])
        if not found[16 * number : 16 * number + 16] == again[16 * number : 16 * number + 16] == expected:
            wrong.append(f"the digest of {size} bytes, shifted by {shift}")
    landing = bytearray(len(data))
    _copy(device, _address(landing), destination.address + shift, len(data))
    if landing != data:
        wrong.append(f"the copy, shifted by {shift}")
    return wrong


def _boxes(device: CudaDevice, engine: CudaEngine) -> list[str]:
    wrong = []
    for rows, row, apart in ((1000, 16, 48), (333, 7, 20), (64, 4096, 5000), (5000, 1, 3)):
        data = np.random.default_rng(row).bytes(rows * apart)
        source, destination = device.allocate(len(data)), device.allocate(rows * row)
        _copy(device, source.address, _address(data), len(data))
        engine.copy_boxes(
            [DeviceBox(destination.address, source.address, StridedForm((rows, row), (row, 1), (apart, 1), 1, 1))]
        )
        landing = bytearray(rows * row)
        _copy(device, _address(landing), destination.address, len(landing))
        expected = np.frombuffer(data, np.uint8).reshape(rows, apart)[:, :row].tobytes()
        if landing != expected:
            wrong.append(f"boxes of {rows} rows of {row} bytes")
    return wrong


def _casts(device: CudaDevice, engine: CudaEngine) -> list[str]:
    """A cast that is computed, one that is looked up, and fp8 by blocks."""
    wrong, shape = [], (200, 300)
    for cast, size, to_size in (
        ("float32>bfloat16", 4, 2),
        ("float16>float8_e5m2", 2, 1),
        ("bfloat16>fp8-block-128:values", 2, 1),
        ("bfloat16>fp8-block-128:scales", 2, 4),
    ):
        data = np.random.default_rng(size).integers(0, 1 << 8 * size, shape, np.uint32).astype(f"u{size}")
        to_shape, blocks = (
            (2, 3) if cast.endswith("scales") else shape,
            Blocks(shape, (0, 0)) if "block" in cast else None,
        )
        expected = np.zeros(to_shape, f"u{to_size}")
        form = StridedForm(to_shape, expected.strides, data.strides, size, to_size, cast, blocks)
        converter_of(form)(expected, data)
        source, destination = device.allocate(data.nbytes), device.allocate(expected.nbytes)
        _copy(device, source.address, data.ctypes.data, data.nbytes)
        engine.copy_boxes([DeviceBox(destination.address, source.address, form)])
        found = np.zeros_like(expected)
        _copy(device, found.ctypes.data, destination.address, found.nbytes)
        if (found != expected).any():
            wrong.append(cast)
    return wrong


def _deltas(device: CudaDevice, engine: CudaEngine, shift: int) -> list[str]:
    """What changed of pieces, sparse and dense, and the old ones overwritten by it."""
    wrong, chance = [], np.random.default_rng(shift)
    for unit, units, share in ((2, 100_003, 0.01), (1, 70_001, 0.3), (4, 32_769, 0.001), (8, 129, 0.5)):
        old = np.frombuffer(chance.bytes(unit * units), f"<u{unit}")
        new = np.where(chance.random(units) < share, ~old, old)
        here, there = (device.allocate(new.nbytes + shift) for _ in range(2))
        _copy(device, here.address + shift, new.ctypes.data, new.nbytes)
        _copy(device, there.address + shift, old.ctypes.data, old.nbytes)
        size, unit_size = (np.array([each], np.int64) for each in (new.nbytes, unit))
        places = [np.array([each], np.int64) for each in (old.ctypes.data, here.address + shift, there.address + shift)]
        found, expected = engine.changes(places[0], places[1], size, unit_size)[0], changes_between(old, new)
        if found is None or written(found, unit, new.nbytes) != written(expected, unit, new.nbytes):
            wrong.append(f"changes of {units} units of {unit} bytes")
            continue
        _, right = engine.overwrite(places[2], size, unit_size, [[found]])
        landing = np.zeros_like(new)
        _copy(device, landing.ctypes.data, there.address + shift, new.nbytes)
        if not right[0] or (landing != new).any():
            wrong.append(f"an overwrite of {units} units of {unit} bytes")
    return wrong


def _copy(device: CudaDevice, to: int, origin: int, nbytes: int) -> None:
    stream = device.stream()
    stream.copy(to, origin, nbytes)
    stream.record().wait()


def _address(data: bytes | bytearray) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


if __name__ == "__main__":
    main()
