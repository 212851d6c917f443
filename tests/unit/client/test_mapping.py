"""Mappings: which rule decides, what a tensor and its scales consist of, and errors that name what does not fit.

That cuts, concatenations and stacks cover each model without a gap is shown in tests/property/test_mapping.py.
"""

import json
from collections.abc import Callable
from collections.abc import Mapping as Values
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
    fp8,
    share,
    tensor,
)
from tensorhub.mapping.model_config import lookup_of
from tensorhub.mapping.ranks import Ranks, chosen_experts, experts_of, stage
from tensorhub.mapping.sizes import Experts, Latent, Sizes, experts_sizes_of, latent_sizes_of, sizes_of
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import TensorEntry, layout_of
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


def entry(
    name: str, *shape: int, whole: Shape | None = None, offset: Shape | None = None, dtype: str = "float32"
) -> TensorEntry:
    return TensorEntry(name, dtype, 1 if "8" in dtype else 4, shape, whole or shape, offset or (0,) * len(shape))


def mapped(names: Mapping, given: TensorEntry, beside: Values[str, TensorEntry] | None = None) -> TensorEntry:
    found = names.entry(given, beside) if beside else names.entry(given)
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


def test_the_first_rule_that_matches_decides_and_only_another_name_needs_parts() -> None:
    assert MINE.extended(Rule("head", LEFT_OUT)).entry(entry("head", 2, 3)) is None
    assert MINE.entry(entry("table.a.b", 2)) is None
    assert MINE.entry(entry("head", 2, 3)) == entry("head", 2, 3, whole=(5, 3), offset=(2, 0))
    assert MINE.entry(entry("layers.4.bias", 3)) == entry("layers.4.bias", 3)
    assert mapped(MINE, entry("layers.4.norm", 3)).parts == (Part("l4.norm", (3,), (0,), (3,), (0,), (3,)),)
    given = TensorEntry("unknown", "int8", 1, (2,), (2,), (0,), (padding((0,), (2,)),))
    assert MINE.entry(given) == given, "parts that were given stay"
    from_zero = Mapping("mine", RULES, (Numbers("layer", 4, 8, shift=4),))
    assert mapped(from_zero, entry("layers.1.norm", 3)).parts[0].name == "l5.norm"
    assert Mapping("none", (), unknown="keep").entry(entry("w", 1)) == entry("w", 1)
    rule = Rule("w", tensor("v"))
    assert Mapping("mine", [rule]).extended(rule).rules == (rule, rule)  # type: ignore[arg-type]


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
        (entry("layers.5.attn.qk.weight", 3), "mine has no rule for it; the nearest is .* 'layers.{layer}.qk."),
    ],
)
def test_what_is_not_as_the_rules_say_is_refused_by_name(given: TensorEntry, said: str) -> None:
    with pytest.raises(LayoutMismatch, match=said):
        MINE.entry(given)
    with pytest.raises(LayoutMismatch, match="none has no rule for it"):
        Mapping("none", ()).entry(given)


# ------------------------------------------------------------------------------------------ what a tensor consists of

Q, K = tensor("q", share(8, 1, 2)), tensor("k", share(4, 1, 2))

Q_PART = Part("q", (8, 5), (4, 0), (4, 5), (0, 0), (4, 5))


def k_at(start: int) -> Part:
    return Part("k", (4, 2), (2, 0), (2, 2), (start, 0), (2, 2))


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
            [Part("a", (2, 4), (0, 0), (2, 4), (0, 0), (2, 4)), Part("b", (2, 2), (0, 0), (2, 2), (0, 4), (2, 2))],
            id="along columns",
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
            concat(concat(K, Padding(1)), concat(K)),
            (5, 2),
            [k_at(0), padding((2, 0), (1, 2)), k_at(3)],
            id="concatenations in one another",
        ),
        pytest.param(
            concat(Stack("e", (0,), tensor("a{e}")), Stack("e", (4,), tensor("b{e}"))),
            (2, 2),
            [Part("a0", (2,), (0,), (2,), (0, 0), (1, 2)), Part("b4", (2,), (0,), (2,), (1, 0), (1, 2))],
            id="stacks one after another",
        ),
        pytest.param(concat(K, Padding()), (5, 2), [k_at(0), padding((2, 0), (3, 2))], id="padding of the rest"),
        pytest.param(concat(K, Padding()), (2, 2), [k_at(0)], id="no rest to pad"),
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
    # A shard without an element agrees with its siblings.
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
        *(
            (lambda wrong=wrong: Rule("w", tensor(wrong)), "belongs to no placeholder")
            for wrong in ("{", "a}", "{}", "{Layer}", "{1}", "{a b}", "{a:{b}}", "{layer")
        ),
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


