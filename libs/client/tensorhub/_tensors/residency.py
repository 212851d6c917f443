"""Whether a shard's tensors and its module still lie where the hub reads them, and ever had values: asked at publish.

What is published are the bytes of hub memory, or what tensors on a GPU held where they were when they were registered.
A module can leave that memory without a word: `load_state_dict(…, assign=True)` puts other Parameter objects into it,
`.half()` and `p.data = …` put other memory behind the same ones, a buffer is assigned anew. Training then goes on
elsewhere, and the hub would publish the weights of before.

Invariants:
- A tensor lies there if it begins where it did; views of it in another shape do too. Several tensors may share a
  storage, as those of a flat buffer, so the storage alone says nothing.
- Where a storage was given back and allocated again, as by what offloads weights, the hub reads its new place.
- Nothing here changes a tensor, and nothing holds on to a module that its owner drops.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import torch

from tensorhub._tensors.adoption import named_members
from tensorhub.arguments import listed
from tensorhub_common.errors import LayoutMismatch, NotFilled

if TYPE_CHECKING:
    from torch import nn

    from tensorhub._tensors.description import Description

GLANCE_BYTES: Final = 4096
"""Memory with values nearly always has one among its first bytes, so the rest need not be read."""

Home = Callable[[], Mapping[str, torch.Tensor]]
"""Returns the tensors of a shard by every name, as they lie in the memory that the hub reads now."""


class Residency:
    """What one shard's tensors and module are to lie in."""

    def __init__(
        self,
        described: "Description",
        tensors: Mapping[str, torch.Tensor],
        home: Home,
        *,
        given: Mapping[str, torch.Tensor] | None = None,
        has_values: bool,
    ) -> None:
        """Take a shard whose tensors have just been bound. Without `has_values` those of specs wait for theirs.

        `given` are tensors of the caller's, by name, whose own memory the hub reads.
        """
        self._tensors, self._home, self._module = tensors, home, described.module
        self._given = given or {}
        self._names = described.names if described.module is not None else {}
        blank = () if has_values else set(described.names.values()) - described.values.keys()
        self._blank = {name for name in blank if home()[name].numel()}
        self._writes = {name: self._writes_of(name) for name in self._blank}

    # ------------------------------------------------------------------------------------------ lying elsewhere

    def left(self) -> list[str]:
        """Return the names of the tensors that no longer lie where the hub reads them."""
        homes = self._addresses()
        gone = {name for name, home in homes.items() if not _is_at(self._tensors.get(name), home)}
        gone.update(name for name, tensor in self._given.items() if not _is_at(tensor, homes[name]))
        module = self._living_module()
        if module is not None:
            current = dict(named_members(module))
            # A wrapper or a parametrization gives the same tensors other names.
            renamed = [name for name in self._names if name not in current]
            lying = {_address(tensor) for tensor in current.values()} if renamed else set()
            gone.update(name for name in renamed if homes[name] is not None and homes[name] not in lying)
            gone.update(name for name in self._names if name in current and not _is_at(current[name], homes[name]))
        return [name for name in homes if name in gone]

    def _addresses(self) -> dict[str, int | None]:
        """Return where each name's tensor begins in that memory; None without a byte."""
        return {name: _address(tensor) if tensor.numel() else None for name, tensor in self._home().items()}

    def error(self, where: str, left: list[str]) -> LayoutMismatch:
        """Return what `publish` raises where tensors lie elsewhere."""
        them = "it" if len(left) == 1 else "them"
        return LayoutMismatch(
            f"{where}: {listed(left)} no longer {'lies' if them == 'it' else 'lie'} where the hub reads {them}, so "
            "what is there now would not be published; load_state_dict(assign=True), .half() and the like, and "
            "p.data = … do that. "
            f"To bring {them} back copy each value in, shard.tensors[name].copy_(p), and let the parameter or buffer "
            "lie there again, p.data = shard.tensors[name]; another dtype or shape takes another replica name"
        )

    def _living_module(self) -> "nn.Module | None":
        return None if self._module is None else self._module()

    # --------------------------------------------------------------------------------------------- never filled

    @property
    def is_blank(self) -> bool:
        """Whether tensors were registered without values, and `mark_loaded` was not called since."""
        return bool(self._blank)

    def loaded(self) -> None:
        """Every tensor has values now."""
        self._blank.clear()
        self._writes.clear()

    def check_filled(self, where: str) -> None:
        """Raise `NotFilled` where a tensor has no values: torch never wrote it, and all its bytes are zero."""
        home = self._home()
        empty = [
            name
            for name in home
            if name in self._blank and self._writes_of(name) == self._writes[name] and _is_zero(home[name])
        ]
        if empty:
            raise NotFilled(
                f"{where}: {listed(empty)} {'was' if len(empty) == 1 else 'were'} registered without values and never "
                "written: write shard.tensors, or replicate a version; if zeros are what they are to hold, call "
                "mark_loaded()"
            )

    def _writes_of(self, name: str) -> tuple[int, ...]:
        """Return how often a tensor was written, in each way to it."""
        ways = [self._tensors.get(name)]
        module = self._living_module()
        if module is not None:
            ways += [_found(module, each) for each, canonical in self._names.items() if canonical == name]
        return tuple(_version_of(way) for way in ways)


def _found(module: "nn.Module", name: str) -> torch.Tensor | None:
    """Return a module's parameter or buffer of this name."""
    at, _, last = name.rpartition(".")
    try:
        found = getattr(module.get_submodule(at), last, None)
    except AttributeError:
        return None
    return found if isinstance(found, torch.Tensor) else None


def _version_of(tensor: torch.Tensor | None) -> int:
    """Return autograd's count of writes; tensors of inference mode have none."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version  # noqa: SLF001 (autograd's own counter)


def _address(tensor: torch.Tensor) -> int | None:
    """Return where a tensor begins; 0: its storage was given back; None: it has none of its own, as a wrapper."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        storage = local.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    return storage and storage + int(local.storage_offset()) * local.element_size()


def _is_at(tensor: object, home: int | None) -> bool:
    return home is None or (home != 0 and isinstance(tensor, torch.Tensor) and _address(tensor) == home)


def _is_zero(tensor: torch.Tensor) -> bool:
    flat = tensor.detach().view(-1).view(torch.uint8)
    return not flat[:GLANCE_BYTES].any() and not flat.any()
