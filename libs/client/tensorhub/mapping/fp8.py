"""What of a registered model is fp8 with scales: values of the published weights, and the scales beside them. Pure.

A weight in float8_e4m3fn consists of values, and the float32 tensor of its name with the scheme's suffix (`weight` and
`weight_scale_inv`) of the scales of the same parts: so fused tensors and stacks need no rules of their own. Every
tensor of another dtype is what it would be without.

Always true: blocks are the global tensor's. Where the engine's own, counted in its fused shard, would be others, the
weight is refused by its name, for its scales would mean something else.
"""

from collections.abc import Mapping
from math import prod

import msgspec

from tensorhub.mapping.nodes import Misfit
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.casts import FP8_DTYPE, SCALE_DTYPE, Fp8Scheme, fp8_scheme
from tensorhub_common.layout.layout import TensorEntry
from tensorhub_common.layout.parts import Part, Shape, padding

MATRIX = 2
"""Blocks lie in the last two dimensions."""


class Fp8(msgspec.Struct, frozen=True):
    """Weights in float8_e4m3fn are quantised from the published ones by this scheme. Make it with `fp8`."""

    scheme: str
    suffix: str


def fp8(scheme: str, suffix: str | None = None) -> Fp8:
    """Return how weights are quantised: a scheme of docs/design/casts.md, as "fp8-block-128".

    `suffix` is what the engine appends to a weight's name to call its scales; by default "_scale_inv" for blocks and
    "_scale" for rows. Raises `ValueError` for a scheme that there is not.
    """
    try:
        found = fp8_scheme(scheme)
    except LayoutMismatch as why:
        raise ValueError(str(why)) from None
    return Fp8(scheme, found.suffix if suffix is None else suffix)


def weight_of(how: Fp8, entry: TensorEntry, registered: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """Return the registered weight whose scales an entry is, or None: it is none."""
    if entry.dtype != SCALE_DTYPE or not entry.name.endswith(how.suffix):
        return None
    weight = registered.get(entry.name.removesuffix(how.suffix))
    return weight if weight is not None and weight.dtype == FP8_DTYPE else None


def values(how: Fp8, entry: TensorEntry, registered: Mapping[str, TensorEntry]) -> TensorEntry:
    """Return an entry with its parts as values, if it is a weight. Raises `LayoutMismatch` where it has no scales."""
    if entry.dtype != FP8_DTYPE:
        return entry
    beside = registered.get(entry.name + how.suffix)
    if beside is None or beside.dtype != SCALE_DTYPE:
        raise LayoutMismatch(
            f"tensor {entry.name!r} is {FP8_DTYPE}, and no {SCALE_DTYPE} {entry.name + how.suffix!r} is registered for "
            "its scales: register that too, or name the engine's suffix with mapping.fp8(scheme, suffix)"
        )
    cast = f"{how.scheme}:values"
    parts = tuple(part if part.is_padding else msgspec.structs.replace(part, cast=cast) for part in _parts(entry))
    return _of_parts(entry, parts)


def scales(how: Fp8, entry: TensorEntry, weight: TensorEntry) -> TensorEntry:
    """Return the entry of the scales of a weight, whose parts are known. Raises `LayoutMismatch` that names either."""
    scheme = fp8_scheme(how.scheme)
    try:
        parts = tuple(_scales_of(scheme, part, weight.shape) for part in _parts(weight))
    except Misfit as misfit:
        raise LayoutMismatch(f"tensor {weight.name!r} of shape {weight.shape} {misfit}") from None
    expected = tuple(max((part.stop[dim] for part in parts), default=0) for dim in range(len(weight.shape)))
    if entry.shape != expected:
        raise LayoutMismatch(
            f"tensor {entry.name!r} of shape {entry.shape} should have shape {expected}: {how.scheme} has "
            f"as many blocks in {weight.name!r} of shape {weight.shape}"
        )
    return _of_parts(entry, parts)


def _parts(entry: TensorEntry) -> tuple[Part, ...]:
    if entry.parts or not prod(entry.shape):
        return entry.parts
    return (Part(entry.name, entry.global_shape, entry.offset, entry.shape, (0,) * len(entry.shape), entry.shape),)


def _of_parts(entry: TensorEntry, parts: tuple[Part, ...]) -> TensorEntry:
    whole = (0,) * len(entry.shape)
    return msgspec.structs.replace(entry, global_shape=entry.shape, offset=whole, parts=parts)


def _scales_of(scheme: Fp8Scheme, part: Part, shape: Shape) -> Part:
    """Return the part of the scale tensor that belongs to a part of a weight."""
    if len(shape) < MATRIX or (part.name and len(part.extent) < MATRIX):
        raise Misfit("has no rows and columns that could share scales")
    local = scheme.steps(part.global_shape if part.name else shape)
    begin, end = part.start[-MATRIX:], part.stop[-MATRIX:]
    first = tuple(a // step for a, step in zip(begin, local, strict=True))
    if any(a % step for a, step in zip(begin, local, strict=True)):
        raise Misfit(f"has {_called(part)} at {part.start}, within a block of {_told(local)}: {_UNLIKE}")
    if part.is_padding:
        last = tuple(-(-b // step) for b, step in zip(end, local, strict=True))
        return padding((*part.start[:-MATRIX], *first), _sizes(part, first, last))
    _check_blocks(scheme, part)
    offset, stop = scheme.scales_of(
        part.offset, tuple(a + b for a, b in zip(part.offset, part.extent, strict=True)), part.global_shape
    )
    extent = tuple(b - a for a, b in zip(offset, stop, strict=True))
    start = (*part.start[:-MATRIX], *first)
    here = (*part.shape[:-MATRIX], *extent[-MATRIX:])
    return Part(part.name, part.global_shape, offset, extent, start, here, f"{scheme.name}:scales")


def _check_blocks(scheme: Fp8Scheme, part: Part) -> None:
    """Raise `Misfit` where blocks that are counted from the beginning of the part would be others."""
    dims = zip(part.offset[-MATRIX:], part.extent[-MATRIX:], part.global_shape[-MATRIX:], scheme.block, strict=True)
    for begin, size, whole, step in dims:
        # All of a dimension is one block in a shard as in the whole tensor.
        if step is not None and (begin % step or ((begin + size) % step and begin + size < whole)):
            raise Misfit(
                f"has {begin} to {begin + size} of {whole} of {part.name!r}, which is not in whole blocks of {step}: "
                f"{_UNLIKE}"
            )


def _sizes(part: Part, first: Shape, last: Shape) -> Shape:
    return (*part.shape[:-MATRIX], *(b - a for a, b in zip(first, last, strict=True)))


def _called(part: Part) -> str:
    return repr(part.name) if part.name else "padding"


def _told(block: Shape) -> str:
    return " × ".join(map(str, block))


_UNLIKE = (
    "blocks count from the beginning of the global tensor, and those of an engine's own shard are not in this version. "
    "Divide it at whole blocks, or register it as it was published and quantise it in the engine"
)
