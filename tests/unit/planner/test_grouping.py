"""Which atoms make up a group: found once for layouts whose atoms go together alike."""

from hypothesis import given
from hypothesis import strategies as st

from tensorhub_planner.compiler.layout_index import GroupingCache

Columns = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

ATOMS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 3)), max_size=5)
LAYOUTS = st.lists(ATOMS.map(lambda atoms: tuple(zip(*atoms, strict=True)) or ((), (), ())), max_size=8)


@given(LAYOUTS)
def test_atoms_of_one_cutout_and_one_kind_are_a_group(layouts: list[Columns]) -> None:
    """Whatever was asked for before: the groups stand in the order of their first atoms, and have all of them."""
    groupings = GroupingCache()
    for at, cutouts, kinds in [*layouts, *layouts]:
        expected: dict[tuple[int, int], list[int]] = {}
        for number, both in enumerate(zip(cutouts, kinds, strict=True)):
            expected.setdefault(both, []).append(number)
        found = groupings.of(at, cutouts, kinds)
        assert [(each.first, each.cutout) for each in found] == [
            (numbers[0], cutout) for (cutout, _), numbers in expected.items()
        ]
        assert [each.pick(tuple(range(len(at)))) for each in found] == [tuple(numbers) for numbers in expected.values()]
        assert [each.to for each in found] == [each.pick(at) for each in found]


def test_kinds_may_have_any_numbers() -> None:
    """Each rank has experts that other sources have: nevertheless it is one object."""
    groupings = GroupingCache()
    one = groupings.of((0, 256, 512), (4, 4, 4), (7, 9, 7))
    assert groupings.of((0, 256, 512), (4, 4, 4), (8, 3, 8)) is one
    assert groupings.of((0, 256, 512), (4, 4, 4), (8, 8, 3)) is not one
    assert groupings.of((0, 256, 768), (4, 4, 4), (8, 3, 8)) is not one
    assert groupings.of((0, 256, 512), (4, 4, 5), (8, 3, 8)) is not one
