"""A strided box between two addresses that a GPU reaches, and which of them its kernels take."""

from typing import Final, NamedTuple

from tensorhub_agent.primitives.block_forms import MATRIX, derivation_of
from tensorhub_common.programs.regions import StridedForm

SCALE_BYTES: Final = 4


class DeviceBox(NamedTuple):
    """A box between two addresses of a GPU's memory."""

    to: int
    origin: int
    form: StridedForm
    amax: bytes = b""
    """The largest magnitudes of its blocks, where the form is computed of them."""


def is_derived(box: DeviceBox) -> bool:
    """Whether fp8 values or scales are computed of a box."""
    return derivation_of(box.form) is not None


def is_possible(box: DeviceBox) -> bool:
    """Whether kernels take a box: they copy all, and convert elements that are aligned at both ends.

    What is computed of blocks has to have its elements side by side in the last dimension as well.
    """
    form = box.form
    if not form.cast:
        return True
    ends = ((form.to_itemsize, (box.to, *form.to_strides)), (form.itemsize, (box.origin, *form.origin_strides)))
    if any(at % itemsize for itemsize, places in ends for at in places):
        return False
    if (found := derivation_of(form)) is None:
        return ">" in form.cast and form.blocks is None
    if len(form.shape) < MATRIX or form.origin_strides[-1] != form.itemsize:
        return False
    return found[1].is_scales or form.to_strides[-1] == form.to_itemsize
