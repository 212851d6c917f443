"""A strided box between two addresses that a GPU reaches."""

from typing import NamedTuple

from tensorhub_common.programs.regions import StridedForm


class DeviceBox(NamedTuple):
    """A box between two addresses of a GPU's memory."""

    to: int
    origin: int
    form: StridedForm
