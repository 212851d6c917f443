"""Mappings: which rule decides, what a tensor consists of, and errors that name what does not fit.

That cuts, concatenations and stacks cover each model without a gap is shown in tests/property/test_mapping.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tensorhub.mapping import (
    AS_IT_IS,
    LEFT_OUT,
    Cut,
    Mapping,
    Numbers,
    Padded,
    Padding,
    Rule,
    Stack,
    chunk,
    concat,
    share,
    tensor,
)
from tensorhub.mapping.model_config import lookup_of
from tensorhub.mapping.ranks import Ranks, chosen_experts, experts_of, stage
from tensorhub.mapping.sizes import Experts, Latent, Sizes, experts_sizes_of, latent_sizes_of, sizes_of
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import TensorEntry
from tensorhub_common.layout.parts import Part, Shape, check_parts, padding

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


def mapped(names: Mapping, given: TensorEntry) -> TensorEntry:
    found = names.entry(given)
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------ which rule decides


@pytest.mark.parametrize(
    ("pattern", "name", "becomes"),
    [
        ("w", "w", "w"),
        ("w", "ww", None),
        ("layers.{layer}.w", "layers.12.w", "layers.{layer}.w"),
        ("layers.{layer}.w", "layers.1.2.w", None),
        ("layers.{layer}.w", "layers..w", None),
        ("layers.{layer}.w", "prefix.layers.1.w", None),
        ("q.{kind:weight|bias}", "q.bias", "q.{kind}"),
        ("q.{kind:weight|bias}", "q.weight_scale", None),
        ("{*path}.inv_freq", "model.rotary.inv_freq", "{path}.inv_freq"),
        ("{*path}.inv_freq", "inv_freq", None),
        # All that is no placeholder is taken as it is written.
        ("a.b", "axb", None),
        ("a+(b)", "a+(b)", "a+(b)"),
        ("a\nb.{x}", "a\nb.c\nd", "a\nb.{x}"),
    ],
)
def test_a_pattern_matches_a_whole_name_or_nothing(pattern: str, name: str, becomes: str | None) -> None:
    """The template that repeats the pattern's words is filled to the name itself."""
    names = Mapping("one", (Rule(pattern, tensor(f"new.{becomes or 'x'}")),), unknown="keep")
    parts = mapped(names, entry(name, 2)).parts
    assert [part.name for part in parts] == ([] if becomes is None else [f"new.{name}"])


@pytest.mark.parametrize("wrong", ["{", "a}", "{}", "{Layer}", "{1}", "{a b}", "{a:{b}}", "{layer"])
def test_a_brace_that_belongs_to_no_placeholder_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="belongs to no placeholder"):
        Rule("w", tensor(wrong))


def test_the_first_rule_that_matches_decides() -> None:
    assert MINE.extended(Rule("head", LEFT_OUT)).entry(entry("head", 2, 3)) is None
    assert MINE.entry(entry("table.a.b", 2)) is None


def test_a_box_of_a_global_tensor_of_the_same_name_needs_no_parts_and_another_name_does() -> None:
    assert MINE.entry(entry("head", 2, 3)) == entry("head", 2, 3, whole=(5, 3), offset=(2, 0))
    assert MINE.entry(entry("layers.4.bias", 3)) == entry("layers.4.bias", 3)
    assert mapped(MINE, entry("layers.4.norm", 3)).parts == (Part("l4.norm", (3,), (0,), (3,), (0,), (3,)),)


def test_parts_that_were_given_stay() -> None:
    given = TensorEntry("unknown", "int8", 1, (2,), (2,), (0,), (padding((0,), (2,)),))
    assert MINE.entry(given) == given


def test_a_stage_may_count_its_layers_from_zero() -> None:
    shifted = Mapping("mine", RULES, (Numbers("layer", 4, 8, shift=4),))
    assert mapped(shifted, entry("layers.1.norm", 3)).parts[0].name == "l5.norm"


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
    rule = Rule("w", tensor("v"))
    assert Mapping("mine", [rule]).extended(rule).rules == (rule, rule)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ what a tensor consists of

Q, K = tensor("q", share(8, 1, 2)), tensor("k", share(4, 1, 2))

Q_PART = Part("q", (8, 5), (4, 0), (4, 5), (0, 0), (4, 5))


