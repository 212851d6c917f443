"""What layouts have alike is found once, and is what each of them has by itself: boxes, tensors of them, and groups."""

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of, placements
from tensorhub_common.layout.parts import Part, padding
from tensorhub_planner.compiler import boxes, memo
from tensorhub_planner.compiler.boxes import BoxGeometry, GeometryTable, LayoutBoxes
from tensorhub_planner.compiler.layout_index import GroupingCache, TensorIndex, TensorSources
from tensorhub_planner.compiler.memo import SAMPLE, BoundedMemo, LookupBudget

Columns = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def of(*each: tuple[str, int, int]) -> LayoutBoxes:
    return LayoutBoxes(*zip(*each, strict=True)) if each else LayoutBoxes((), (), ())


BOXES = st.tuples(st.sampled_from(["n", "o", "e1", "e2", "e3", "e4", "e5"]), st.integers(0, 2), st.integers(0, 2))
ANY = st.lists(BOXES, max_size=4).map(lambda some: of(*some))
RANKS = st.lists(BOXES, min_size=2, max_size=2).map(lambda its: of(("a", 0, 1), *its, ("z", 9, its[0][2])))


@given(st.lists(ANY | RANKS, max_size=8))
def test_a_tensor_has_the_boxes_of_all_layouts_in_their_order(layouts: list[LayoutBoxes]) -> None:
    each: dict[str, list[tuple[int, int, int]]] = {}
    for source, some in enumerate(layouts):
        for name, place, number in zip(*some, strict=True):
            each.setdefault(name, []).append((source, place, number))
    index, kinds = TensorIndex(layouts), dict[int, tuple[tuple[int, ...], tuple[int, ...]]]()
    assert index.tensors.keys() == each.keys()
    for name, its in each.items():
        sources, at, cutouts = zip(*its, strict=True)
        tensor = index.tensors[name]
        assert (tensor.sources, index.lists[tensor.alike]) == (sources, cutouts)
        assert tensor.at == (at if len(set(at)) > 1 else at[:1])
        assert kinds.setdefault(tensor.kind, (sources, cutouts)) == (sources, cutouts)
    assert len(set(kinds.values())) == len(kinds), "tensors that are alike are of one kind"
    assert len(set(index.lists)) == len(index.lists)


def test_ranks_that_differ_in_their_experts_alone_share_what_they_have_alike() -> None:
    ranks = [
        of(("a", 0, 1), (f"e{rank}", 4, 2), (f"f{rank}", 6, 2), (f"g{rank}", 7, 5), ("z", 8, 3)) for rank in range(4)
    ]
    index = TensorIndex([*ranks, *(of(("a", 0, 1), (f"h{rank}", 4, 2), ("y", 6, 3)) for rank in range(3))])
    tensors = index.tensors
    assert tensors["a"].sources == (0, 1, 2, 3, 4, 5, 6)
    assert tensors["z"] == TensorSources(tensors["z"].kind, tensors["z"].alike, (0, 1, 2, 3), (8,))
    assert tensors["e2"].kind == tensors["f2"].kind
    assert len({tensors[f"{each}2"].kind for each in "efgh"} | {tensors["e1"].kind}) == 4
    assert [index.lists[tensors[each].alike] for each in ("e1", "e2", "g2", "h2")] == [(2,), (2,), (5,), (2,)]
    assert tensors["e2"].sources is tensors["g2"].sources
    assert tensors["e2"].at is tensors["h1"].at


ATOMS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 3)), max_size=5)
LAYOUTS = st.lists(ATOMS.map(lambda atoms: tuple(zip(*atoms, strict=True)) or ((), (), ())), max_size=8)


