"""fp8 values and scales that a GPU computes are the host's, bit for bit."""

import ctypes

import numpy as np
import pytest
from tests.kit.fp8_boxes import CASES, KINDS, boxes
from tests.kit.gpu import bytes_of, on_device

from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_agent.devices.engine import engine_of
from tensorhub_common.devices.cuda import CudaDevice

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "name", "shape"), CASES)
def test_boxes_are_the_hosts(device: CudaDevice, dtype: str, name: str, shape: tuple[int, ...]) -> None:
    engine = engine_of(device)
    for box in boxes(dtype, name, shape):
        data = ctypes.string_at(box.source.ctypes.data, box.form.origin_span_bytes)
        source, destination = on_device(device, data), on_device(device, box.before.tobytes())
        whole = DeviceBox(destination.address + box.to, source.address, box.form, box.amax)
        assert engine.takes(whole)
        engine.copy_boxes([whole])
        found, after = np.frombuffer(bytes_of(destination), np.uint8).copy(), box.after.reshape(-1).copy()
        if KINDS[name].is_amax:
            # Which of several NaN is the largest depends on how a box was cut.
            for each in (found, after):
                floats = each.view(np.float32)
                floats[np.isnan(floats)] = np.nan
        assert (found == after).all(), box.form
