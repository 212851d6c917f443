"""Compiles a destination layout and the source layouts that there are to a transfer program. Pure.

Each atom of the destination is cut where any source's box of the same tensor begins or ends, so that a cell lies wholly
in one box of every source that has some of it. How a box is cut depends on where boxes begin and end, and not on the
tensor's name: so that is worked out once for all tensors, layers and readers that are cut alike (a *pattern*).

Always true: every element of every destination atom is in exactly one cell, and each cell has a source; where one has
none `LayoutMismatch` names the tensor and the region, and there is no program.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout
from tensorhub_common.layout.parts import Shape
from tensorhub_common.layout.quantized import derived
from tensorhub_common.programs.numbered_program import Patterns
from tensorhub_common.programs.program import UNREAD_MAX, Cell, Group, Program
from tensorhub_planner.compiler.boxes import Cutout, Cutouts
from tensorhub_planner.compiler.fp8_blocks import Lacking
from tensorhub_planner.compiler.grouping import Groupings, picking
from tensorhub_planner.compiler.layout_index import Joined, Tensor
from tensorhub_planner.compiler.overlaps import converts
from tensorhub_planner.compiler.tiling import Gap, Grid, Pattern, cut_up, lots, pattern_of

TENSORS_TOLD_MAX: Final = 4
"""A refusal names so many tensors; the others are counted."""

PATTERNS_MAX: Final = 100_000
"""So many patterns are kept; then all are forgotten, and worked out again when they are wanted."""

GRIDS_MAX: Final = 256
"""And so many grids, of which readers with unlike lots make their patterns."""

ANY_LOT: Final = -1
"""A pattern of which every cell has all of its owners is the same for every reader."""


class SourceIndex:
    """The atoms of several source layouts, by tensor. Made once for a set of layouts, and used for all readers."""

    def __init__(self, layouts: Mapping[str, Layout], originals: Collection[str] = ()) -> None:
        """Take the layouts by digest; their order decides in which order a program's units stand.

        `originals` are those in which the version was published: what stands in them may be cast.
        """
        self.layouts = tuple(layouts)
        self.cutouts = Cutouts()
        self.groupings = Groupings()
        self.executed = Patterns()
        """What its programs' executions know of patterns."""
        self._patterns: dict[tuple[int, int, int], _Chosen | Gap] = {}
        self._grids: dict[tuple[int, int], Grid | Gap] = {}
        published = frozenset(originals)
        joined = Joined([self.cutouts.atoms(each, is_original=name in published) for name, each in layouts.items()])
        self.tensors, self._lists = joined.tensors, joined.lists
        self._lots = [lots(len(boxes)) for boxes in self._lists]

    def chosen(self, cutout: int, alike: int, lot: int) -> "_Chosen | Gap":
        """Return how an atom of this cutout is made up of boxes that are cut like those."""
        known = self._patterns.get((cutout, alike, ANY_LOT))
        if known is not None:
            return known
        # Readers that take the same ones of many sources share a pattern; where there are few, all readers do.
        key = (cutout, alike, lot % self._lots[alike])
        known = self._patterns.get(key)
        if known is None:
            if len(self._patterns) >= PATTERNS_MAX:
                self._patterns.clear()
            grid = self._grid(cutout, alike)
            known = grid if isinstance(grid, Gap) else _chosen(pattern_of(self.cutouts[cutout], grid, key[2]))
            is_for_all = isinstance(known, Gap) or known.pattern.is_for_all
            self._patterns[(cutout, alike, ANY_LOT) if is_for_all else key] = known
        return known

    def _grid(self, cutout: int, alike: int) -> Grid | Gap:
        """Return a grid that other lots may have asked for before."""
        known = self._grids.get((cutout, alike))
        if known is None:
            if len(self._grids) >= GRIDS_MAX:
                self._grids.clear()
            known = self._grids[cutout, alike] = cut_up(self.cutouts[cutout], self._lists[alike], self.cutouts)
        return known

    def fits(self, cutout: Cutout, tensor: Tensor) -> bool:
        """Tell whether any box is of the same global tensor, and of a dtype that can be converted."""
        boxes = (self.cutouts[each] for each in self._lists[tensor.alike])
        return any(box.global_shape == cutout.global_shape and converts(box, cutout) is not None for box in boxes)

    def told(self, name: str) -> str:
        """Say what there is under a name."""
        tensor = self.tensors.get(name)
        boxes = () if tensor is None else (self.cutouts[each] for each in self._lists[tensor.alike])
        some = dict.fromkeys(_kind_of(box) for box in boxes)
        return " and ".join(list(some)[:TENSORS_TOLD_MAX]) or "nothing of that name"