@pytest.mark.parametrize(
    ("of", "shape", "parts"),
    [
        pytest.param(Q, (4, 5), [Q_PART], id="a cut"),
        pytest.param(
            tensor("o", None, Cut(9, 2, 5)), (7, 3), [Part("o", (7, 9), (0, 2), (7, 3), (0, 0), (7, 3))], id="columns"
        ),
        pytest.param(tensor("s"), (), [Part("s", (), (), (), (), ())], id="a scalar"),
        pytest.param(
            concat(Q, K), (6, 5), [Q_PART, Part("k", (4, 5), (2, 0), (2, 5), (4, 0), (2, 5))], id="a concatenation"
        ),
        pytest.param(
            concat(Q, K),
            (6,),
            [Part("q", (8,), (4,), (4,), (0,), (4,)), Part("k", (4,), (2,), (2,), (4,), (2,))],
            id="a bias",
        ),
        pytest.param(
            concat(tensor("a", None, Cut(4, 0, 4)), tensor("b"), dim=1),
            (2, 6),
            [
                Part("a", (2, 4), (0, 0), (2, 4), (0, 0), (2, 4)),
                Part("b", (2, 2), (0, 0), (2, 2), (0, 4), (2, 2)),
            ],
            id="along columns",
        ),
        pytest.param(
            concat(concat(K, Padding(1)), concat(K)),
            (5, 2),
            [
                Part("k", (4, 2), (2, 0), (2, 2), (0, 0), (2, 2)),
                padding((2, 0), (1, 2)),
                Part("k", (4, 2), (2, 0), (2, 2), (3, 0), (2, 2)),
            ],
            id="concatenations in one another",
        ),
        pytest.param(
            Stack("e", (5, 2), concat(tensor("e{e}.a", share(4, 0, 2)), tensor("e{e}.b"))),
            (2, 5, 3),
            [
                Part("e5.a", (4, 3), (0, 0), (2, 3), (0, 0, 0), (1, 2, 3)),
                Part("e5.b", (3, 3), (0, 0), (3, 3), (0, 2, 0), (1, 3, 3)),
                Part("e2.a", (4, 3), (0, 0), (2, 3), (1, 0, 0), (1, 2, 3)),
                Part("e2.b", (3, 3), (0, 0), (3, 3), (1, 2, 0), (1, 3, 3)),
            ],
            id="a stack",
        ),
        pytest.param(
            concat(Stack("e", (0,), tensor("a{e}")), Stack("e", (4,), tensor("b{e}"))),
            (2, 2),
            [
                Part("a0", (2,), (0,), (2,), (0, 0), (1, 2)),
                Part("b4", (2,), (0,), (2,), (1, 0), (1, 2)),
            ],
            id="stacks one after another",
        ),
        pytest.param(
            concat(K, Padding()),
            (5, 2),
            [Part("k", (4, 2), (2, 0), (2, 2), (0, 0), (2, 2)), padding((2, 0), (3, 2))],
            id="padding of the rest",
        ),
        pytest.param(
            concat(K, Padding()), (2, 2), [Part("k", (4, 2), (2, 0), (2, 2), (0, 0), (2, 2))], id="no rest to pad"
        ),
        pytest.param(Padding(), (2, 2), [padding((0, 0), (2, 2))], id="padding alone"),
        # 10 elements, padded to 16 before they were divided among four ranks.
        *(
            pytest.param(
                tensor("v", Padded(10, rank, 4)),
                (4, 3),
                ([padding((real, 0), (4 - real, 3))] if real < 4 else [])
                + ([Part("v", (10, 3), (4 * rank, 0), (real, 3), (0, 0), (real, 3))] if real else []),
                id=f"padded, rank {rank}",
            )
            for rank, real in enumerate((4, 4, 2, 0))
        ),
    ],
)
def test_what_a_registered_tensor_consists_of(of: Any, shape: Shape, parts: list[Part]) -> None:
    found = mapped(Mapping("one", (Rule("w", of),)), entry("w", *shape))
    assert (found.name, found.shape, found.global_shape, found.offset) == ("w", shape, shape, (0,) * len(shape))
    assert sorted(found.parts, key=lambda part: part.start) == sorted(parts, key=lambda part: part.start)
    check_parts("w", shape, list(found.parts))


