"""YAML of plain values: nothing stands twice, and numbers are what they look like. Pure.

Of a name that stands twice in one place YAML's usual loaders take the last, and forget the first without a word.
"""

import re
from typing import Any, Final

import yaml

_NUMBER: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
"""As YAML 1.2 has it; before that `1e-6` was a word."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # The library has no annotations.
    """One that is safe, and refuses more."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Return a mapping as the parent does."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} stands twice in one place", problem_mark=key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def load(text: str | bytes) -> object:
    """Return the values. Raises whatever the library does.

    ValueError for what looks like a date and is none, and for what is nested too deeply.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a safe one, which refuses more)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
