"""What tests on a GPU share. Without one each is skipped, and says so."""

from collections.abc import Iterator

import pytest
from tests.kit.gpu import why_no_gpu

from tensorhub_common.devices.cuda import CudaDevice, cuda_device


@pytest.fixture(scope="session", autouse=True)
def needs_a_gpu() -> None:
    if why := why_no_gpu():
        pytest.skip(why)


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    """The first GPU; what a test leaves there of its own is gone at its end."""
    found = cuda_device(0)
    yield found
    found.finish()
