"""What a registered tensor consists of, as a value: the nodes that a rule is written with, and their boxes. Pure.

    concat(tensor("….q_proj.weight", share(4096, 1, 2)), tensor("….k_proj.weight", …), tensor("….v_proj.weight", …))

A node is laid out in a box of the registered tensor from outside in: a stack gives each of its items one index of the
first dimension, a concatenation divides one dimension, a tensor takes what is left, whole or cut. Names of global
tensors are templates, filled with what the rule's pattern has matched and with the index of a stack around them.

Invariant of `lay_out`: the parts that it returns cover the box exactly, or it raises `Misfit` and says what is wrong.
A tensor of which this rank has nothing is a part without an element.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from tensorhub.mapping.cuts import Cut, Padded
from tensorhub.mapping.patterns import WHOLE_NAME, filled, words
from tensorhub_common.layout.parts import Part, Shape, padding


class Misfit(Exception):
    """The registered tensor is not as the rule says; the message is the end of a sentence about it."""


class Tensor(msgspec.Struct, frozen=True):
    """A global tensor, or the box of it that is cut out of its dimensions. Make it with `tensor`."""

    name: str
    cuts: tuple[Cut | Padded | None, ...] = ()
    """By dimension; None, or nothing, takes all of a dimension, as long as it is in the registered tensor."""

    def __post_init__(self) -> None:
        """Raise `TypeError` for a name that is no string, and for a cut that is none."""
        if not isinstance(self.name, str):
            raise TypeError(f"a global tensor's name is a string; got {self.name!r:.80}")
        for cut in self.cuts:
            if not isinstance(cut, Cut | Padded | None):
                raise TypeError(f"{self.name!r} is cut by share, chunk, Cut, Padded or None; got {cut!r:.80}")


class Padding(msgspec.Struct, frozen=True):
    """Elements without a counterpart in any global tensor: `size` of them in a concatenation, or the rest of it."""

    size: int | None = None


class Concat(msgspec.Struct, frozen=True):
    """Its items, one after another in dimension `dim`. Make it with `concat`."""

    items: tuple["Node", ...]
    dim: int = 0

    def __post_init__(self) -> None:
        """Raise `ValueError` when there is no such dimension."""
        if self.dim < 0:
            raise ValueError(f"dim of a concatenation is {self.dim}; dimensions count from 0")


class Stack(msgspec.Struct, frozen=True):
    """One item for each of the values, along a new dimension in front; `{placeholder}` is the value."""

    placeholder: str
    values: tuple[int, ...]
    item: "Node"


Node = Tensor | Padding | Concat | Stack

AS_IT_IS: Final = Tensor(f"{{{WHOLE_NAME}}}")
"""The global tensor of the registered name, whole; its numbers are global ones."""


def tensor(name: str, *cuts: Cut | Padded | None) -> Tensor:
    """Return a global tensor, with a cut for each of its first dimensions."""
    return Tensor(name, cuts)


def concat(*items: Node, dim: int = 0) -> Concat:
    """Return a concatenation along dimension `dim`."""
    return Concat(items, dim)


def placeholders(node: object) -> frozenset[str]:
    """Return what must be known to fill the names in a node.

    Raises `TypeError` for what is no node, and `ValueError` for a name that is no template.
    """
    match node:
        case Tensor():
            return words(node.name)
        case Concat():
            return frozenset().union(*map(placeholders, node.items))
        case Stack():
            return placeholders(node.item) - {node.placeholder}
        case Padding():
            return frozenset()
        case _:
            raise TypeError(f"a tensor consists of tensor(…), concat(…), Stack(…) or Padding(…); got {node!r:.80}")


def lay_out(node: Node, shape: Shape, values: Mapping[str, object]) -> list[Part]:
    """Return the parts that a registered tensor of this shape consists of. Raises `Misfit`."""
    return list(_laid(node, _Box((), (0,) * len(shape), shape), values))


@dataclass(frozen=True, slots=True)
class _Box:
    """The place of a node: an index in each dimension of the stacks around it, then a box of the dimensions left."""

    stacked: Shape
    start: Shape
    shape: Shape

    def narrowed(self, dim: int, at: int, size: int) -> "_Box":
        """Return the box with `size` elements from its `at`-th on in one dimension."""
        start, shape = list(self.start), list(self.shape)
        start[dim] += at
        shape[dim] = size
        return _Box(self.stacked, tuple(start), tuple(shape))

    @property
    def whole_start(self) -> Shape:
        return self.stacked + self.start

    @property
    def whole_shape(self) -> Shape:
        return (1,) * len(self.stacked) + self.shape

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape


def _laid(node: Node, box: _Box, values: Mapping[str, object]) -> Iterator[Part]:
    match node:
        case Tensor():
            yield from _laid_tensor(node, box, values)
        case Padding():
            if not box.is_empty:
                yield padding(box.whole_start, box.whole_shape)
        case Concat():
            yield from _laid_concat(node, box, values)
        case Stack():
            yield from _laid_stack(node, box, values)


def _laid_tensor(node: Tensor, box: _Box, values: Mapping[str, object]) -> Iterator[Part]:
    name = filled(node.name, values)
    if len(node.cuts) > len(box.shape):
        raise Misfit(f"has {len(box.shape)} dimensions where {name!r} is cut in {len(node.cuts)}")
    sizes, offset = list(box.shape), [0] * len(box.shape)
    for dim, cut in enumerate(node.cuts):
        if cut is None:
            continue
        length, begin = _length_of(cut, box.shape[dim], dim, name)
        if length < box.shape[dim] and not box.is_empty:
            rest = box.narrowed(dim, length, box.shape[dim] - length)
            yield padding(rest.whole_start, rest.whole_shape)
        box = box.narrowed(dim, 0, length)
        sizes[dim], offset[dim] = cut.size, begin
    yield Part(name, tuple(sizes), tuple(offset), box.shape, box.whole_start, box.whole_shape)


def _length_of(cut: Cut | Padded, extent: int, dim: int, name: str) -> tuple[int, int]:
    """Return how many of the elements in a dimension are the tensor's, and where they begin in it."""
    if isinstance(cut, Cut):
        if extent != cut.length:
            raise Misfit(
                f"has {extent} elements in dimension {dim} for {name!r}, and should have {cut.length}: {cut.start} to "
                f"{cut.stop} of {cut.size}"
            )
        return cut.length, cut.start
    if extent * cut.ranks < cut.size:
        raise Misfit(
            f"has {extent} elements in dimension {dim} for {name!r}, too few for {cut.size} on {cut.ranks} ranks"
        )
    begin = min(cut.size, cut.rank * extent)
    return min(extent, cut.size - begin), begin


