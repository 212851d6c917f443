"""Values by plane: all first bytes, then all second ones, and so on. Pure.

The plane with sign and exponent of a floating-point number compresses, and that of the mantissa doesn't.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Units = npt.NDArray[np.unsignedinteger]


def units_in(view: memoryview, unit: int) -> Units:
    """Return memory as units; writing into them writes there."""
    units: Units = np.frombuffer(view, dtype=f"<u{unit}")
    return units


def planes_of(values: Units, unit: int) -> list[Bytes]:
    """Return the bytes of values by plane."""
    planes = values.view(np.uint8).reshape(-1, unit)
    return [np.ascontiguousarray(planes[:, each]) for each in range(unit)]


def values_of(planes: Sequence[Bytes]) -> Units:
    """Turn `planes_of` back."""
    values: Units = np.stack(planes, axis=1).reshape(-1).view(f"<u{len(planes)}")
    return values
