"""Compiles a destination layout and source layouts to a transfer program. Pure.

Each atom of the destination is cut where any source's box of the same tensor begins or ends, so that a cell lies wholly
in one box of every source that has some of it. The cuts depend on the edges of the boxes, and not on the tensor's name.
They are therefore computed once for all tensors, layers and readers with the same geometry (a tile *pattern*).

Invariant: every element of every destination atom is in exactly one cell, and each cell has a source. Where a region
has no source, `LayoutMismatch` names the tensor and the region, and there is no program.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout
from tensorhub_common.layout.parts import Shape
from tensorhub_common.layout.quantized import quantized_kind
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import UNREAD_MAX, Cell, TensorGroup, TransferProgram
from tensorhub_planner.compiler.boxes import BoxGeometry
from tensorhub_planner.compiler.fp8_blocks import MissingSource
from tensorhub_planner.compiler.layout_index import TENSORS_TOLD_MAX, LayoutIndex, TensorSources, _Chosen, _kind_of
from tensorhub_planner.compiler.tiling import MissingRegion, TilePattern
from tensorhub_planner.primitives.piece_sizes import PieceSizes


def compile_program(digest: str, destination: Layout, sources: LayoutIndex) -> TransferProgram:
    """Return how a shard of this layout is filled from sources of those.

    Raises `LayoutMismatch` that names what no source has: tensors, and the region of the first gap of each.
    """
    lot = spread_seed(digest)
    names, at, cutouts = sources.cutouts.atoms(destination)
    tensors = [*map(sources.tensors.get, names)]
    places = tuple([tensor.at for tensor in tensors if tensor is not None])
    if len(places) < len(names):
        raise _refusal(names, cutouts, tensors, sources, lot)
    groups = []
    for first, cutout, to, pick in sources.groupings.of(
        at, cutouts, [each.kind for each in tensors if each is not None]
    ):
        tensor = tensors[first]
        assert tensor is not None
        chosen = _chosen_of(names[first], cutout, tensor, sources, lot)
        if isinstance(chosen, MissingRegion):
            raise _refusal(names, cutouts, tensors, sources, lot)
        groups.append(_Grouped(chosen.pattern, chosen.take(tensor.sources), to, chosen.places(tensor, pick(places))))
    taken = set(names)
    left_out = tuple(islice((name for name in sources.tensors if name not in taken), UNREAD_MAX))
    return _program(digest, sources, groups, left_out, len(sources.tensors) - len(taken))


def _refusal(
    names: Sequence[str],
    cutouts: Sequence[int],
    tensors: Sequence[TensorSources | None],
    sources: LayoutIndex,
    lot: int,
) -> LayoutMismatch:
    """Return what says which tensors there are none of, or not all of."""
    wrong: list[str] = []
    for name, cutout, tensor in zip(names, cutouts, tensors, strict=True):
        chosen = MissingRegion((), ()) if tensor is None else _chosen_of(name, cutout, tensor, sources, lot)
        if isinstance(chosen, MissingRegion):
            wrong.append(_lack(name, sources.cutouts[cutout], tensor, chosen, sources))
    more = f", and {len(wrong) - TENSORS_TOLD_MAX} more tensors" if len(wrong) > TENSORS_TOLD_MAX else ""
    return LayoutMismatch("; ".join(wrong[:TENSORS_TOLD_MAX]) + more)


def _chosen_of(
    name: str, cutout: int, tensor: TensorSources, sources: LayoutIndex, lot: int
) -> "_Chosen | MissingRegion":
    try:
        return sources.chosen(cutout, tensor.alike, lot)
    except LayoutMismatch as why:
        raise LayoutMismatch(f"tensor {name!r} {why}") from None


class _Grouped(NamedTuple):
    """A group that is being made."""

    pattern: TilePattern
    sources: tuple[int, ...]
    to: tuple[int, ...]
    at: tuple[tuple[int, ...], ...]


def _program(
    digest: str, index: LayoutIndex, grouped: Sequence[_Grouped], unread: tuple[str, ...], unread_count: int
) -> TransferProgram:
    """Number the patterns, and the sources that are used."""
    lists = {group.sources for group in grouped}
    used = sorted(set().union(*lists))
    number = dict(zip(used, range(len(used)), strict=True))
    numbered = {sources: tuple(map(number.__getitem__, sources)) for sources in lists}
    patterns: dict[int, int] = {}
    cells: list[tuple[Cell, ...]] = []
    groups = []
    table = 0
    for group in grouped:
        pattern = patterns.setdefault(id(group.pattern), len(cells))
        if pattern == len(cells):
            cells.append(group.pattern.cells)
        table_bytes = group.pattern.table_bytes
        groups.append(TensorGroup(pattern, numbered[group.sources], group.to, group.at, table, table_bytes))
        table += table_bytes * len(group.to)
    layouts = tuple(index.layouts[source] for source in used)
    return TransferProgram(digest, layouts, tuple(cells), tuple(groups), unread, unread_count)


def _lack(name: str, cutout: BoxGeometry, tensor: TensorSources | None, gap: MissingRegion, index: LayoutIndex) -> str:
    if tensor is not None and index.fits(cutout, tensor):
        if gap.lacking is not None:
            return _lacks_parts(name, cutout, gap, gap.lacking)
        return f"no holder has {region(gap.start, gap.stop)} of {name!r}{f' as {cutout.cast}' if cutout.cast else ''}"
    return f"{name!r} is {_kind_of(cutout)} here, and with the holders there is {index.told(name)}"


def _lacks_parts(name: str, cutout: BoxGeometry, gap: MissingRegion, lacking: MissingSource) -> str:
    needed = region(*quantized_kind(cutout.cast).need(gap.start, gap.stop, cutout.global_shape))
    return (
        f"{region(gap.start, gap.stop)} of {name!r} as {cutout.cast} is computed of {needed}, and no holder has "
        f"{region(*lacking)} of {name!r}"
    )


def spread_seed(digest: str) -> int:
    """Return a number that differs from reader to reader: the lot by which they take different sources of many."""
    return int.from_bytes(digest[:8].encode())


def region(start: Shape, stop: Shape) -> str:
    """Write a box as a slice: "[0:4, 8:16]"."""
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(start, stop, strict=True))}]"


class CompiledProgram(NamedTuple):
    """A program, its digest, and the sizes of its units."""

    digest: str
    execution: NumberedProgram
    sizes: PieceSizes
    names: tuple[str, ...] | None = None
    """The global tensors that its layout has; None where it reads all that there are, or was compiled elsewhere."""