def _laid_concat(node: Concat, box: _Box, values: Mapping[str, object]) -> Iterator[Part]:
    if node.dim >= len(box.shape):
        raise Misfit(f"has {len(box.shape)} dimensions, and is put together along dimension {node.dim}")
    sizes = [_size(item, node.dim) for item in node.items]
    known = sum(size for size in sizes if size is not None)
    rest = box.shape[node.dim] - known
    if rest < 0 or (rest and None not in sizes):
        told = " + ".join("the rest" if size is None else str(size) for size in sizes)
        raise Misfit(f"has {box.shape[node.dim]} elements in dimension {node.dim}, and should have {told}")
    if rest and sizes.count(None) > 1:
        raise Misfit(
            f"has {rest} elements in dimension {node.dim} for {sizes.count(None)} items that don't say how many are "
            "theirs: cut all but one of them"
        )
    at = 0
    for item, size in zip(node.items, sizes, strict=True):
        length = rest if size is None else size
        yield from _laid(item, box.narrowed(node.dim, at, length), values)
        at += length


def _laid_stack(node: Stack, box: _Box, values: Mapping[str, object]) -> Iterator[Part]:
    if not box.shape or box.shape[0] != len(node.values):
        found = box.shape[0] if box.shape else 0
        raise Misfit(f"stacks {found} of {{{node.placeholder}}}, and this rank should have {len(node.values)}")
    for number, value in enumerate(node.values):
        inner = _Box((*box.stacked, box.start[0] + number), box.start[1:], box.shape[1:])
        yield from _laid(node.item, inner, {**values, node.placeholder: value})


def _size(node: Node, dim: int) -> int | None:
    """Return how many elements of a dimension a node takes, or None: the rest."""
    match node:
        case Padding():
            return node.size
        case Tensor():
            cut = node.cuts[dim] if dim < len(node.cuts) else None
            return cut.length if isinstance(cut, Cut) else None
        case Concat():
            sizes = [_size(item, dim) for item in node.items]
            if dim != node.dim:
                return next((size for size in sizes if size is not None), None)
            return None if None in sizes else sum(size for size in sizes if size is not None)
        case Stack():
            return len(node.values) if dim == 0 else _size(node.item, dim - 1)