def test_a_box_of_a_registered_tensor_has_what_lies_in_it() -> None:
    found = mapped(MINE, entry("layers.5.qk.weight", 3, 2, whole=(6, 3), offset=(2, 1)))
    assert (found.global_shape, found.offset) == ((3, 2), (0, 0))
    assert found.parts == (
        Part("l5.q.weight", (8, 3), (6, 1), (2, 2), (0, 0), (2, 2)),
        Part("l5.k", (2, 3), (0, 1), (1, 2), (2, 0), (1, 2)),
    )
    within = mapped(MINE, entry("head", 1, 2, whole=(2, 3), offset=(1, 1)))
    assert within == entry("head", 1, 2, whole=(5, 3), offset=(3, 1))
    stack = Mapping("s", (Rule("w", Stack("e", (7, 9), concat(tensor("e{e}", share(4, 1, 2)), Padding(1)))),))
    assert mapped(stack, entry("w", 1, 2, 4, whole=(2, 3, 5), offset=(1, 1, 1))).parts == (
        Part("e9", (4, 5), (3, 1), (1, 4), (0, 0, 0), (1, 1, 4)),
        padding((0, 1, 0), (1, 1, 4)),
    )


def test_a_shard_without_an_element_agrees_with_its_siblings() -> None:
    last = Mapping("last", (Rule("head", tensor("{name}", chunk(5, 3, 4))), RULES[0]))
    assert last.entry(entry("head", 0, 3)) == entry("head", 0, 3, whole=(5, 3), offset=(5, 0))
    fused = last.entry(entry("layers.5.qk.weight", 0, 3, whole=(6, 3), offset=(6, 0)))
    assert fused == entry("layers.5.qk.weight", 0, 3)


@pytest.mark.parametrize(
    ("of", "shape", "said"),
    [
        (Q, (5, 5), r"has 5 elements in dimension 0 for 'q', and should have 4: 4 to 8 of 8"),
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
def test_a_shape_that_does_not_fit_is_refused(of: Any, shape: Shape, said: str) -> None:
    with pytest.raises(LayoutMismatch, match=said):
        Mapping("one", (Rule("w", of),)).entry(entry("w", *shape))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: concat(Q, dim=-1), "dim of a concatenation is -1; dimensions count from 0"),
        (lambda: tensor("q", 4), "'q' is cut by share, chunk, Cut, Padded or None; got 4"),  # type: ignore[arg-type]
        (lambda: tensor(4), "a global tensor's name is a string; got 4"),  # type: ignore[arg-type]
        (lambda: Rule("w", concat(Q, "k")), r"consists of tensor\(…\), .*; got 'k'"),  # type: ignore[arg-type]
        (lambda: Rule("w", Stack("e", (1,), None)), r"consists of tensor\(…\), .*; got None"),  # type: ignore[arg-type]
        (lambda: Rule(4, Q), "a rule begins with a pattern of names; got 4"),  # type: ignore[arg-type]
        (lambda: Rule("w.{kind}", tensor("l{layer}.{kind}")), r"asks for \{layer\}, which its pattern does not tell"),
        (lambda: Mapping("m", ("qkv",)), r"rules of a mapping are tensorhub\.mapping\.Rule; got 'qkv'"),  # type: ignore[arg-type]
        (lambda: Mapping("m", (), numbers=(3,)), r"numbers of a mapping are tensorhub\.mapping\.Numbers; got 3"),  # type: ignore[arg-type]
        (lambda: Mapping("m", (), unknown="pass"), "unknown is 'pass'; possible are 'refuse' and 'keep'"),  # type: ignore[arg-type]
        (lambda: share(7, 0, 2, "heads"), "heads of 7 can't be divided equally among 2 ranks"),
        *((lambda at=at: Cut(3, *at), "are no cut of a dimension of 3") for at in ((-1, 2), (2, 1), (0, 4))),
        *((lambda no=no: Cut(4, 0, no), f"is {no!r}; it is a whole number") for no in (2.0, "2", None)),
        *((lambda no=no: Padded(4, no, 8), f"is {no!r}; it is a whole number") for no in (2.0, "2", None)),
        *(
            (lambda make=make, at=at: make(4, *at), f"rank is {at[0]} of {at[1]}")
            for make in (share, chunk, Padded)
            for at in ((-1, 2), (2, 2), (0, 0))
        ),
    ],
)
def test_what_can_not_be_written_is_said(make: Callable[[], object], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make()


def test_numbers_of_numpy_s_become_plain_ones() -> None:
    """A layout is encoded, and only numpy could encode its numbers."""
    size, rank, ranks = (np.int64(number) for number in (8, 1, 2))
    for cut in (share(size, rank, ranks), chunk(size, rank, ranks), Padded(size, rank, ranks), Cut(size, rank, size)):  # type: ignore[arg-type]
        assert {type(value) for value in msgspec.structs.asdict(cut).values()} == {int}


# --------------------------------------------------------------------------------------- ranks and the model's sizes


@pytest.mark.parametrize(
    ("layers", "ranks", "sizes"),
    [(8, 1, [8]), (8, 4, [2, 2, 2, 2]), (9, 4, [2, 2, 3, 2]), (10, 4, [2, 3, 3, 2]), (11, 4, [3, 3, 3, 2])],
)
def test_left_over_layers_go_to_the_stages_before_the_last(layers: int, ranks: int, sizes: list[int]) -> None:
    stages = [stage(layers, rank, ranks) for rank in range(ranks)]
    assert list(map(len, stages)) == sizes
    assert [layer for each in stages for layer in each] == list(range(layers))
    with pytest.raises(ValueError, match="2 layers can't be divided among 3 pipeline stages"):
        stage(2, 0, 3)


def test_experts_of_a_rank() -> None:
    assert [experts_of(7, rank, 3) for rank in range(3)] == [(0, 1, 2), (3, 4), (5, 6)]
    assert [experts_of(7, rank, 3, "round_robin") for rank in range(3)] == [(0, 3, 6), (1, 4), (2, 5)]
    assert chosen_experts([3, 1, 3], 4) == (3, 1, 3)
    with pytest.raises(ValueError, match="placement is 'other'; possible are 'linear', 'round_robin'"):
        experts_of(7, 0, 3, "other")
    with pytest.raises(ValueError, match="there is no expert 4: the model has 4"):
        chosen_experts([3, 4], 4)


def test_ranks() -> None:
    assert Ranks(tp_rank=1, tp_size=2).expert_tp == (1, 2)
    assert Ranks(tp_rank=1, tp_size=2, ep_rank=1, ep_size=2).expert_tp == (0, 1)
    assert Ranks(tp_rank=1, tp_size=2, expert_tp_rank=3, expert_tp_size=4).expert_tp == (3, 4)
    assert Ranks().told == "one rank"
    assert Ranks(tp_rank=1, tp_size=2, ep_rank=3, ep_size=4).told == "tp 1 of 2, ep 3 of 4"
    for group in ("tp", "pp", "ep", "expert_tp"):
        with pytest.raises(ValueError, match=f"{group}_rank is 2 of 2"):
            Ranks(**{f"{group}_rank": 2, f"{group}_size": 2})


CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 100,
}
SIZES = Sizes(layers=2, heads=4, kv_heads=4, head_dim=8, intermediate=48, vocabulary=100, tied=False)
LATENT = {"num_attention_heads": 4, "kv_lora_rank": 3, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6, "v_head_dim": 7}


