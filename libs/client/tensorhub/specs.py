"""What a tensor looks like, without its values: dtypes by name and `TensorSpec`.

A spec takes the place of a tensor whose values come from the hub, so an engine need not make weights only to have them
overwritten. This module imports no torch, so that a host without it can read and write specs.

Always true of a `TensorSpec`: its dtype is a key of `DTYPES`, its three shapes are tuples of whole numbers that are not
negative, and they have the same number of dimensions. Whether the box and the parts fit is `layout_of`'s question.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, SupportsIndex

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout, TensorEntry
from tensorhub_common.layout.parts import Part, Shape

DTYPES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Torch's dense dtypes of whole bytes, by name, with the bytes of one element."""


_SHAPES: Final = ("global_shape", "offset", "extent", "start", "shape")
"""What a part has in numbers."""


def dtype_name(what: str, dtype: object) -> str:
    """Return torch's name of the dtype (a torch.dtype, or its name with or without "torch.") of `what`.

    Raises `LayoutMismatch` for a dtype that is unknown or has no whole bytes, such as torch's quantised ones.
    """
    text = str(dtype).removeprefix("torch.")
    if text not in DTYPES:
        raise LayoutMismatch(f"{what} has dtype {text!r:.40}; possible are {', '.join(DTYPES)}")
    return text


@dataclass(frozen=True, init=False)
class TensorSpec:
    """The place for a tensor, without values: `shape` elements from `offset` on, of a global tensor of `global_shape`.

    Without `global_shape` and `offset` it is a whole tensor. With `parts` it is a tensor of its own that consists of
    boxes of global ones. `dtype` is a torch.dtype or its name, and reads back as the name. Raises `LayoutMismatch` when
    a value is of the wrong kind.
    """

    shape: Shape
    dtype: str
    global_shape: Shape = ()
    offset: Shape = ()
    parts: tuple[Part, ...] = ()

    def __init__(
        self,
        shape: Iterable[SupportsIndex],
        dtype: object,
        global_shape: Iterable[SupportsIndex] | None = None,
        offset: Iterable[SupportsIndex] | None = None,
        parts: Iterable[Part] = (),
    ) -> None:
        """Check the values and bring them to one form."""
        local = _shape("the shape of a TensorSpec", shape)
        whole = local if global_shape is None else _shape("the global_shape of a TensorSpec", global_shape)
        begin = (0,) * len(local) if offset is None else _shape("the offset of a TensorSpec", offset)
        if not len(local) == len(whole) == len(begin):
            raise LayoutMismatch(
                f"a TensorSpec of shape {local}, global_shape {whole} and offset {begin} must have the same number "
                "of dimensions in each"
            )
        consists = tuple(_part(number, part) for number, part in enumerate(parts))
        # A frozen dataclass is written through object.__setattr__, as its own generated __init__ does.
        object.__setattr__(self, "shape", local)
        object.__setattr__(self, "dtype", dtype_name("a TensorSpec", dtype))
        object.__setattr__(self, "global_shape", whole)
        object.__setattr__(self, "offset", begin)
        object.__setattr__(self, "parts", consists)

    def entry(self, name: str) -> TensorEntry:
        """Return the layout entry of a tensor of this kind that is called `name`."""
        return TensorEntry(name, self.dtype, DTYPES[self.dtype], self.shape, self.global_shape, self.offset, self.parts)


def whole_tensors(layouts: Iterable[Layout]) -> dict[str, TensorSpec]:
    """Return the model's own tensors that the shards of these layouts have boxes of, each whole, by name.

    Values that were computed of published ones (fp8 with scales) are no tensors of the model's, and left out.
    """
    found = {}
    for entry in (each for layout in layouts for each in layout.tensors):
        if not entry.parts:
            found[entry.name] = TensorSpec(entry.global_shape, entry.dtype)
        for part in entry.parts:
            if not part.is_padding and not part.cast:
                found[part.name] = TensorSpec(part.global_shape, entry.dtype)
    return found


def _part(number: int, part: object) -> Part:
    """Return a part whose sizes are plain whole numbers."""
    if not isinstance(part, Part):
        raise LayoutMismatch(f"the parts of a TensorSpec are tensorhub.Part; part {number} is {part!r:.80}")
    told = f"of part {number} ({part.name!r:.80}) of a TensorSpec"
    for field in ("name", "cast"):
        if not isinstance(getattr(part, field), str):
            raise LayoutMismatch(f"the {field} {told} is {getattr(part, field)!r:.80}; give a string")
    shapes = {field: _shape(f"the {field} {told}", getattr(part, field)) for field in _SHAPES}
    return Part(name=part.name, cast=part.cast, **shapes)


def _shape(what: str, sizes: object) -> Shape:
    if isinstance(sizes, Iterable) and not isinstance(sizes, str | bytes):
        found = tuple(sizes)
        if all(isinstance(size, SupportsIndex) and not isinstance(size, bool) for size in found):
            whole = tuple(size.__index__() for size in found)
            if all(size >= 0 for size in whole):
                return whole
    raise LayoutMismatch(f"{what} is {sizes!r:.80}; give a tuple of whole numbers, none negative")
