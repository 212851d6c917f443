"""Which device a name means: `GPU-…` of a driver, or `GPU-fake-…`, which stands in for one."""

from typing import Final

from tensorhub_common.devices.cuda import cuda_device_of
from tensorhub_common.devices.device import Device, DeviceUnavailable
from tensorhub_common.devices.fake import fake_device

FAKE_PREFIX: Final = "GPU-fake-"


def device_named(uuid: str) -> Device:
    """Return the device with this UUID, as this process sees it. Raises `DeviceUnavailable`."""
    if not uuid.startswith(FAKE_PREFIX):
        return cuda_device_of(uuid)
    number = uuid.removeprefix(FAKE_PREFIX)
    if not number.isdecimal():
        raise DeviceUnavailable(f"{uuid!r} is no device: a fake one is {FAKE_PREFIX}0")
    return fake_device(int(number))
