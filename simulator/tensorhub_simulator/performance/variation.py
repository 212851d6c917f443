"""What may be otherwise in a scenario's file: values by their path. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec


class Variation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be otherwise."""

    what: str
    set: dict[str, Any]
    """Values by their path in this file: `links.0.rtt_ms: 100`."""


def put(tree: Any, values: Mapping[str, Any]) -> None:  # noqa: ANN401 (a tree of plain values, as YAML has them)
    """Put other values at some paths of a tree of plain values. Raises LookupError with the path that is not there."""
    for path, value in values.items():
        *above, last = path.split(".")
        at: Any = tree
        try:
            for name in above:
                at = at[int(name)] if isinstance(at, list | tuple) else at[name]
            at[last] = value
        except (KeyError, IndexError, ValueError, TypeError):
            raise LookupError(path) from None
