"""Between our views of bits and torch's tensors."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensorhub_agent.casting.floats import Bits, bits_of
from tensorhub_common.layout.casts import CASTABLE

_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def tensor_of(bits: Bits, dtype: str) -> torch.Tensor:
    """Return a torch tensor of the same elements; it shares memory where torch can express the strides."""
    signed: npt.NDArray[Any] = bits.view(_SIGNED[CASTABLE[dtype]])
    return torch.from_numpy(signed).view(getattr(torch, dtype))


def bits_in(tensor: torch.Tensor, dtype: str) -> Bits:
    """Return the elements of a tensor as our views have them."""
    assert tensor.dtype == getattr(torch, dtype)
    signed = torch.uint8 if CASTABLE[dtype] == 1 else getattr(torch, f"int{8 * CASTABLE[dtype]}")
    bits: Bits = tensor.view(signed).numpy().view(bits_of(dtype))
    return bits


def torch_cast(bits: Bits, from_dtype: str, to_dtype: str) -> Bits:
    """Return what torch makes of it."""
    return bits_in(tensor_of(bits, from_dtype).to(getattr(torch, to_dtype)), to_dtype)


def is_nan(bits: Bits, dtype: str) -> npt.NDArray[np.bool_]:
    """Say of each element whether it is a NaN."""
    return np.asarray(tensor_of(bits, dtype).float().isnan().numpy())
