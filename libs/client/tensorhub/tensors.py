"""From what a caller registers to a layout, and from hub memory back to tensors: `describe`, then `bind`.

`describe` looks and changes nothing: the layout is needed before there is memory. `bind` copies the given values into
the memory and, for a module, lets its members stand there (module.py). A mapping of names (tensorhub.mapping) says what
fused and divided tensors consist of; what it leaves out stays where it is, and the hub does not have it.

Always true: after an error in either, the caller's module is as it was; the values of a mapping are copied and never
aliased; what can't be moved byte for byte (sparse, quantised, partial sums) is refused by its name; padding is zero
after values were copied in, so that equal weights in equal layouts are equal bytes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tensorhub.mapping import Mapping as NameMapping
from tensorhub.memory import Memory, tensors_at
from tensorhub.module import Member, adopt, is_dtensor, named_members, tie
from tensorhub.specs import DTYPES, TensorSpec, dtype_name
from tensorhub_common.errors import LayoutMismatch, NotInThisVersion, TensorHubError
from tensorhub_common.layout import Layout, Part, Shape, TensorEntry, layout_of

Value = torch.Tensor | np.ndarray[Any, Any]
Tensors = nn.Module | Mapping[str, Value | TensorSpec]
"""What can be registered."""

_ACCEPTED = "torch.Tensor, DTensor, numpy.ndarray or tensorhub.TensorSpec"


@dataclass(frozen=True, slots=True)
class Described:
    """What a caller registered, understood: drop it after `bind`, for it holds on to the given values."""

    layout: Layout
    names: dict[str, str]
    """Every name, aliases of tied tensors included, in the caller's order -> the canonical name in the layout."""
    values: dict[str, Value]
    """The given values by canonical name; specs and meta tensors have none."""
    members: tuple[Member, ...] = ()
    """The parameter and buffer objects of a module, each once."""

    def copy_in(self, standing: Mapping[str, torch.Tensor]) -> None:
        """Copy the given values into the tensors of their names; those of specs are left as they are."""
        for name, value in self.values.items():
            if value.size if isinstance(value, np.ndarray) else value.numel():
                _copy(name, value, standing[name])
        for entry in self.layout.tensors:
            for part in entry.parts:
                if part.is_padding:
                    box_of(part, standing[entry.name]).zero_()


def describe(module_or_tensors: Tensors, mapping: NameMapping | None = None) -> Described:
    """Read off the layout of a module or mapping. Raises `LayoutMismatch` naming a tensor that can't stand there.

    `mapping` says what of global tensors each registered one consists of.
    """
    if isinstance(module_or_tensors, nn.Module):
        return _describe_module(module_or_tensors, mapping)
    if not isinstance(module_or_tensors, Mapping):
        raise LayoutMismatch(
            f"register takes an nn.Module or a mapping of name to {_ACCEPTED}; got {_kind(module_or_tensors)}"
        )
    entries: list[TensorEntry] = []
    values: dict[str, Value] = {}
    for name, value in module_or_tensors.items():
        _check_name(name)
        entry = _mapped(_entry(name, value), mapping)
        if entry is None:
            continue
        entries.append(entry)
        if not isinstance(value, TensorSpec) and not (isinstance(value, torch.Tensor) and value.is_meta):
            values[name] = value
    return Described(layout_of(entries), {entry.name: entry.name for entry in entries}, values)


def bind(described: Described, memory: Memory, *, memory_wins: bool = False) -> dict[str, torch.Tensor]:
    """Let what was described stand in the memory; return its tensors there, by every name.

    With `memory_wins` the bytes that stand in the memory stay, and a module's members show them; otherwise the given
    values are copied in, and tensors without values keep the memory's bytes (zeros, in a new segment). Tensors
    are plain and without gradient; tied names share one. Raises `LayoutMismatch` and leaves a module as it was.
    """
    # Under inference mode torch would turn the parameters into tensors that can never be trained again.
    with torch.inference_mode(mode=False), torch.no_grad():
        standing = tensors_at(described.layout, memory)
        if not memory_wins:
            described.copy_in(standing)
        adopt(described.members, standing)
    return {name: standing[canonical] for name, canonical in described.names.items()}


