"""A set of layouts, compared by its name."""

from tensorhub_planner.primitives.source_set import LayoutSet


def test_equal_sets_have_one_name_and_one_hash() -> None:
    one, same = LayoutSet(("a", "b"), ("a",)), LayoutSet(("a", "b"), ("a",))
    assert one == same
    assert hash(one) == hash(same)
    assert {one: 1}[same] == 1


def test_order_and_what_was_published_count() -> None:
    sets = [
        LayoutSet(("a", "b"), ("a",)),
        LayoutSet(("b", "a"), ("a",)),
        LayoutSet(("a", "b"), ("b",)),
        LayoutSet(("a",), ("b", "a")),
        LayoutSet(("a", "b"), ()),
        LayoutSet((), ("a", "b")),
    ]
    assert len(set(sets)) == len(sets)
    assert sets[0] != "a"
