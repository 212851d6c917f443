"""Casts that a GPU makes have the host's bits."""

import numpy as np
import pytest
from tests.kit.float_bits import numbers
from tests.kit.gpu import bytes_of, on_device

from tensorhub_agent.casting.floats import bits_of
from tensorhub_agent.casting.values import cast
from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_agent.devices.cuda_engine import CudaEngine
from tensorhub_common.devices.cuda import CudaDevice
from tensorhub_common.layout.casts import CASTABLE, cast_name
from tensorhub_common.programs.regions import StridedForm

pytestmark = pytest.mark.gpu

PAIRS = [(one, other) for one in CASTABLE for other in CASTABLE if one != other]


@pytest.mark.parametrize(("from_dtype", "to_dtype"), PAIRS)
def test_all_kinds_of_numbers_get_the_hosts_bits(device: CudaDevice, from_dtype: str, to_dtype: str) -> None:
    given = numbers(from_dtype, 40_000)
    expected = np.zeros(len(given), bits_of(to_dtype))
    cast(given, from_dtype, expected, to_dtype)
    source, destination = on_device(device, given.tobytes()), on_device(device, bytes(expected.nbytes))
    sizes, engine = (CASTABLE[from_dtype], CASTABLE[to_dtype]), CudaEngine(device)
    for length in (len(given) // 8 * 8, len(given) // 8 * 8 - 3):
        form = StridedForm((length,), (sizes[1],), (sizes[0],), *sizes, cast_name(from_dtype, to_dtype))
        box = DeviceBox(destination.address, source.address, form)
        assert engine.takes(box)
        engine.copy_boxes([box])
        found = np.frombuffer(bytes_of(destination), bits_of(to_dtype))
        wrong = np.flatnonzero(found[:length] != expected[:length])
        assert not len(wrong), [(hex(given[at]), hex(found[at]), hex(expected[at])) for at in wrong[:8]]
