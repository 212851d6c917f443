"""docs/reference/layouts.md: its example of a mapping of one's own is Python, and says what it says."""

import re
from pathlib import Path
from typing import Any

from tensorhub import mapping
from tensorhub.mapping.families import FAMILIES, Options
from tensorhub_common.layout.layout import TensorEntry, layout_of

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "layouts.md").read_text()


def entry(name: str, *shape: int) -> TensorEntry:
    return TensorEntry(name, "float32", 4, shape, shape, (0,) * len(shape))


def test_the_example_of_a_mapping_of_ones_own() -> None:
    [code] = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "Mapping(" in block]
    known: dict[str, Any] = {"tp_rank": 1, "tp_size": 4, "my_experts": (3, 5)}
    exec(compile(code, "docs/reference/layouts.md", "exec"), known)  # noqa: S102 (our own page)
    names: mapping.Mapping = known["names"]
    given = [
        entry("blocks.2.attn.qkv.weight", 3072, 8),
        entry("blocks.2.attn.qkv.bias", 3072),
        entry("blocks.2.mlp.out.weight", 8, 2752),
        entry("blocks.2.experts", 2, 24, 8),
        entry("blocks.2.norm.weight", 8),
        entry("model.norm.weight", 8),
        entry("blocks.2.cache", 8),
    ]
    found = [names.entry(each) for each in given]
    assert found[-1] is None
    layout = layout_of(each for each in found if each is not None)
    parts = {part.name: part for each in layout.tensors for part in each.parts}
    assert parts["model.layers.18.self_attn.k_proj.weight"].offset == (1024, 0)
    assert parts["model.layers.18.mlp.down_proj.weight"].offset == (0, 2752)
    assert parts["model.layers.18.mlp.experts.5.up_proj.weight"].start == (1, 0, 0)
    assert parts["model.layers.18.input_layernorm.weight"].shape == (8,)
    assert [each.name for each in layout.tensors if not each.parts] == ["model.norm.weight"]


def test_every_family_and_option_is_told() -> None:
    for family, function in FAMILIES.items():
        assert f"`{family}`" in PAGE
        assert f"`mapping.{function.__name__}`" in PAGE
    for option in Options.__annotations__:
        assert f"`{option}`" in PAGE
