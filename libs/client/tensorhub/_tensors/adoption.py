"""Adopting an `nn.Module`: its parameters and buffers move into hub memory and stay the objects that they were.

An optimizer, a DDP wrapper or a list of tied weights holds on to Parameter and buffer *objects*. So not the objects are
replaced, but their storage: gradients, hooks, `requires_grad`, attributes and optimizer state stay.

Always true:
- Tied members stay tied and are stored once. Members are tied when they are one object, or view the same memory in the
  same way (start, shape, stride, dtype). The first name in traversal order (parameters, then buffers) is canonical.
- Members that are *different* views of one storage (slices of a fused weight) get memory of their own each; writes to
  one no longer show in the other.
- `adopt` does all or nothing: after an error every member is where it was before.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensorhub._tensors import fsdp
from tensorhub._tensors.dtensors import is_dtensor
from tensorhub_common.errors import LayoutMismatch


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter or buffer object of a module, and the canonical name of its entry in the layout."""

    name: str
    tensor: torch.Tensor
    books: fsdp.FsdpParams = None
    """What FSDP2 keeps of it, where it manages it."""


def named_members(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters, then all buffers, by every name: those of aliases and non-persistent buffers too."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def tie(
    named: Iterable[tuple[str, torch.Tensor]], managed: fsdp.Managed | None = None
) -> tuple[list[Member], dict[str, str]]:
    """Find what is tied: the distinct tensor objects with their canonical names, and every name's canonical name."""
    books = managed.by_parameter() if managed is not None else {}
    canonical: dict[Hashable, str] = {}
    members: dict[int, Member] = {}
    names: dict[str, str] = {}
    for name, tensor in named:
        first = members[id(tensor)].name if id(tensor) in members else canonical.setdefault(_place(tensor), name)
        members.setdefault(id(tensor), Member(first, tensor, books.get(id(tensor))))
        names[name] = first
    return list(members.values()), names


def adopt(members: Iterable[Member], standing: Mapping[str, torch.Tensor]) -> None:
    """Move every member to the tensor of its name. On any error all of them are as they were before."""
    undo: list[Callable[[], None]] = []
    try:
        for member in members:
            undo.append(_move(member, standing[member.name]))  # noqa: PERF401 (what was done so far must be known)
    except BaseException:
        for step in reversed(undo):
            step()
        raise


def _place(tensor: torch.Tensor) -> Hashable:
    """Return what tied tensors have in common."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    if local.numel() == 0:
        return id(tensor)
    # Two storages may lie over the same bytes, so the address decides; meta tensors have none, but share a storage.
    storage = local.untyped_storage()
    where = (storage._cdata, local.storage_offset()) if local.is_meta else local.data_ptr()  # noqa: SLF001
    kind = (local.dtype, tuple(local.shape), local.stride(), local.is_conj(), local.is_neg())
    return (local.device.type, where, kind, tuple(tensor.shape))


def _move(member: Member, target: torch.Tensor) -> Callable[[], None]:
    """Move one member to `target`; return what moves it back."""
    tensor = member.tensor
    try:
        if member.books is not None:
            return fsdp.move(member.books, target)
        if is_dtensor(tensor):
            return _replace_local(tensor, target)
        if tensor.is_meta:
            return _swap_behind(tensor, target)
        return _replace_data(tensor, target)
    except RuntimeError as error:
        raise LayoutMismatch(
            f"{member.name!r} can't be moved into hub memory ({error}); register the module before anything else "
            "takes hold of its tensors, or give a mapping of its tensors"
        ) from error


def _replace_data(tensor: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    before = tensor.data
    tensor.data = target

    def undo() -> None:
        tensor.data = before

    return undo


def _replace_local(tensor: Any, target: torch.Tensor) -> Callable[[], None]:  # noqa: ANN401 (a DTensor, imported lazily)
    before = tensor._local_tensor  # noqa: SLF001 (torch has no public way to move a DTensor)
    tensor._local_tensor = target  # noqa: SLF001

    def undo() -> None:
        tensor._local_tensor = before  # noqa: SLF001

    return undo


def _swap_behind(tensor: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    """Give a meta tensor real memory: torch refuses `.data` across devices, so its storage is swapped.

    A swap would take class, attributes and hooks along, so these are put back. A meta gradient has no values and goes.
    """
    fresh = target.data.requires_grad_(tensor.requires_grad)

    def swap() -> None:
        kind, attributes = tensor.__class__, tensor.__dict__
        hooks, after_hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # noqa: SLF001
        torch.utils.swap_tensors(tensor, fresh)
        tensor.__class__, tensor.__dict__ = kind, attributes
        tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks, after_hooks  # noqa: SLF001

    swap()
    return swap
