"""From what a caller registers to a layout, and from hub memory back to tensors: `describe`, then `bind`.

`describe` looks and changes nothing: the layout is needed before there is memory. `bind` copies the given values into
the memory and, for a module, moves its members there (adoption.py). A mapping of names (tensorhub.mapping) says what
fused and divided tensors consist of; what it leaves out stays where it is, and the hub does not have it.

Always true: after an error in either, the caller's module is as it was; the values of a mapping are copied and never
aliased; what can't be moved byte for byte (sparse, quantised, partial sums) is refused by its name; padding is zero
after values were copied in, so that equal weights in equal layouts are equal bytes.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tensorhub._tensors import fsdp
from tensorhub._tensors.adoption import Member, adopt, named_members, tie
from tensorhub._tensors.dtensors import dtensor_entry, is_dtensor
from tensorhub._tensors.segment_mapping import Memory, tensors_at
from tensorhub.mapping import Mapping as NameMapping
from tensorhub.specs import DTYPES, TensorSpec, dtype_name
from tensorhub_common.errors import LayoutMismatch, NotInThisVersion, TensorHubError
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of
from tensorhub_common.layout.parts import Part

WORD_BYTES: Final = 8

Value = torch.Tensor | np.ndarray[Any, Any]
Tensors = nn.Module | Mapping[str, Value | TensorSpec]
"""What can be registered."""

_ACCEPTED = "torch.Tensor, DTensor, numpy.ndarray or tensorhub.TensorSpec"


@dataclass(frozen=True, slots=True)
class Description:
    """What a caller registered, understood: drop it after `bind`, for it holds on to the given values."""

    layout: Layout
    names: dict[str, str]
    """Every name, aliases of tied tensors included, in the caller's order -> the canonical name in the layout."""
    values: dict[str, Value]
    """The given values by canonical name; specs and meta tensors have none."""
    members: tuple[Member, ...] = ()
    """The parameter and buffer objects of a module, each once."""
    managed: fsdp.Managed = field(default_factory=fsdp.Managed)
    """What of the module FSDP2 manages."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """By canonical name: how many rows are values, where FSDP2 has padding behind them."""
    module: "weakref.ref[nn.Module] | None" = None
    """Whose members these are."""

    def without_values(self) -> "Description":
        """Return what is needed to bind the tensors to other memory later."""
        return replace(self, values={})

    def shown(self, standing: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors as the caller sees them, by every name; tied ones share one."""
        seen = {
            name: tensor.narrow(0, 0, self.rows[name]).data if name in self.rows else tensor
            for name, tensor in standing.items()
        }
        return {name: seen[canonical] for name, canonical in self.names.items()}

    def differing(self, standing: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names whose given values are not, bit for bit, what the tensors of these names hold."""
        shown = self.shown(standing)
        return [name for name, value in self.values.items() if not _same_bytes(name, value, shown[name])]

    def copy_in(self, standing: Mapping[str, torch.Tensor], values: Mapping[str, Value] | None = None) -> None:
        """Copy the given values, or some of them, into the tensors of their names; others are left as they are."""
        shown = self.shown(standing)
        for name, value in (self.values if values is None else values).items():
            if value.size if isinstance(value, np.ndarray) else value.numel():
                _copy(name, value, shown[name])
        for entry in self.layout.tensors:
            for part in entry.parts:
                if part.is_padding:
                    box_of(part, standing[entry.name]).zero_()


def describe(module_or_tensors: Tensors, mapping: NameMapping | None = None) -> Description:
    """Read off the layout of a module or mapping. Raises `LayoutMismatch` naming a tensor that can't be in one.

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
    registered: dict[str, TensorEntry] = {}
    for name, value in module_or_tensors.items():
        _check_name(name)
        registered[name] = _entry(name, value)
    for name, value in module_or_tensors.items():
        entry = _mapped(registered[name], mapping, registered, value)
        if entry is None:
            continue
        entries.append(entry)
        if not isinstance(value, TensorSpec) and not (isinstance(value, torch.Tensor) and value.is_meta):
            values[name] = value
    return Description(layout_of(entries), {entry.name: entry.name for entry in entries}, values)


def bind(described: Description, memory: Memory, *, memory_wins: bool = False) -> dict[str, torch.Tensor]:
    """Bind what was described to the memory; return its tensors there, by every name.

    With `memory_wins` the bytes of the memory stay, and a module's members show them; otherwise the given
    values are copied in, and tensors without values keep the memory's bytes (zeros, in a new segment). Tensors
    are plain and without gradient; tied names share one. Raises `LayoutMismatch` and leaves a module as it was.
    """
    # Under inference mode torch would turn the parameters into tensors that can never be trained again.
    with torch.inference_mode(mode=False), torch.no_grad():
        standing = tensors_at(described.layout, memory)
        if not memory_wins:
            described.copy_in(standing)
        adopt(described.members, standing)
    return described.shown(standing)


def box_of(part: Part, tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of a registered tensor that is one of its parts."""
    return tensor[tuple(slice(begin, end) for begin, end in zip(part.start, part.stop, strict=True))]


def rebind(described: Description, tensors: Mapping[str, torch.Tensor], standing: Mapping[str, torch.Tensor]) -> None:
    """Bind what `bind` has returned, and a module's members, to other memory; the objects stay the same."""
    with torch.inference_mode(mode=False), torch.no_grad():
        fsdp.reshard(described.managed.parts)
        adopt(described.members, standing)
        for name, tensor in described.shown(standing).items():
            tensors[name].data = tensor


def _mapped(
    entry: TensorEntry, mapping: NameMapping | None, registered: Mapping[str, TensorEntry], value: object
) -> TensorEntry | None:
    if mapping is not None and entry.parts and is_dtensor(value):
        raise LayoutMismatch(
            f"tensor {entry.name!r} is a DTensor whose part of the whole is no single box, which a mapping can't be "
            "laid over; redistribute it first"
        )
    return entry if mapping is None else mapping.entry(entry, registered)


def _describe_module(module: nn.Module, mapping: NameMapping | None) -> Description:
    managed = fsdp.managed_by(module)
    named = named_members(module)
    for name, tensor in named:
        _check_name(name)
        _check_dense(name, tensor)
        _check_host(name, tensor.device, sharded=is_dtensor(tensor))
    members, names = tie(named, managed)
    first = {member.name: member for member in reversed(members)}
    registered = {name: _entry(name, member.tensor) for name, member in first.items()}
    entries, rows = {}, {}
    for name, member in first.items():
        entry = _mapped(registered[name], mapping, registered, member.tensor)
        if entry is None:
            continue
        entries[name] = entry if member.books is None else fsdp.padded(entry, member.books)
        if entries[name].shape != entry.shape:
            rows[name] = fsdp.rows_of(member.books)
    return Description(
        layout_of(entries.values()),
        {name: canonical for name, canonical in names.items() if canonical in entries},
        {name: first[name].tensor for name in entries if not first[name].tensor.is_meta},
        tuple(member for member in members if member.name in entries),
        managed,
        rows,
        weakref.ref(module),
    )


def _check_host(name: str, device: torch.device, *, sharded: bool) -> None:
    if sharded and device.type == "meta":
        raise NotInThisVersion(
            f"{name!r} is a DTensor on the meta device, which this version can't give memory in place; call "
            "module.to_empty(device='cpu') before register"
        )
    if device.type not in ("cpu", "cuda", "meta"):
        raise NotInThisVersion(
            f"{name!r} is on {device}, and this version has weights on the CPU and on CUDA devices; move the module to "
            "the CPU, or register a mapping of its tensors and copy them into shard.tensors before each publish"
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
        return dtensor_entry(name, value)
    return TensorSpec(value.shape, dtype_name(f"tensor {name!r}", value.dtype)).entry(name)


def _array_entry(name: str, array: np.ndarray[Any, Any]) -> TensorEntry:
    if isinstance(array, np.ma.MaskedArray):
        raise LayoutMismatch(f"tensor {name!r} is a masked array, whose mask has no place; call .filled() on it first")
    # A dtype registered with numpy from outside (bfloat16, float8_*) goes by the name that it shares with torch.
    if DTYPES.get(array.dtype.name) != array.dtype.itemsize:
        raise LayoutMismatch(
            f"tensor {name!r} has the numpy dtype {array.dtype}, which torch lacks; convert it with .astype first"
        )
    return TensorSpec(array.shape, array.dtype.name).entry(name)


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


def _same_bytes(name: str, value: Value, standing: torch.Tensor) -> bool:
    """Compare bytes: NaN is not equal to itself, and some dtypes of eight bits can't be compared at all."""
    if not standing.numel():
        return True
    if isinstance(value, np.ndarray) or value.dtype != standing.dtype or not value.is_contiguous():
        dense = torch.empty_like(standing)
        _copy(name, value, dense)
    else:
        dense = value.to_local() if is_dtensor(value) else value  # type: ignore[attr-defined]
    given, there = _bytes_of(dense), _bytes_of(standing)
    if all(each.numel() % WORD_BYTES == 0 and each.storage_offset() % WORD_BYTES == 0 for each in (given, there)):
        # As numbers of eight bytes they compare four times as fast. A slice may begin in the middle of one.
        given, there = given.view(torch.int64), there.view(torch.int64)
    return torch.equal(given, there)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _kind(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")