@given(LAYOUTS)
def test_atoms_of_one_cutout_and_one_kind_are_a_group(layouts: list[Columns]) -> None:
    """Whatever was asked for before; kinds may have any numbers."""
    groupings = GroupingCache()
    for at, cutouts, kinds in [*layouts, *layouts]:
        expected: dict[tuple[int, int], list[int]] = {}
        for number, both in enumerate(zip(cutouts, kinds, strict=True)):
            expected.setdefault(both, []).append(number)
        found = groupings.of(at, cutouts, kinds)
        numbers = [tuple(each) for each in expected.values()]
        assert [(each.cutout, each.first, each.pick(range(len(at)))) for each in found] == [
            (cutout, its[0], its if len(its) > 1 else range(its[0], its[0] + 1))
            for (cutout, _), its in zip(expected, numbers, strict=True)
        ]
        assert [each.to for each in found] == [each.pick(at) for each in found]
        assert groupings.of(at, cutouts, [kind + 7 for kind in kinds]) is found or not at


# -------------------------------------------------------------------------------------------------------------- boxes


def test_boxes_begin_where_the_segment_has_them() -> None:
    """Whole ones, empty ones, padding and parts, in turn; a part may have more dimensions there or here."""
    half = Part("v", (4, 6), (0, 3), (4, 3), (1, 2), (4, 3))
    fused = (Part("u", (5, 2), (0, 0), (5, 2), (0, 0), (5, 2)), half, padding((0, 2), (1, 3)))
    expert = Part("stack", (8, 5, 6), (5, 0, 0), (1, 5, 6), (0, 0), (5, 6))
    stacked = (Part("m0", (4, 6), (0, 0), (4, 6), (0, 0, 0), (1, 4, 6)), Part("m1", (), (), (), (1, 0, 0), (1, 1, 1)))
    layout = layout_of(
        [
            TensorEntry("a", "int16", 2, (3, 5), (6, 5), (3, 0)),
            TensorEntry("b", "int16", 2, (0, 5), (6, 5), (3, 0)),
            TensorEntry("c", "int16", 2, (5, 5), (5, 5), (0, 0), fused),
            TensorEntry("d", "int16", 2, (3, 5), (6, 5), (3, 0)),
            TensorEntry("e", "int16", 2, (), (), ()),
            TensorEntry("f", "int16", 2, (5, 6), (5, 6), (0, 0), (expert,)),
            TensorEntry("g", "int16", 2, (3, 5), (6, 5), (0, 0)),
        ]
    )
    table = GeometryTable()
    found = table.atoms(layout)
    at = dict(zip((entry.name for entry in layout.tensors), placements(layout), strict=True))
    assert found.names == ("a", "u", "v", "d", "e", "stack", "g")
    assert found.at == (at["a"], at["c"], at["c"] + 7 * 2, at["d"], at["e"], at["f"], at["g"])
    cutouts = dict(zip(found.names, found.cutouts, strict=True))
    assert cutouts["a"] == cutouts["d"] != cutouts["g"]
    assert len(table) == 6
    assert {name: table[cutouts[name]] for name in ("a", "v", "e", "stack")} == {
        "a": BoxGeometry("int16", 2, (6, 5), (3, 0), (6, 5), (10, 2)),
        "v": BoxGeometry("int16", 2, (4, 6), (0, 3), (4, 6), (10, 2)),
        "e": BoxGeometry("int16", 2, (), (), (), ()),
        "stack": BoxGeometry("int16", 2, (8, 5, 6), (5, 0, 0), (6, 5, 6), (0, 12, 2)),
    }
    two = table.atoms(Layout((TensorEntry("s", "int16", 2, (2, 4, 6), (2, 4, 6), (0, 0, 0), stacked),)))
    assert (two.at, table[two.cutouts[1]]) == ((0, 4 * 6 * 2), BoxGeometry("int16", 2, (), (), (), ()))


