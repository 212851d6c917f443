"""Atoms joined by tensor: as if each was looked at by itself, whatever ranks have alike."""

from hypothesis import given
from hypothesis import strategies as st

from tensorhub_planner.compiler.boxes import LayoutBoxes
from tensorhub_planner.compiler.layout_index import TensorIndex, TensorSources

Box = tuple[int, int, int]


def one_by_one(layouts: list[LayoutBoxes]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return each tensor's sources, places and cutouts."""
    boxes: dict[str, list[Box]] = {}
    for source, atoms in enumerate(layouts):
        for name, at, cutout in zip(*atoms, strict=True):
            boxes.setdefault(name, []).append((source, at, cutout))
    return {name: tuple(zip(*its, strict=True)) for name, its in boxes.items()}


def atoms_of(*boxes: tuple[str, int, int]) -> LayoutBoxes:
    return LayoutBoxes(*zip(*boxes, strict=True)) if boxes else LayoutBoxes((), (), ())


BOXES = st.tuples(st.sampled_from(["n", "o", "e1", "e2", "e3", "e4", "e5"]), st.integers(0, 2), st.integers(0, 2))
ANY = st.lists(BOXES, max_size=4).map(lambda boxes: atoms_of(*boxes))
RANKS = st.lists(BOXES, min_size=2, max_size=2).map(lambda its: atoms_of(("a", 0, 1), *its, ("z", 9, its[0][2])))


@given(st.lists(ANY | RANKS, max_size=8))
def test_a_tensor_has_the_boxes_of_all_layouts_in_their_order(layouts: list[LayoutBoxes]) -> None:
    joined, expected = TensorIndex(layouts), one_by_one(layouts)
    assert joined.tensors.keys() == expected.keys()
    kinds: dict[int, tuple[tuple[int, ...], ...]] = {}
    for name, (sources, at, cutouts) in expected.items():
        tensor = joined.tensors[name]
        assert (tensor.sources, joined.lists[tensor.alike]) == (sources, cutouts)
        assert tensor.at == (at if len(set(at)) > 1 else at[:1])
        assert kinds.setdefault(tensor.kind, (sources, cutouts)) == (sources, cutouts)
    assert len(set(kinds.values())) == len(kinds), "tensors that are alike are of one kind"
    assert len(set(joined.lists)) == len(joined.lists)


def test_ranks_that_differ_in_their_experts_alone_share_what_they_have_alike() -> None:
    ranks = [
        atoms_of(("a", 0, 1), (f"e{rank}", 4, 2), (f"f{rank}", 6, 2), (f"g{rank}", 7, 5), ("z", 8, 3))
        for rank in range(4)
    ]
    stage = [atoms_of(("a", 0, 1), (f"h{rank}", 4, 2), ("y", 6, 3)) for rank in range(3)]
    joined = TensorIndex([*ranks, *stage])
    tensors = joined.tensors
    assert tensors["a"].sources == (0, 1, 2, 3, 4, 5, 6)
    assert tensors["z"] == TensorSources(tensors["z"].kind, tensors["z"].alike, (0, 1, 2, 3), (8,))
    assert tensors["e2"].kind == tensors["f2"].kind
    assert len({tensors[f"{each}2"].kind for each in "efgh"} | {tensors["e1"].kind}) == 4
    assert [joined.lists[tensors[each].alike] for each in ("e1", "e2", "g2", "h2")] == [(2,), (2,), (5,), (2,)]
    assert tensors["h2"].sources == (6,)
    assert tensors["e2"].sources is tensors["g2"].sources
    assert tensors["e2"].at is tensors["h1"].at