def test_a_dict_an_object_a_file_and_its_folder_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    for form in (CONFIG, SimpleNamespace(**CONFIG), file, str(file), tmp_path):
        assert sizes_of(lookup_of(form)) == SIZES
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "weights").write_bytes(bytes(10))
    for path in (tmp_path / "none", tmp_path / "list.json", tmp_path / "weights"):
        with pytest.raises(ValueError, match="is no model configuration"):
            lookup_of(path)


def test_sizes_are_read_with_the_defaults_of_transformers_and_under_several_names() -> None:
    more = {**CONFIG, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
    assert sizes_of(more.get) == msgspec.structs.replace(SIZES, kv_heads=2, head_dim=16, tied=True)
    assert sizes_of({**CONFIG, "head_dim": None}.get).head_dim == 8
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        config = {name: 8, "moe_intermediate_size": 16}
        assert experts_sizes_of(config.get) == Experts(count=8, intermediate=16)
        assert experts_sizes_of({**config, "n_shared_experts": 2}.get).shared_intermediate == 32
        assert experts_sizes_of({**config, "n_shared_experts": 0}.get).shared_intermediate == 0
    assert latent_sizes_of(LATENT.get) == Latent(heads=4, q_rank=None, kv_rank=3, nope_dim=5, rope_dim=6, v_dim=7)
    assert latent_sizes_of({**LATENT, "q_lora_rank": 2}.get).q_rank == 2


@pytest.mark.parametrize(
    ("read", "config", "said"),
    [
        (sizes_of, {**CONFIG, "vocab_size": None}, "has no vocab_size: is it the one of this family"),
        (experts_sizes_of, {"moe_intermediate_size": 1}, "has no num_experts or n_routed_experts or num_local_experts"),
        (
            experts_sizes_of,
            {"num_experts": 8, "moe_intermediate_size": 16, "n_shared_experts": -1},
            "n_shared_experts is -1",
        ),
        *(
            (sizes_of, {**CONFIG, "num_attention_heads": wrong}, "it is a whole number, at least 1")
            for wrong in (0, -1, True, "4", 4.0)
        ),
    ],
)
def test_what_is_missing_or_no_size_is_named(read: Callable[[Any], object], config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(config.get)
