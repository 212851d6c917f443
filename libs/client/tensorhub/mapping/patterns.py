"""Patterns of tensor names, and templates that are filled with what a pattern has matched. Pure.

`{layer}` matches one component of a dotted name, `{kind:weight|bias}` for one of those given, `{*path}` for one
component or more. In a template the same placeholders (`{layer}`, `{kind}`, `{path}`) are what was matched, and
`{name}` for the whole name, with global numbers where those of a rule are counted otherwise.

Always true: a pattern matches a whole name or not at all; a template with an unknown placeholder is refused when it is
made, not when a tensor comes.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

_PLACEHOLDER: Final = re.compile(r"\{(?P<star>\*?)(?P<word>[a-z_][a-z0-9_]*)(?::(?P<choice>[^{}]*))?\}")
_COMPONENT: Final = r"[^.]+"

WHOLE_NAME: Final = "name"
"""The placeholder of a template that is all of the registered name."""


def matched(pattern: str, name: str) -> dict[str, str] | None:
    """Return what the pattern's placeholders match in this name, or None when it is not such a name."""
    found = _compiled(pattern).fullmatch(name)
    return None if found is None else found.groupdict()


def filled(template: str, values: Mapping[str, object]) -> str:
    """Put the values into a template."""
    return "".join(str(values[piece]) if is_word else piece for piece, is_word in _pieces(template))


def words(template: str) -> frozenset[str]:
    """Return the placeholders of a pattern or a template. Raises `ValueError` when a brace belongs to none."""
    if set("{}") & set(_PLACEHOLDER.sub("", template)):
        raise ValueError(
            f"{template!r} has a brace that belongs to no placeholder; possible are {{word}}, {{word:this|that}} and "
            "{*word}, in small letters"
        )
    return frozenset(found["word"] for found in _PLACEHOLDER.finditer(template))


@lru_cache(maxsize=4096)
def _pieces(template: str) -> tuple[tuple[str, bool], ...]:
    """Take a template apart: what is written, and placeholders in between."""
    pieces, end = [], 0
    for found in _PLACEHOLDER.finditer(template):
        pieces += [(template[end : found.start()], False), (found["word"], True)]
        end = found.end()
    return (*pieces, (template[end:], False))


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> "re.Pattern[str]":
    choices = iter([_alternatives(found) for found in _PLACEHOLDER.finditer(pattern)])
    pieces = (f"(?P<{piece}>{next(choices)})" if is_word else re.escape(piece) for piece, is_word in _pieces(pattern))
    return re.compile("".join(pieces), re.DOTALL)


def _alternatives(found: "re.Match[str]") -> str:
    if found["choice"] is not None:
        return "|".join(re.escape(choice) for choice in found["choice"].split("|"))
    return ".+" if found["star"] else _COMPONENT
