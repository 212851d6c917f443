"""Patterns of names: what a placeholder stands for, and what is refused before any tensor comes."""

import pytest

from tensorhub.mapping.patterns import filled, matched, words


@pytest.mark.parametrize(
    ("pattern", "name", "values"),
    [
        ("w", "w", {}),
        ("w", "ww", None),
        ("layers.{layer}.w", "layers.12.w", {"layer": "12"}),
        ("layers.{layer}.w", "layers.1.2.w", None),
        ("layers.{layer}.w", "layers..w", None),
        ("layers.{layer}.w", "prefix.layers.1.w", None),
        ("q.{kind:weight|bias}", "q.bias", {"kind": "bias"}),
        ("q.{kind:weight|bias}", "q.weight_scale", None),
        ("{*path}.inv_freq", "model.rotary.inv_freq", {"path": "model.rotary"}),
        ("{*path}.inv_freq", "inv_freq", None),
        # All that is no placeholder is taken as it is written.
        ("a.b", "axb", None),
        ("a+(b)", "a+(b)", {}),
        ("a\nb.{x}", "a\nb.c\nd", {"x": "c\nd"}),
    ],
)
def test_a_pattern_matches_a_whole_name_or_nothing(pattern: str, name: str, values: dict[str, str] | None) -> None:
    assert matched(pattern, name) == values


def test_a_template_is_filled_with_values() -> None:
    assert (
        filled("l.{layer}.{kind:weight|bias}.e{expert}", {"layer": 3, "kind": "bias", "expert": "7"}) == "l.3.bias.e7"
    )


def test_a_template_tells_what_it_asks_for() -> None:
    assert words("l.{layer}.{*path}.{kind:a|b}") == {"layer", "path", "kind"}


@pytest.mark.parametrize("wrong", ["{", "a}", "{}", "{Layer}", "{1}", "{a b}", "{a:{b}}", "{layer"])
def test_a_brace_that_belongs_to_no_placeholder_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="belongs to no placeholder"):
        words(wrong)
