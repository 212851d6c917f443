"""FSDP2 (`fully_shard`) and hub memory: the buffers from which FSDP gathers parameters move there as a whole.

Each rank's part of a parameter is the front of a buffer that FSDP gathers from, and this buffer has the same size on
every rank: behind a part that is shorter than the first rank's, or empty, is padding. So the registered tensor is
the buffer, and where there is padding the layout says so (`tensorhub.Part`); nothing is copied at a publish.

Always true: after `move` the parameter, its local tensor and FSDP's buffer show the same hub memory, and FSDP's own
check at its first forward pass leaves them there; after an error all of them are as they were. Between a `reshard` and
the next forward pass no gathered copy of a parameter exists, so none can outlive the values that it was made from.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensorhub_common.errors import NotInThisVersion
from tensorhub_common.layout.layout import TensorEntry
from tensorhub_common.layout.parts import Part, Shape, padding

FsdpParams = Any
"""What FSDP2 keeps of one parameter: its private `FSDPParam`, for there is no public way to its buffer."""


@dataclass(frozen=True, slots=True)
class Managed:
    """What of a module FSDP2 manages."""

    parts: tuple[nn.Module, ...] = ()
    """The modules that `fully_shard` was called on."""
    books: tuple[FsdpParams, ...] = ()

    def by_parameter(self) -> dict[int, FsdpParams]:
        """Return the books by the id of the parameter object that they are about."""
        return {id(books.sharded_param): books for books in self.books}


def managed_by(module: nn.Module) -> Managed:
    """Find what FSDP2 manages, and reshard it: else the module shows gathered copies in place of its parameters.

    Raises `NotInThisVersion` for the older FSDP, whose flat parameters have no names of their own.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return Managed()
    parts = []
    for name, part in module.named_modules():
        if isinstance(part, fsdp.FullyShardedDataParallel):
            raise NotInThisVersion(
                f"module {name!r} is managed by FullyShardedDataParallel, whose flat parameters can't move into hub "
                "memory; use torch.distributed.fsdp.fully_shard, or register a mapping of its parameters and copy "
                "them into shard.tensors before each publish"
            )
        if isinstance(part, fsdp.FSDPModule):
            parts.append(part)
    reshard(parts)
    return Managed(tuple(parts), tuple(books for part in parts for books in _books_of(part)))


def reshard(parts: Iterable[nn.Module]) -> None:
    """Drop gathered copies of parameters; the next forward pass gathers them anew."""
    for part in parts:
        part.reshard()  # type: ignore[operator]


def rows_of(books: FsdpParams) -> int:
    """Return how many rows of the buffer are this rank's part."""
    local: torch.Tensor = books.sharded_param._local_tensor  # noqa: SLF001 (see `FsdpParams`)
    return local.shape[0] if local.numel() else 0


def padded(entry: TensorEntry, books: FsdpParams) -> TensorEntry:
    """Return the entry of the buffer that a rank's part, which is described by `entry`, is the front of."""
    buffer: Shape = tuple(books.padded_sharded_param_size)
    if entry.shape == buffer:
        return entry
    rows = rows_of(books)
    parts = list(entry.parts)
    if rows and not parts:
        begin = (0,) * len(buffer)
        parts = [Part(entry.name, entry.global_shape, entry.offset, entry.shape, begin, entry.shape)]
    behind = padding((rows, *(0,) * (len(buffer) - 1)), (buffer[0] - rows, *buffer[1:]))
    return TensorEntry(entry.name, entry.dtype, entry.itemsize, buffer, buffer, (0,) * len(buffer), (*parts, behind))


def settle(books: FsdpParams) -> None:
    """Have FSDP do now what it does before its first forward pass: it may put a parameter elsewhere then."""
    books.reset_sharded_param()


def move(books: FsdpParams, target: torch.Tensor) -> Callable[[], None]:
    """Move a parameter and its buffer to `target`, which has the buffer's shape; return what moves them back."""
    parameter, rows = books.sharded_param, rows_of(books)
    local, buffer = parameter._local_tensor, books._sharded_param_data  # noqa: SLF001 (see `FsdpParams`)

    def undo() -> None:
        parameter._local_tensor, books._sharded_param_data = local, buffer  # noqa: SLF001

    shown = target if rows == target.shape[0] else target.narrow(0, 0, rows).data
    parameter._local_tensor, books._sharded_param_data = shown, target.view(-1)  # noqa: SLF001
    # An older torch, or pinned memory, would leave hub memory here.
    settle(books)
    if parameter._local_tensor is not shown or books._sharded_param_data.data_ptr() != target.data_ptr():  # noqa: SLF001
        undo()
        raise NotInThisVersion(
            f"FSDP of torch {torch.__version__} puts parameters into memory of its own (pinned, or padded anew), so "
            "they can't stand in hub memory; use CPUOffloadPolicy(pin_memory=False) or a newer torch, or register a "
            "mapping of the parameters and copy them into shard.tensors before each publish"
        )
    return undo


def _books_of(part: nn.Module) -> Iterable[FsdpParams]:
    state = part._get_fsdp_state()  # type: ignore[operator]  # noqa: SLF001 (see `FsdpParams`)
    # Before 2.13 a module had one group of parameters, or none.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # noqa: SLF001
    for group in groups:
        yield from group.fsdp_params


class Gathered:
    """In the place of `Staged` for a shard whose tensors stay where they are: copies that FSDP gathered are dropped.

    A forward pass without a backward one leaves the root's parameters gathered, and a read must not leave them so: the
    next pass would compute with the old version.
    """

    is_due = False

    def __init__(self, parts: tuple[nn.Module, ...], version: Callable[[], int | None]) -> None:
        self._parts = parts
        self._version = version

    @property
    def version(self) -> int | None:
        """What the shard holds."""
        return self._version()

    def show(self) -> None:
        """Let the next forward pass gather from hub memory."""
        reshard(self._parts)
