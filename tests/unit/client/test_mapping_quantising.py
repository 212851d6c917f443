"""Weights in fp8 with scales: which parts of the published tensors both consist of, and what is refused by name."""

from collections.abc import Mapping as Values

import pytest

from tensorhub.mapping import AS_IT_IS, Cut, Mapping, Padding, Rule, Stack, concat, fp8, share, tensor
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import TensorEntry, layout_of
from tensorhub_common.layout.parts import Part, Shape, padding

VALUES, SCALES = "fp8-block-128:values", "fp8-block-128:scales"
RULES = (
    Rule("qkv", concat(tensor("q", share(1024, 1, 2)), tensor("k", share(256, 1, 2)))),
    Rule("down", tensor("d", None, Cut(700, 384, 700))),
    Rule("w13", Stack("e", (3, 5), concat(tensor("e{e}.gate", share(512, 1, 2)), tensor("e{e}.up", share(512, 1, 2))))),
    Rule("padded", concat(tensor("p", Cut(128, 0, 128)), Padding())),
    Rule("{*any}", AS_IT_IS),
)
MINE = Mapping("mine", RULES, quantise=fp8("fp8-block-128"))


def entry(name: str, dtype: str, *shape: int, whole: Shape | None = None, offset: Shape | None = None) -> TensorEntry:
    return TensorEntry(name, dtype, 1 if "8" in dtype else 4, shape, whole or shape, offset or (0,) * len(shape))


def mapped(
    names: Mapping, weight: str, shape: Shape, scales: Shape, *, suffix: str = "_scale_inv"
) -> Values[str, TensorEntry]:
    """Return what becomes of a weight and its scales; it is a good layout."""
    given = {
        weight: entry(weight, "float8_e4m3fn", *shape),
        weight + suffix: entry(weight + suffix, "float32", *scales),
    }
    found = [names.entry(each, given) for each in given.values()]
    layout = layout_of(each for each in found if each is not None)
    return {each.name: each for each in layout.tensors}


def test_a_fused_weight_and_its_scales_have_the_same_parts() -> None:
    found = mapped(MINE, "qkv", (640, 300), (5, 3))
    assert found["qkv"].parts == (
        Part("q", (1024, 300), (512, 0), (512, 300), (0, 0), (512, 300), VALUES),
        Part("k", (256, 300), (128, 0), (128, 300), (512, 0), (128, 300), VALUES),
    )
    assert found["qkv_scale_inv"].parts == (
        Part("q", (1024, 300), (4, 0), (4, 3), (0, 0), (4, 3), SCALES),
        Part("k", (256, 300), (1, 0), (1, 3), (4, 0), (1, 3), SCALES),
    )


def test_columns_and_stacks_of_experts() -> None:
    down = mapped(MINE, "down", (200, 316), (2, 3))
    assert down["down_scale_inv"].parts == (Part("d", (200, 700), (0, 3), (2, 3), (0, 0), (2, 3), SCALES),)
    stack = mapped(MINE, "w13", (2, 512, 130), (2, 4, 2))
    assert stack["w13_scale_inv"].parts[3] == Part("e5.up", (512, 130), (2, 0), (2, 2), (1, 2, 0), (1, 2, 2), SCALES)
    assert stack["w13"].parts[3].cast == VALUES


def test_a_weight_of_its_own_name_has_a_part_too() -> None:
    found = mapped(MINE, "model.w", (130, 70), (2, 1))
    assert found["model.w"].parts == (Part("model.w", (130, 70), (0, 0), (130, 70), (0, 0), (130, 70), VALUES),)
    assert found["model.w_scale_inv"].parts[0].name == "model.w"


def test_a_scale_for_each_row_and_a_suffix_of_ones_own() -> None:
    rows = Mapping("rows", RULES, quantise=fp8("fp8-channel"))
    found = mapped(rows, "down", (200, 316), (200, 1), suffix="_scale")
    assert found["down_scale"].parts == (
        Part("d", (200, 700), (0, 0), (200, 1), (0, 0), (200, 1), "fp8-channel:scales"),
    )
    assert mapped(rows, "qkv", (640, 300), (640, 1), suffix="_scale")["qkv_scale"].parts[1].start == (512, 0)
    named = Mapping("named", RULES, quantise=fp8("fp8-block-128", "_s"))
    assert mapped(named, "qkv", (640, 300), (5, 3), suffix="_s")["qkv_s"].parts[0].cast == SCALES


def test_padding_has_scales_of_padding() -> None:
    found = mapped(MINE, "padded", (300, 10), (3, 1))
    assert found["padded"].parts[1] == padding((128, 0), (172, 10))
    assert found["padded_scale_inv"].parts[1] == padding((1, 0), (2, 1))


def test_what_is_not_fp8_is_as_it_was() -> None:
    plain = Mapping("plain", RULES)
    for name in ("qkv", "model.norm_scale_inv"):
        given = entry(name, "float32", 640, 300)
        assert MINE.entry(given, {name: given}) == plain.entry(given)


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
def test_blocks_that_the_engine_would_count_otherwise_are_refused(
    rule: object, shape: Shape, scales: Shape, said: str
) -> None:
    names = Mapping("mine", (Rule("w", rule),), quantise=fp8("fp8-block-128"))  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatch, match=said):
        mapped(names, "w", shape, scales)


def test_a_weight_without_scales_is_refused() -> None:
    given = entry("w", "float8_e4m3fn", 2, 2)
    with pytest.raises(LayoutMismatch, match="'w' is float8_e4m3fn, and no float32 'w_scale_inv' is registered"):
        MINE.entry(given, {"w": given})


def test_a_scheme_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="no fp8 scheme 'fp7'; possible are fp8-block-128, "):
        fp8("fp7")
