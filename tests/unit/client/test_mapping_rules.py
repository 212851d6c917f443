"""Mappings: which rule decides, what a tensor becomes, and whoever has none is refused by name."""

import pytest

from tensorhub.mapping import AS_IT_IS, LEFT_OUT, Mapping, Numbers, Padding, Rule, Stack, chunk, concat, share, tensor
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import TensorEntry
from tensorhub_common.layout.parts import Part, Shape, padding

RULES = (
    Rule(
        "layers.{layer}.qk.{kind:weight|bias}",
        concat(tensor("l{layer}.q.{kind}", share(8, 1, 2)), tensor("l{layer}.k")),
    ),
    Rule("layers.{layer}.norm", tensor("l{layer}.norm")),
    Rule("head", tensor("{name}", chunk(5, 1, 4))),
    Rule("table.{*path}", LEFT_OUT),
    Rule("layers.{layer}.{other}", AS_IT_IS),
)
MINE = Mapping("mine", RULES, (Numbers("layer", 4, 8),))


def entry(name: str, *shape: int, whole: Shape | None = None, offset: Shape | None = None) -> TensorEntry:
    return TensorEntry(name, "float32", 4, shape, whole or shape, offset or (0,) * len(shape))


def test_a_fused_tensor_gets_parts() -> None:
    found = MINE.entry(entry("layers.5.qk.weight", 6, 3))
    assert found is not None
    assert (found.name, found.shape, found.global_shape, found.offset) == ("layers.5.qk.weight", (6, 3), (6, 3), (0, 0))
    assert found.parts == (
        Part("l5.q.weight", (8, 3), (4, 0), (4, 3), (0, 0), (4, 3)),
        Part("l5.k", (2, 3), (0, 0), (2, 3), (4, 0), (2, 3)),
    )


def test_a_box_of_a_global_tensor_of_the_same_name_needs_no_parts() -> None:
    assert MINE.entry(entry("head", 2, 3)) == entry("head", 2, 3, whole=(5, 3), offset=(2, 0))
    assert MINE.entry(entry("layers.4.bias", 3)) == entry("layers.4.bias", 3)


def test_another_name_needs_a_part() -> None:
    found = MINE.entry(entry("layers.4.norm", 3))
    assert found is not None
    assert found.parts == (Part("l4.norm", (3,), (0,), (3,), (0,), (3,)),)


def test_the_first_rule_that_matches_decides() -> None:
    assert MINE.extended(Rule("head", LEFT_OUT)).entry(entry("head", 2, 3)) is None
    assert MINE.entry(entry("table.a.b", 2)) is None


def test_a_box_of_a_registered_tensor_has_what_lies_in_it() -> None:
    found = MINE.entry(entry("layers.5.qk.weight", 3, 2, whole=(6, 3), offset=(2, 1)))
    assert found is not None
    assert (found.global_shape, found.offset) == ((3, 2), (0, 0))
    assert found.parts == (
        Part("l5.q.weight", (8, 3), (6, 1), (2, 2), (0, 0), (2, 2)),
        Part("l5.k", (2, 3), (0, 1), (1, 2), (2, 0), (1, 2)),
    )
    within = MINE.entry(entry("head", 1, 2, whole=(2, 3), offset=(1, 1)))
    assert within == entry("head", 1, 2, whole=(5, 3), offset=(3, 1))


def test_a_box_of_a_stack_keeps_its_place_in_the_matrices() -> None:
    stack = Mapping("s", (Rule("w", Stack("e", (7, 9), concat(tensor("e{e}", share(4, 1, 2)), Padding(1)))),))
    found = stack.entry(entry("w", 1, 2, 4, whole=(2, 3, 5), offset=(1, 1, 1)))
    assert found is not None
    assert found.parts == (
        Part("e9", (4, 5), (3, 1), (1, 4), (0, 0, 0), (1, 1, 4)),
        padding((0, 1, 0), (1, 1, 4)),
    )


def test_a_shard_without_an_element_agrees_with_its_siblings() -> None:
    last = Mapping("last", (Rule("head", tensor("{name}", chunk(5, 3, 4))), RULES[0]))
    assert last.entry(entry("head", 0, 3)) == entry("head", 0, 3, whole=(5, 3), offset=(5, 0))
    fused = last.entry(entry("layers.5.qk.weight", 0, 3, whole=(6, 3), offset=(6, 0)))
    assert fused == entry("layers.5.qk.weight", 0, 3)


def test_parts_that_were_given_stay() -> None:
    given = TensorEntry("nobody knows it", "int8", 1, (2,), (2,), (0,), (padding((0,), (2,)),))
    assert MINE.entry(given) == given


def test_a_stage_counts_its_layers_from_zero_where_it_says_so() -> None:
    shifted = Mapping("mine", RULES, (Numbers("layer", 4, 8, shift=4),))
    found = shifted.entry(entry("layers.1.norm", 3))
    assert found is not None
    assert found.parts[0].name == "l5.norm"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            entry("layers.5.qk.weight", 3, 3),
            r"'layers.5.qk.weight' of shape \(3, 3\) .*'layers.{layer}.qk.{kind:.* of mine",
        ),
        (entry("layers.8.norm", 3), "'layers.8.norm' .* is of layer 8, and this rank has 4 to 7"),
        (entry("layers.x.norm", 3), "has 'x' for {layer}, which is a number"),
        (entry("layers.²5.norm", 3), "has '²5' for {layer}, which is a number"),
        (
            entry("layers.5.attn.qk.weight", 3),
            "mine has no rule for it; the nearest is the one for 'layers.{layer}.qk.",
        ),
    ],
)
def test_what_is_not_as_the_rules_say_is_refused_by_name(given: TensorEntry, said: str) -> None:
    with pytest.raises(LayoutMismatch, match=said):
        MINE.entry(given)


def test_a_mapping_without_rules_says_so_and_one_may_keep_what_it_does_not_know() -> None:
    with pytest.raises(LayoutMismatch, match="none has no rule for it"):
        Mapping("none", ()).entry(entry("w", 1))
    assert Mapping("none", (), unknown="keep").entry(entry("w", 1)) == entry("w", 1)
    with pytest.raises(ValueError, match="unknown is 'pass'; possible are 'refuse' and 'keep'"):
        Mapping("none", (), unknown="pass")  # type: ignore[arg-type]


def test_a_mapping_is_of_rules_in_whatever_order_they_come() -> None:
    with pytest.raises(TypeError, match=r"rules of a mapping are tensorhub\.mapping\.Rule; got 'qkv'"):
        Mapping("mine", ("qkv",))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"numbers of a mapping are tensorhub\.mapping\.Numbers; got 3"):
        Mapping("mine", (), numbers=(3,))  # type: ignore[arg-type]
    rule = Rule("w", tensor("v"))
    assert Mapping("mine", [rule]).extended(rule).rules == (rule, rule)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a rule begins with a pattern of names; got 4"):
        Rule(4, tensor("v"))  # type: ignore[arg-type]


def test_a_rule_must_tell_what_its_names_ask_for() -> None:
    with pytest.raises(ValueError, match=r"asks for \{layer\}, which its pattern does not tell; known are"):
        Rule("w.{kind}", tensor("l{layer}.{kind}"))
