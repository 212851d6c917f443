"""Memory of a segment as code sees it that only hands it on: transports, sources, the reading of batches. Pure.

A `memoryview` is a region. What looks into the bytes asks for `host` memory, once for a batch; memory of another kind
comes with work of its own there, and changes nothing for those that hand it on.
"""

from typing import Protocol, Self


class MemoryRegion(Protocol):
    """Bytes one after another, which can be cut without a copy."""

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""

    @property
    def readonly(self) -> bool:
        """Whether it can't be written."""

    def __len__(self) -> int:
        """Return how many bytes it has."""

    def __getitem__(self, span: slice, /) -> Self:
        """Return a part, which is the same memory."""


def host(region: MemoryRegion) -> memoryview:
    """Return a region of host memory as bytes. Raises `TypeError` for memory of another kind."""
    if isinstance(region, memoryview):
        return region
    raise TypeError(f"{type(region).__name__} is no host memory: this work has no form for it")
