"""Programs held against every element by itself: it is in one cell, and lies where each owner of that says."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of, placements
from tensorhub_common.layout.parts import Part, Shape, padding
from tensorhub_common.programs.program import TransferProgram
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex

OWNERS_MAX, FIRST_OWNERS = 8, 2
"""A cell names so many of its sources at most, and these first ones of them always."""

Element = tuple[str, Shape]
"""A global tensor, and an index of it."""
Place = tuple[str, int]
"""A source, and a byte of it."""


def ahead(index: Shape, strides: Shape) -> int:
    """Return how many bytes an element lies behind the first one."""
    return sum(i * stride for i, stride in zip(index, strides, strict=True))


def bytes_of(layout: Layout) -> Iterator[tuple[Element, int]]:
    """Yield what a layout has of global tensors, and the byte where each element begins."""
    for entry, begin in zip(layout.tensors, placements(layout), strict=True):
        strides = tuple(entry.itemsize * prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape)))
        whole = Part(entry.name, entry.global_shape, entry.offset, entry.shape, (0,) * len(entry.shape), entry.shape)
        for part in entry.parts or (whole,):
            here = product(*map(range, part.start, part.stop))
            there = product(*(range(a, a + size) for a, size in zip(part.offset, part.extent, strict=True)))
            for local, index in zip(here, there, strict=True) if part.name else ():
                yield (part.name, index), begin + ahead(local, strides)


def told_by(program: TransferProgram) -> Iterator[tuple[int, list[Place]]]:
    """Yield the byte of each element of each cell, and where its owners have it."""
    for group in program.groups:
        for (tensor, to), cell in product(enumerate(group.to), program.patterns[group.pattern]):
            boxes = [
                (program.sources[group.sources[owner.box]], group.begin(tensor, owner.box) + owner.ahead, owner.strides)
                for owner in cell.owners
            ]
            for index in product(*map(range, cell.cut.shape)):
                its = [(source, begin + ahead(index, strides)) for source, begin, strides in boxes]
                yield to + cell.to + ahead(index, cell.cut.to_strides), its


def check(program: TransferProgram, reader: Layout, sources: Mapping[str, Layout]) -> None:
    """Hold a program against each element of its layouts."""
    there: dict[Element, list[Place]] = {}
    for source, layout in sources.items():
        for element, at in bytes_of(layout):
            there.setdefault(element, []).append((source, at))
    here, told = [*bytes_of(reader)], [*told_by(program)]
    assert sorted(to for to, _ in told) == sorted(at for _, at in here), "each element is in one cell"
    by_byte = dict(told)
    for element, at in here:
        owners, having = by_byte[at], there[element]
        assert owners == [each for each in having if each in owners], "they have it, and are in the order of sources"
        assert owners[:FIRST_OWNERS] == having[:FIRST_OWNERS]
        assert len(owners) <= OWNERS_MAX
        assert len(having) > OWNERS_MAX or owners == having


WHOLE = (4, 3)
PARTS_OF_IT = [((0, 0), WHOLE), ((0, 0), (2, 3)), ((2, 0), WHOLE), ((0, 1), WHOLE), ((1, 1), (3, 2))]


def box(name: str, start: Shape, stop: Shape, whole: Shape = WHOLE) -> TensorEntry:
    return TensorEntry(name, "int16", 2, tuple(b - a for a, b in zip(start, stop, strict=True)), whole, start)


SHARDS = st.dictionaries(st.sampled_from("abcdez"), st.sampled_from(PARTS_OF_IT), max_size=5).map(
    lambda boxes: layout_of(box(name, *its) for name, its in boxes.items())
)
RANKS = st.permutations("bcde").flatmap(
    lambda experts: st.sampled_from(PARTS_OF_IT).map(
        lambda its: layout_of([box("a", *its), *(box(each, (0, 0), WHOLE) for each in experts[:2]), box("z", *its)])
    )
)
ALL = layout_of(box(name, (0, 0), WHOLE) for name in "abcdez")
SOME_OR_ALL = st.sampled_from([(), (ALL,)])


@given(st.lists(SHARDS, min_size=1, max_size=3), st.lists(SHARDS | RANKS, max_size=2 * OWNERS_MAX), SOME_OR_ALL)
def test_each_element_is_in_one_cell_and_lies_where_its_owners_say(
    readers: Sequence[Layout], layouts: Sequence[Layout], rest: Sequence[Layout]
) -> None:
    """For readers of all lots, by one index; what nobody has is refused."""
    sources = {f"s{number:02}": layout for number, layout in enumerate([*layouts, *rest])}
    index, there = LayoutIndex(sources), {element for layout in sources.values() for element, _ in bytes_of(layout)}
    for lot, reader in product(range(3), readers):
        if {element for element, _ in bytes_of(reader)} <= there:
            check(compile_program(f"{lot:08}", reader, index), reader, sources)
        else:
            with pytest.raises(LayoutMismatch):
                compile_program(f"{lot:08}", reader, index)


@pytest.mark.parametrize("ranks", [["abz", "acz"], ["abz", "acz", "b"], ["abz", "acz", "bcz"]])
def test_experts_between_what_ranks_have_alike_lie_where_each_rank_has_them(ranks: list[str]) -> None:
    """Also those that another one has at another place."""
    sources = {names: layout_of(box(name, (0, 0), (len(ranks), 3)) for name in names) for names in ranks}
    reader = layout_of(box(name, (0, 0), (2, 3)) for name in sorted(set("".join(ranks))))
    check(compile_program("reader", reader, LayoutIndex(sources)), reader, sources)


def tensor(name: str, shape: Shape, *parts: Part) -> TensorEntry:
    return TensorEntry(name, "int16", 2, shape, shape, (0,) * len(shape), parts)


FUSED = layout_of(
    [
        tensor(
            "fused",
            (5, 5),
            Part("u", (5, 2), (0, 0), (5, 2), (0, 0), (5, 2)),
            Part("v", (4, 6), (0, 3), (4, 3), (1, 2), (4, 3)),
            padding((0, 2), (1, 3)),
        ),
        box("empty", (0, 0), (0, 3)),
        box("plain", (0, 0), WHOLE),
        tensor("scalar", ()),
        tensor("scalars", (2,), *(Part(f"s{at}", (), (), (), (at,), (1,)) for at in (0, 1))),
        tensor("stacked", (2, 2, 3), *(Part("yz"[at], (2, 3), (0, 0), (2, 3), (at, 0, 0), (1, 2, 3)) for at in (0, 1))),
        tensor("unstacked", (2, 3), Part("x", (4, 2, 3), (1, 0, 0), (1, 2, 3), (0, 0), (2, 3))),
    ]
)
"""Of each kind of entry one: parts beside padding, without an element, and of more or fewer dimensions there."""

SEPARATE = layout_of(
    [
        box("plain", (0, 0), WHOLE),
        *(tensor(name, ()) for name in ("s0", "s1", "scalar")),
        box("u", (0, 0), (5, 2), (5, 2)),
        box("v", (0, 3), (4, 6), (4, 6)),
        box("x", (1, 0, 0), (2, 2, 3), (4, 2, 3)),
        *(tensor(name, (2, 3)) for name in "yz"),
    ]
)
"""The same tensors, each by itself."""


@pytest.mark.parametrize(("reader", "source"), [(FUSED, SEPARATE), (SEPARATE, FUSED), (FUSED, FUSED)])
def test_parts_of_tensors_lie_where_the_tensors_have_them(reader: Layout, source: Layout) -> None:
    program = compile_program("reader", reader, LayoutIndex({"a": source}))
    check(program, reader, {"a": source})
    assert program.unread_count == 0


@pytest.mark.parametrize("odd", [7, 33])
def test_readers_of_each_lot_have_cells_that_lie_as_their_own_owners_do(odd: int) -> None:
    """Of 32 that have a matrix, of which some lack its first row, in no order."""
    sources = {
        f"s{number:02}": layout_of([box("w", (0 if (number + 1) % odd else 1, 0), WHOLE)]) for number in range(32)
    }
    index, reader = LayoutIndex(sources), layout_of([box("w", (1, 0), (3, 3))])
    programs = [compile_program(f"{lot:08}", reader, index) for lot in range(10)]
    for program in programs:
        check(program, reader, sources)
    assert {source for program in programs for source in program.sources} == set(sources)