def test_left_over_layers_go_to_the_stages_before_the_last_and_experts_one_to_each_rank() -> None:
    for layers, ranks, sizes in ((8, 1, [8]), (9, 4, [2, 2, 3, 2]), (10, 4, [2, 3, 3, 2]), (11, 4, [3, 3, 3, 2])):
        stages = [stage(layers, rank, ranks) for rank in range(ranks)]
        assert list(map(len, stages)) == sizes
        assert [layer for each in stages for layer in each] == list(range(layers))
    assert [experts_of(7, rank, 3) for rank in range(3)] == [(0, 1, 2), (3, 4), (5, 6)]
    assert [experts_of(7, rank, 3, "round_robin") for rank in range(3)] == [(0, 3, 6), (1, 4), (2, 5)]
    assert chosen_experts([3, 1, 3], 4) == (3, 1, 3)
    assert Ranks(tp_rank=1, tp_size=2).expert_tp == (1, 2)
    assert Ranks(tp_rank=1, tp_size=2, ep_rank=1, ep_size=2).expert_tp == (0, 1)
    assert Ranks(tp_rank=1, tp_size=2, expert_tp_rank=3, expert_tp_size=4).expert_tp == (3, 4)
    assert Ranks().told == "one rank"
    assert Ranks(tp_rank=1, tp_size=2, ep_rank=3, ep_size=4).told == "tp 1 of 2, ep 3 of 4"


