"""What a registered tensor consists of: nodes laid out in a shape, and what does not fit said in words."""

from collections.abc import Callable

import pytest

from tensorhub.mapping.cuts import Cut, Padded, share
from tensorhub.mapping.nodes import AS_IT_IS, Misfit, Node, Padding, Stack, concat, lay_out, placeholders, tensor
from tensorhub_common.layout.parts import Part, Shape, check_parts, padding

Q, K = tensor("{layer}.q", share(8, 1, 2)), tensor("{layer}.k", share(4, 1, 2))


def laid(node: Node, shape: Shape) -> list[Part]:
    parts = lay_out(node, shape, {"layer": 3, "name": "registered"})
    check_parts("w", shape, [part for part in parts if 0 not in part.shape])
    return parts


def test_a_tensor_takes_what_is_there() -> None:
    assert laid(AS_IT_IS, (2, 3)) == [Part("registered", (2, 3), (0, 0), (2, 3), (0, 0), (2, 3))]
    assert laid(AS_IT_IS, ()) == [Part("registered", (), (), (), (), ())]


def test_a_cut_tells_the_global_size_and_where_it_begins() -> None:
    assert laid(Q, (4, 5)) == [Part("3.q", (8, 5), (4, 0), (4, 5), (0, 0), (4, 5))]
    columns = tensor("o", None, Cut(9, 2, 5))
    assert laid(columns, (7, 3)) == [Part("o", (7, 9), (0, 2), (7, 3), (0, 0), (7, 3))]


def test_a_concatenation_goes_on_where_the_item_before_has_ended() -> None:
    assert laid(concat(Q, K), (6, 5)) == [
        Part("3.q", (8, 5), (4, 0), (4, 5), (0, 0), (4, 5)),
        Part("3.k", (4, 5), (2, 0), (2, 5), (4, 0), (2, 5)),
    ]
    # A bias goes by the same node as its matrix.
    assert [part.start for part in laid(concat(Q, K), (6,))] == [(0,), (4,)]
    beside = concat(tensor("a", None, Cut(4, 0, 4)), tensor("b"), dim=1)
    assert [(part.start, part.shape) for part in laid(beside, (2, 6))] == [((0, 0), (2, 4)), ((0, 4), (2, 2))]


def test_concatenations_may_stand_in_one_another() -> None:
    parts = laid(concat(concat(Q, K), Padding(1), concat(K, K)), (11, 2))
    assert [(part.name, part.start[0]) for part in parts] == [
        ("3.q", 0),
        ("3.k", 4),
        ("", 6),
        ("3.k", 7),
        ("3.k", 9),
    ]


def test_a_stack_has_one_item_at_each_index_in_front() -> None:
    parts = laid(
        Stack("expert", (5, 2), concat(tensor("e{expert}.a", share(4, 0, 2)), tensor("e{expert}.b"))), (2, 5, 3)
    )
    assert parts[:2] == [
        Part("e5.a", (4, 3), (0, 0), (2, 3), (0, 0, 0), (1, 2, 3)),
        Part("e5.b", (3, 3), (0, 0), (3, 3), (0, 2, 0), (1, 3, 3)),
    ]
    assert [(part.name, part.start) for part in parts[2:]] == [("e2.a", (1, 0, 0)), ("e2.b", (1, 2, 0))]


def test_stacks_may_stand_one_after_another() -> None:
    parts = laid(concat(Stack("e", (0, 1), tensor("a{e}")), Stack("e", (4,), tensor("b{e}"))), (3, 2))
    assert [(part.name, part.start) for part in parts] == [("a0", (0, 0)), ("a1", (1, 0)), ("b4", (2, 0))]


def test_padding_is_so_many_elements_or_the_rest() -> None:
    assert laid(concat(K, Padding()), (5, 2))[1] == padding((2, 0), (3, 2))
    assert [part.name for part in laid(concat(K, Padding()), (2, 2))] == ["3.k"]
    assert laid(Padding(), (2, 2)) == [padding((0, 0), (2, 2))]


@pytest.mark.parametrize(
    ("rank", "real", "begin"),
    [(0, 4, 0), (1, 4, 4), (2, 2, 8), (3, 0, 10)],
)
def test_what_was_padded_before_it_was_divided(rank: int, real: int, begin: int) -> None:
    """10 of 16 elements on four ranks."""
    parts = laid(tensor("v", Padded(10, rank, 4)), (4, 3))
    rest = [part for part in parts if part.is_padding]
    assert rest == ([padding((real, 0), (4 - real, 3))] if real < 4 else [])
    assert parts[-1] == Part("v", (10, 3), (begin, 0), (real, 3), (0, 0), (real, 3))


@pytest.mark.parametrize(
    ("node", "shape", "said"),
    [
        (Q, (5, 5), r"has 5 elements in dimension 0 for '3.q', and should have 4: 4 to 8 of 8"),
        (concat(Q, K), (7, 5), r"has 7 elements in dimension 0, and should have 4 \+ 2"),
        (concat(Q, K), (5, 5), r"has 5 elements in dimension 0, and should have 4 \+ 2"),
        (concat(Q, K, Padding()), (5, 5), r"should have 4 \+ 2 \+ the rest"),
        (concat(Q, dim=1), (4,), "has 1 dimensions, and is put together along dimension 1"),
        (tensor("o", None, Cut(4, 0, 4)), (4,), "has 1 dimensions where 'o' is cut in 2"),
        (tensor("v", Padded(10, 0, 4)), (2, 3), "has 2 elements in dimension 0 for 'v', too few for 10 on 4 ranks"),
        (Stack("e", (1, 2), AS_IT_IS), (3, 4), r"stacks 3 of \{e\}, and this rank should have 2"),
        (Stack("e", (1, 2), AS_IT_IS), (), r"stacks 0 of \{e\}"),
        (concat(tensor("q"), tensor("k")), (4,), "has 4 elements in dimension 0 for 2 items that don't say how many"),
    ],
)
def test_what_does_not_fit_is_said(node: Node, shape: Shape, said: str) -> None:
    with pytest.raises(Misfit, match=said):
        laid(node, shape)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: concat(Q, dim=-1), "dim of a concatenation is -1; dimensions count from 0"),
        (lambda: tensor("q", 4), "'q' is cut by share, chunk, Cut, Padded or None; got 4"),  # type: ignore[arg-type]
        (lambda: tensor(4), "a global tensor's name is a string; got 4"),  # type: ignore[arg-type]
        (lambda: placeholders(concat(Q, "k")), r"consists of tensor\(…\), .*; got 'k'"),  # type: ignore[arg-type]
        (lambda: placeholders(Stack("e", (1,), None)), r"consists of tensor\(…\), .*; got None"),  # type: ignore[arg-type]
    ],
)
def test_what_can_not_be_written_is_said(make: Callable[[], object], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make()


def test_a_node_tells_which_placeholders_must_be_known() -> None:
    node = concat(Stack("expert", (1,), tensor("{layer}.{expert}")), Padding(), AS_IT_IS)
    assert placeholders(node) == {"layer", "name"}