def box_of(part: Part, tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of a registered tensor that is one of its parts."""
    return tensor[tuple(slice(begin, end) for begin, end in zip(part.start, part.stop, strict=True))]


def stand(
    members: Iterable[Member],
    names: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
    standing: Mapping[str, torch.Tensor],
) -> None:
    """Let what `bind` has returned, and a module's members, stand in other memory; the objects stay the same."""
    with torch.inference_mode(mode=False), torch.no_grad():
        adopt(members, standing)
        for name, tensor in tensors.items():
            tensor.data = standing[names[name]]


def _mapped(entry: TensorEntry, mapping: NameMapping | None) -> TensorEntry | None:
    return entry if mapping is None else mapping.entry(entry)


def _describe_module(module: nn.Module, mapping: NameMapping | None) -> Described:
    named = named_members(module)
    for name, tensor in named:
        _check_name(name)
        _check_dense(name, tensor)
        _check_host(name, tensor.device, sharded=is_dtensor(tensor))
    members, names = tie(named)
    first = {member.name: member.tensor for member in reversed(members)}
    found = [_mapped(_entry(name, tensor), mapping) for name, tensor in first.items()]
    entries = {entry.name: entry for entry in found if entry is not None}
    return Described(
        layout_of(entries.values()),
        {name: canonical for name, canonical in names.items() if canonical in entries},
        {name: tensor for name, tensor in first.items() if name in entries and not tensor.is_meta},
        tuple(member for member in members if member.name in entries),
    )


def _check_host(name: str, device: torch.device, *, sharded: bool) -> None:
    if sharded and device.type == "meta":
        raise NotInThisVersion(
            f"{name!r} is a DTensor on the meta device, which this version can't give memory in place; call "
            "module.to_empty(device='cpu') before register"
        )
    if device.type not in ("cpu", "meta"):
        raise NotInThisVersion(
            f"{name!r} is on {device}, and this version keeps weights in host memory; move the module to the CPU, or "
            "register a mapping of its tensors and copy them into shard.tensors before each publish"
        )


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise LayoutMismatch(f"tensor names are strings; got {name!r:.80}, which is {_kind(name)}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise LayoutMismatch(f"tensor name {name!r:.80} is not valid Unicode; rename the tensor") from error


def _entry(name: str, value: object) -> TensorEntry:
    if isinstance(value, TensorSpec):
        return value.entry(name)
    if isinstance(value, np.ndarray):
        return _array_entry(name, value)
    if not isinstance(value, torch.Tensor):
        raise LayoutMismatch(f"tensor {name!r} is {_kind(value)}; give a {_ACCEPTED}")
    _check_dense(name, value)
    if is_dtensor(value):
        return _dtensor_entry(name, value)
    return TensorSpec(value.shape, dtype_name(f"tensor {name!r}", value.dtype)).entry(name)


def _array_entry(name: str, array: np.ndarray[Any, Any]) -> TensorEntry:
    # A dtype registered with numpy from outside (bfloat16, float8_*) goes by the name that it shares with torch.
    if DTYPES.get(array.dtype.name) != array.dtype.itemsize:
        raise LayoutMismatch(
            f"tensor {name!r} has the numpy dtype {array.dtype}, which torch lacks; convert it with .astype first"
        )
    return TensorSpec(array.shape, array.dtype.name).entry(name)


def _dtensor_entry(name: str, tensor: Any) -> TensorEntry:  # noqa: ANN401 (a DTensor, imported lazily)
    # What torch.distributed.checkpoint itself uses; torch has no public function for it.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    mesh, whole = tensor.device_mesh, tuple(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise LayoutMismatch(
            f"tensor {name!r} is a DTensor of partial sums; redistribute it to Shard or Replicate first"
        )
    if mesh.get_coordinate() is None:
        raise LayoutMismatch(f"tensor {name!r} is a DTensor on a mesh without this process; leave it out of this shard")
    if not _is_box(whole, tuple(mesh.shape), tensor.placements):
        raise LayoutMismatch(
            f"tensor {name!r} is a DTensor whose part {tensor.placements} is no single box; redistribute it first"
        )
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    # An empty part may be said to begin anywhere; where it begins must fit into the whole.
    begin = tuple(min(at, size) for at, size in zip(offset, whole, strict=True))
    return TensorSpec(shape, dtype_name(f"tensor {name!r}", tensor.dtype), whole, begin).entry(name)


def _is_box(whole: Shape, mesh: Shape, placements: Any) -> bool:  # noqa: ANN401 (of DTensor's placements)
    """Tell whether a strided shard (FSDP over tensor parallelism) is contiguous: its splits must be undone evenly."""
    for number, placement in enumerate(placements):
        split = getattr(placement, "split_factor", 1)
        if split == 1:
            continue
        over = [size for size, other in zip(mesh, placements, strict=True) if _dim(other) == _dim(placement)]
        inner = [mesh[n] for n in range(number + 1, len(mesh)) if _dim(placements[n]) == _dim(placement)]
        if prod(inner) != split or whole[placement.dim] % prod(over):
            return False
    return True


def _dim(placement: object) -> int | None:
    return getattr(placement, "dim", None)


_Test = Callable[[torch.Tensor], bool]
_REFUSALS: tuple[tuple[_Test, str], ...] = (
    (nn.parameter.is_lazy, "is not initialised yet; run the lazy module once before register"),
    (lambda tensor: tensor.is_quantized, "is quantised by torch; give its integers and scales as plain tensors"),
    (lambda tensor: tensor.is_nested, "is a nested tensor; give its parts as plain tensors"),
    (lambda tensor: tensor.layout is not torch.strided, "is not dense; call .to_dense() on it first"),
    (
        lambda tensor: not is_dtensor(tensor) and is_traceable_wrapper_subclass(tensor),
        "wraps other tensors; give the tensors inside it by names of their own",
    ),
)


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    for is_so, words in _REFUSALS:
        if is_so(tensor):
            raise LayoutMismatch(f"tensor {name!r} ({type(tensor).__name__}, {tensor.dtype}, {tensor.layout}) {words}")
    dtype_name(f"tensor {name!r}", tensor.dtype)


def _copy(name: str, value: Value, target: torch.Tensor) -> None:
    try:
        if isinstance(value, np.ndarray):
            # Through numpy, which reads strided, read-only and byte-swapped arrays; "equiv" lets no value change.
            flat = target.view(-1).view(torch.uint8).numpy()
            native = value.dtype.newbyteorder("=")
            np.copyto(flat.view(native).reshape(value.shape), value, casting="equiv")
        else:
            local: torch.Tensor = value.to_local() if is_dtensor(value) else value  # type: ignore[attr-defined]
            target.copy_(local.detach())
    except TensorHubError:
        raise
    except Exception as error:
        raise LayoutMismatch(f"the values of tensor {name!r} can't be copied into hub memory: {error}") from error


def _kind(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")
