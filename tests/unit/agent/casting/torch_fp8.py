"""What torch computes from each engine's formula of fp8 with scales, written down as the engines have it."""

from collections.abc import Callable

import numpy as np
import torch
from tests.unit.agent.casting.torch_bits import bits_in, tensor_of

from tensorhub_agent.casting.floats import Bits
from tensorhub_agent.casting.fp8 import Floats
from tensorhub_common.layout.casts import Fp8Scheme

MAX = 448.0

Reference = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def blocked(weight: torch.Tensor) -> torch.Tensor:
    """Return [blocks of rows, 128, blocks of columns, 128], filled up with zeros."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128, dtype=weight.dtype)
    padded[:rows, :columns] = weight
    return padded.view(-1, 128, padded.shape[1] // 128, 128)


def unblocked(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    return values.reshape(values.shape[0] * 128, -1)[:rows, :columns].to(torch.float8_e4m3fn)


def multiplied(amax_min: float, *, power_of_two: bool = False) -> Reference:
    """DeepGEMM's per_block_cast_to_fp8, which vLLM and SGLang share; slime's kernel has another least amax."""

    def reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        view = blocked(weight)
        amax = view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(amax_min)
        scales = amax / MAX
        if power_of_two:
            bits = scales.view(torch.int32)
            exponents = (bits >> 23 & 0xFF) + (bits & 0x7FFFFF != 0).int()
            scales = (exponents.clamp(1, 254) << 23).view(torch.float32)
        return unblocked(view * (1.0 / scales), weight), scales[:, 0, :, 0]

    return reference


def reciprocal(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NeMo-RL's cast_tensor_to_fp8_blockwise, and verl's where there is no Triton."""
    view = blocked(weight).float()
    amax = view.abs().amax(dim=(1, 3), keepdim=True)
    factor = MAX / amax
    factor = torch.where(amax == 0, 1.0, factor)
    factor = torch.where(amax == torch.inf, 1.0, factor)
    return unblocked(torch.clamp(view * factor, -MAX, MAX), weight), torch.reciprocal(factor)[:, 0, :, 0]


def saturated(scaled: torch.Tensor) -> torch.Tensor:
    """A kernel's fmax(-448, fmin(x, 448)), then the conversion."""
    limit = torch.tensor(MAX)
    return torch.fmax(-limit, torch.fmin(scaled, limit)).to(torch.float8_e4m3fn)


def per_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM's dynamic_per_token_scaled_fp8_quant over the rows of a weight."""
    scales = (weight.float().abs().amax(dim=1, keepdim=True) / MAX).clamp(min=1 / (MAX * 512))
    return saturated(weight.float() / scales), scales


def per_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM's dynamic_scaled_fp8_quant."""
    scale = weight.float().abs().amax().reshape(1, 1) / MAX
    return saturated(weight.float() * (1.0 / scale)), scale


REFERENCES: dict[str, Reference] = {
    "fp8-block-128": multiplied(1e-4),
    "fp8-block-128-ue8m0": multiplied(1e-4, power_of_two=True),
    "fp8-block-128-slime": multiplied(1e-10),
    "fp8-block-128-nemo": reciprocal,
    "fp8-channel": per_channel,
    "fp8-tensor": per_tensor,
}


def referred(source: Bits, dtype: str, scheme: Fp8Scheme) -> tuple[Bits, Floats]:
    """Return values and scales by the reference, matrix by matrix."""
    values, scales = np.zeros(source.shape, np.uint8), np.zeros(scheme.scales_shape(source.shape), np.float32)
    for index in np.ndindex(*source.shape[:-2]):
        some, their = REFERENCES[scheme.name](tensor_of(np.ascontiguousarray(source[index]), dtype))
        values[index], scales[index] = bits_in(some, "float8_e4m3fn"), their.numpy()
    return values, scales


def weight(shape: tuple[int, ...], dtype: str, seed: int = 1) -> Bits:
    """Return normal weights whose blocks differ widely in size, some of them zeros or tiny."""
    rng = np.random.default_rng(seed)
    floats = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 4, (*shape[:-1], 1)))
    floats[..., : shape[-2] // 3, :] *= rng.choice([0, 1e-7, 1, 1000])
    cast = torch.from_numpy(floats).to(getattr(torch, dtype))
    return bits_in(cast, dtype)