def test_what_is_remembered_of_entries_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are found all the same, as originals, which are other cutouts, and not."""
    monkeypatch.setattr(boxes, "ROWS_MAX", 2)
    layouts = [
        layout_of([TensorEntry(name, "int16", 2, (3, 50 * n), (6, 50 * n), (at, 0)) for n, name in enumerate(names, 1)])
        for names, at in (("abc", 0), ("bcd", 0), ("a", 3), ("", 0), ("abc", 0))
    ]
    table = GeometryTable()
    for is_original in (False, True, False):
        for layout in layouts:
            found = table.atoms(layout, is_original=is_original)
            assert (found.names, [*found.at]) == (tuple(entry.name for entry in layout.tensors), placements(layout))
            for number, entry in zip(found.cutouts, layout.tensors, strict=True):
                cutout = table[number]
                assert (cutout.start, cutout.global_shape) == (entry.offset, entry.global_shape)
                assert cutout.is_original == is_original
    assert len(table) == 2 * len({(each.offset, each.shape) for layout in layouts for each in layout.tensors})
    one = table.atoms(layouts[0])
    for entries in (layouts[1], layout_of([*layouts[1].tensors, TensorEntry("e", "int16", 2, (3, 9), (6, 9), (0, 0))])):
        other = table.atoms(entries)
        assert (other.at[:3], other.cutouts[:3]) == (one.at, one.cutouts)


def test_what_is_known_of_entries_is_not_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of those that differ in their names alone either; where they begin is one list for all that are as large."""
    whole = mock.Mock(wraps=boxes._of_whole)
    monkeypatch.setattr(boxes, "_of_whole", whole)
    monkeypatch.setattr(boxes, "ROWS_MAX", 3)

    def rows(names: str, at: int = 0) -> Layout:
        return layout_of([TensorEntry(name, "int16", 2, (3, n), (6, n), (at, 0)) for n, name in enumerate(names, 1)])

    table = GeometryTable()
    table._trials = LookupBudget(3)
    one = table.atoms(rows("abc"))
    kind = mock.Mock(wraps=table._kind)
    monkeypatch.setattr(table, "_kind", kind)
    assert table.atoms(rows("abc")) == one
    assert kind.call_count == 0
    other = table.atoms(rows("bcd"))
    assert (kind.call_count, whole.call_count) == (3, 3)
    assert (other.at is one.at, other.cutouts is one.cutouts) == (True, True)
    below = table.atoms(rows("abc", at=3))
    assert (below.at is one.at, below.cutouts) == (True, (3, 4, 5))
    unlike = GeometryTable()
    unlike._trials = LookupBudget(3)
    assert [len((unlike.atoms(rows(names)), unlike._rows[False])[1]) for names in ("abc", "bcd")] == [3, 3], "no trials"


# --------------------------------------------------------------------------------------------------------------- memo


def test_so_many_places_are_remembered_or_one_longer_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "PLACES_MAX", 4)
    known, kept = BoundedMemo[str, str](), []
    assert known.places == 0
    for key in ("a", "bbb", "cc", "dd", "eeeee", "f"):
        assert known.get(key) is None
        assert known.keep(key, len(key), key.upper()) == key.upper()
        kept.append([each for each in ("a", "bbb", "cc", "dd", "eeeee", "f") if known.get(each) == each.upper()])
        assert known.places == len("".join(kept[-1]))
    assert kept == [["a"], ["a", "bbb"], ["cc"], ["cc", "dd"], ["eeeee"], ["f"]]


def test_trials_are_used_up_and_earned_and_without_them_a_sample_of_all_decides() -> None:
    """No more than it began with, and no debts."""
    trials, looked = LookupBudget(10), list[int]()

    def look(each: int) -> bool:
        looked.append(each)
        return False

    for known, unknown, left in ((0, 0, 10), (0, 8, 2), (5, 1, 6), (1000, 0, 10), (0, 1000, 0), (1, 0, 1), (0, 1, 0)):
        trials.count(known, unknown)
        assert [trials.pays(range(size), lambda _: False) for size in (left, left + 1)] == [True, False]
    for size in (1, 5, SAMPLE, SAMPLE + 1, 1000):
        assert trials.pays(range(size), lambda _: True)
        assert not trials.pays(range(size), look)
    assert len(looked) <= 5 * SAMPLE
    assert looked[-1] > 900
    assert trials.pays(range(100), lambda each: each >= 40)
    assert not trials.pays(range(100), lambda each: each >= 60)
    assert not trials.pays(range(SAMPLE), lambda each: each < SAMPLE // 2)
    assert trials.pays(range(SAMPLE), lambda each: each <= SAMPLE // 2)
