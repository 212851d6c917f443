"""A refusal for layouts names the tensors."""

from tests.unit.planner.given import LAYOUT, answer, demand, differs, holder

from tensorhub_common.layout import Layout, TensorEntry, layout_of
from tensorhub_planner.mismatch import explain


def layout(**shapes: tuple[int, ...]) -> Layout:
    return layout_of(
        TensorEntry(name, "bfloat16", 2, shape, shape, (0,) * len(shape)) for name, shape in shapes.items()
    )


def test_the_tensors_are_named() -> None:
    differ = differs(answer(holder("a", layout="x" * 64), holder("b", layout="y" * 64)))
    found = explain(demand(), differ, layout(w=(4, 4), b=(4,)), layout(w=(8, 2), b=(4,)))
    assert found.error == "LayoutMismatch"
    assert found.reason == (
        "version 12 of 'policy' stands in other layouts only: on-a/0 on a is shard 0 of 1, and this one shard 0 of 1; "
        "they differ in 'w' (bfloat16[8, 2] of [8, 2] at [0, 0] against bfloat16[4, 4] of [4, 4] at [0, 0]) "
        "(1 more holder). Register the replica with the tensors of a holder"
    )


def test_layouts_that_can_not_be_had_are_told_by_digest() -> None:
    found = explain(demand(), differs(answer(holder("a", layout="x" * 64))), None, layout())
    assert found.reason.endswith(
        "; its layout is xxxxxxxxxxxx, and this one's llllllllllll. Register the replica with the tensors of a holder"
    )


def test_equal_layouts_in_other_places() -> None:
    """As when two shards have tensors of the same shapes: what stands in shard 1 is not what shard 0 wants."""
    found = explain(demand(), differs(answer(holder("a", shards=2, shard=1, layout=LAYOUT))), layout(), layout())
    assert "is shard 1 of 2, and this one shard 0 of 1; their tensors are described alike" in found.reason