def compile_program(digest: str, destination: Layout, sources: SourceIndex) -> Program:
    """Return how a shard of this layout is filled from sources of those.

    Raises `LayoutMismatch` that names what no source has: tensors, and the region of the first gap of each.
    """
    lot = hash_of(digest)
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
        if isinstance(chosen, Gap):
            raise _refusal(names, cutouts, tensors, sources, lot)
        groups.append(_Grouped(chosen.pattern, chosen.take(tensor.sources), to, chosen.places(tensor, pick(places))))
    taken = set(names)
    left_out = tuple(islice((name for name in sources.tensors if name not in taken), UNREAD_MAX))
    return _program(digest, sources, groups, left_out, len(sources.tensors) - len(taken))


def _refusal(
    names: Sequence[str], cutouts: Sequence[int], tensors: Sequence[Tensor | None], sources: SourceIndex, lot: int
) -> LayoutMismatch:
    """Return what says which tensors there are none of, or not all of."""
    wrong: list[str] = []
    for name, cutout, tensor in zip(names, cutouts, tensors, strict=True):
        chosen = Gap((), ()) if tensor is None else _chosen_of(name, cutout, tensor, sources, lot)
        if isinstance(chosen, Gap):
            wrong.append(_lack(name, sources.cutouts[cutout], tensor, chosen, sources))
    more = f", and {len(wrong) - TENSORS_TOLD_MAX} more tensors" if len(wrong) > TENSORS_TOLD_MAX else ""
    return LayoutMismatch("; ".join(wrong[:TENSORS_TOLD_MAX]) + more)


def _chosen_of(name: str, cutout: int, tensor: Tensor, sources: SourceIndex, lot: int) -> "_Chosen | Gap":
    try:
        return sources.chosen(cutout, tensor.alike, lot)
    except LayoutMismatch as why:
        raise LayoutMismatch(f"tensor {name!r} {why}") from None


class _Chosen(NamedTuple):
    """A pattern, and what its boxes are of those that there are of a tensor."""

    pattern: Pattern
    take: Callable[[tuple[int, ...]], tuple[int, ...]]
    """Takes what it has out of a column of all boxes."""
    are_first: bool
    """They are the first ones that there are, in their order."""

    def places(self, tensor: Tensor, at: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """Return where its boxes begin, of tensors that are all of one kind, and begin there."""
        takes_all = self.are_first and len(self.pattern.boxes) == len(tensor.sources)
        if takes_all or max(map(len, at)) == 1:
            return at
        return tuple([each if len(each) == 1 else self.take(each) for each in at])


def _chosen(pattern: Pattern) -> _Chosen:
    boxes = pattern.boxes
    return _Chosen(pattern, picking(boxes), boxes == tuple(range(len(boxes))))


class _Grouped(NamedTuple):
    """A group that is being made."""

    pattern: Pattern
    sources: tuple[int, ...]
    to: tuple[int, ...]
    at: tuple[tuple[int, ...], ...]


def _program(
    digest: str, index: SourceIndex, grouped: Sequence[_Grouped], unread: tuple[str, ...], unread_count: int
) -> Program:
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
        groups.append(Group(pattern, numbered[group.sources], group.to, group.at, table, table_bytes))
        table += table_bytes * len(group.to)
    layouts = tuple(index.layouts[source] for source in used)
    return Program(digest, layouts, tuple(cells), tuple(groups), unread, unread_count)


def _lack(name: str, cutout: Cutout, tensor: Tensor | None, gap: Gap, index: SourceIndex) -> str:
    if tensor is not None and index.fits(cutout, tensor):
        if gap.lacking is not None:
            return _lacks_parts(name, cutout, gap, gap.lacking)
        return f"no holder has {region(gap.start, gap.stop)} of {name!r}{f' as {cutout.cast}' if cutout.cast else ''}"
    return f"{name!r} is {_kind_of(cutout)} here, and with the holders there is {index.told(name)}"


def _lacks_parts(name: str, cutout: Cutout, gap: Gap, lacking: Lacking) -> str:
    needed = region(*derived(cutout.cast).need(gap.start, gap.stop, cutout.global_shape))
    return (
        f"{region(gap.start, gap.stop)} of {name!r} as {cutout.cast} is computed of {needed}, and no holder has "
        f"{region(*lacking)} of {name!r}"
    )


def _kind_of(cutout: Cutout) -> str:
    cast = f" ({cutout.cast})" if cutout.cast else ""
    return f"{cutout.dtype}{cast} of global shape {list(cutout.global_shape)}"


def hash_of(digest: str) -> int:
    """Return a number that differs from reader to reader: the lot by which they take different sources of many."""
    return int.from_bytes(digest[:8].encode(), "big")


def region(start: Shape, stop: Shape) -> str:
    """Write a box as a slice: "[0:4, 8:16]"."""
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(start, stop, strict=True))}]"