CONFIG: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
CONFIG |= {"intermediate_size": 48, "vocab_size": 100}
MOE = {"num_experts": 8, "moe_intermediate_size": 16}
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
        config = {**MOE, "num_experts": None, name: 8}
        assert experts_sizes_of(config.get) == Experts(count=8, intermediate=16)
        assert experts_sizes_of({**config, "n_shared_experts": 2}.get).shared_intermediate == 32
        assert experts_sizes_of({**config, "n_shared_experts": 0}.get).shared_intermediate == 0
    assert latent_sizes_of(LATENT.get) == Latent(heads=4, q_rank=None, kv_rank=3, nope_dim=5, rope_dim=6, v_dim=7)
    assert latent_sizes_of({**LATENT, "q_lora_rank": 2}.get).q_rank == 2


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda: sizes_of({**CONFIG, "vocab_size": None}.get), "has no vocab_size: is it the one of this family"),
        (
            lambda: experts_sizes_of({**MOE, "num_experts": None}.get),
            "has no num_experts or n_routed_experts or num_local_experts",
        ),
        (lambda: experts_sizes_of({**MOE, "n_shared_experts": -1}.get), "n_shared_experts is -1"),
        *(
            (lambda no=no: sizes_of({**CONFIG, "num_attention_heads": no}.get), "it is a whole number, at least 1")
            for no in (0, -1, True, "4", 4.0)
        ),
        (lambda: stage(2, 0, 3), "2 layers can't be divided among 3 pipeline stages"),
        (lambda: experts_of(7, 0, 3, "other"), "placement is 'other'; possible are 'linear', 'round_robin'"),
        (lambda: chosen_experts([3, 4], 4), "there is no expert 4: the model has 4"),
        *(
            (lambda group=group: Ranks(**{f"{group}_rank": 2, f"{group}_size": 2}), f"{group}_rank is 2 of 2")
            for group in ("tp", "pp", "ep", "expert_tp")
        ),
    ],
)
def test_what_is_missing_or_no_size_or_rank_is_named(read: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read()


# ------------------------------------------------------------------------------------------------- in fp8 with scales

VALUES, SCALES = "fp8-block-128:values", "fp8-block-128:scales"
FP8_RULES = (
    Rule("qkv", concat(tensor("q", share(1024, 1, 2)), tensor("k", share(256, 1, 2)))),
    Rule("down", tensor("d", None, Cut(700, 384, 700))),
    Rule("w13", Stack("e", (3, 5), concat(tensor("e{e}.gate", share(512, 1, 2)), tensor("e{e}.up", share(512, 1, 2))))),
    Rule("padded", concat(tensor("p", Cut(128, 0, 128)), Padding())),
    Rule("{*any}", AS_IT_IS),
)
FP8 = Mapping("mine", FP8_RULES, quantise=fp8("fp8-block-128"))


def quantised(
    names: Mapping, weight: str, shape: Shape, scales: Shape, suffix: str = "_scale_inv"
) -> list[tuple[Part, ...]]:
    """Return the parts of a weight and of its scales; they are a good layout."""
    given = {weight: entry(weight, *shape, dtype="float8_e4m3fn"), weight + suffix: entry(weight + suffix, *scales)}
    found = {each.name: each for each in layout_of(mapped(names, each, given) for each in given.values()).tensors}
    return [found[name].parts for name in given]


def test_a_weight_in_fp8_and_its_scales_have_the_same_parts() -> None:
    assert quantised(FP8, "qkv", (640, 300), (5, 3)) == [
        (
            Part("q", (1024, 300), (512, 0), (512, 300), (0, 0), (512, 300), VALUES),
            Part("k", (256, 300), (128, 0), (128, 300), (512, 0), (128, 300), VALUES),
        ),
        (
            Part("q", (1024, 300), (4, 0), (4, 3), (0, 0), (4, 3), SCALES),
            Part("k", (256, 300), (1, 0), (1, 3), (4, 0), (1, 3), SCALES),
        ),
    ]
    of_columns = Part("d", (200, 700), (0, 3), (2, 3), (0, 0), (2, 3), SCALES)
    assert quantised(FP8, "down", (200, 316), (2, 3))[1] == (of_columns,)
    values, scales = quantised(FP8, "w13", (2, 512, 130), (2, 4, 2))
    assert scales[3] == Part("e5.up", (512, 130), (2, 0), (2, 2), (1, 2, 0), (1, 2, 2), SCALES)
    assert values[3].cast == VALUES
    values, scales = quantised(FP8, "model.w", (130, 70), (2, 1))
    assert values == (Part("model.w", (130, 70), (0, 0), (130, 70), (0, 0), (130, 70), VALUES),)
    assert scales[0].name == "model.w"
    values, scales = quantised(FP8, "padded", (300, 10), (3, 1))
    assert (values[1], scales[1]) == (padding((128, 0), (172, 10)), padding((1, 0), (2, 1)))


def test_a_scale_for_each_row_a_suffix_of_ones_own_and_what_is_not_fp8() -> None:
    rows = Mapping("rows", FP8_RULES, quantise=fp8("fp8-channel"))
    of_rows = Part("d", (200, 700), (0, 0), (200, 1), (0, 0), (200, 1), "fp8-channel:scales")
    assert quantised(rows, "down", (200, 316), (200, 1), "_scale")[1] == (of_rows,)
    assert quantised(rows, "qkv", (640, 300), (640, 1), "_scale")[1][1].start == (512, 0)
    named = Mapping("named", FP8_RULES, quantise=fp8("fp8-block-128", "_s"))
    assert quantised(named, "qkv", (640, 300), (5, 3), "_s")[1][0].cast == SCALES
    plain = Mapping("plain", FP8_RULES)
    for name in ("qkv", "model.norm_scale_inv"):
        given = entry(name, 640, 300)
        assert FP8.entry(given, {name: given}) == plain.entry(given)
    with pytest.raises(ValueError, match="no fp8 scheme 'fp7'; possible are fp8-block-128, "):
        fp8("fp7")


@pytest.mark.parametrize(
    ("rule", "shape", "scales", "said"),
    [
        (tensor("q", share(400, 1, 2)), (200, 8), (2, 1), "'w' .* has 200 to 400 of 400 of 'q', which is not in whole"),
        (tensor("q", None, Cut(400, 0, 200)), (8, 200), (1, 2), "'w' .* has 0 to 200 of 400 .* register it as it was"),
        (
            concat(tensor("q", Cut(100, 0, 100)), tensor("k")),
            (200, 8),
            (2, 1),
            r"has 'k' at \(100, 0\), within a block of 128 × 128",
        ),
        (tensor("q"), (200, 8), (1, 1), r"'w_scale_inv' of shape \(1, 1\) should have shape \(2, 1\)"),
        (tensor("q"), (200,), (2,), "'w' .* has no rows and columns"),
    ],
)
def test_blocks_that_an_engine_counts_otherwise_are_refused(rule: Any, shape: Shape, scales: Shape, said: str) -> None:
    with pytest.raises(LayoutMismatch, match=said):
        quantised(Mapping("mine", (Rule("w", rule),), quantise=fp8("fp8-block-128")), "w", shape, scales)
    alone = entry("w", 2, 2, dtype="float8_e4m3fn")
    with pytest.raises(LayoutMismatch, match="'w' is float8_e4m3fn, and no float32 'w_scale_inv' is registered"):
        FP8.entry(alone, {"w": alone})
