"""A mapping: rules that say, by the name of a registered tensor, of which boxes of global tensors it consists. Pure.

Always true: the first rule whose pattern matches decides; a tensor that no rule is for is refused by its name, unless
the mapping keeps what it doesn't know; a registered box of a tensor (a DTensor's) gets the parts of its box.
"""

import difflib
import re
from collections.abc import Mapping as Values
from typing import Final, Literal

import msgspec

from tensorhub.mapping.fp8 import Fp8, scales, values, weight_of
from tensorhub.mapping.nodes import Misfit, Node, lay_out, placeholders
from tensorhub.mapping.patterns import WHOLE_NAME, filled, matched, words
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import TensorEntry
from tensorhub_common.layout.parts import Part, Shape, padding


class LeftOut(msgspec.Struct, frozen=True):
    """Tensors that the hub is not to have: tables that each side computes for itself."""


LEFT_OUT: Final = LeftOut()


class Rule(msgspec.Struct, frozen=True):
    """Tensors whose names match `name` consist of `of`; patterns.py says how patterns are written."""

    name: str
    of: Node | LeftOut

    def __post_init__(self) -> None:
        """Raise `ValueError` when `of` asks for what the pattern does not tell, `TypeError` for what is no pattern."""
        if not isinstance(self.name, str):
            raise TypeError(f"a rule begins with a pattern of names; got {self.name!r:.80}")
        known = words(self.name) | {WHOLE_NAME}
        asked = frozenset() if isinstance(self.of, LeftOut) else placeholders(self.of)
        if asked - known:
            raise ValueError(
                f"the rule for {self.name!r} asks for {{{min(asked - known)}}}, which its pattern does not tell; known "
                f"are {', '.join(f'{{{word}}}' for word in sorted(known))}"
            )


class Numbers(msgspec.Struct, frozen=True):
    """The numbers that a placeholder may match: the layers of a pipeline stage, `start` to `stop`.

    `shift` is added to the number in the registered name to get the global one: where a stage counts its layers from
    zero it is `start`.
    """

    placeholder: str
    start: int
    stop: int
    shift: int = 0

    def told(self, number: str) -> int:
        """Return the global number. Raises `Misfit` when it is none of these."""
        if not (number.isascii() and number.isdecimal()):
            raise Misfit(f"has {number!r} for {{{self.placeholder}}}, which is a number")
        found = int(number) + self.shift
        if not self.start <= found < self.stop:
            mine = f"{self.start} to {self.stop - 1}" if self.start < self.stop else "none"
            raise Misfit(
                f"is of {self.placeholder} {found}, and this rank has {mine}: are the ranks those of this process?"
            )
        return found


class Mapping(msgspec.Struct, frozen=True):
    """Rules for all tensors of one shard. `title` names it in errors: "llama for vllm, tp 1 of 2"."""

    title: str
    rules: tuple[Rule, ...]
    numbers: tuple[Numbers, ...] = ()
    unknown: Literal["refuse", "keep"] = "refuse"
    """What becomes of a tensor that no rule is for: an error, or a global tensor of its own name."""
    quantise: Fp8 | None = None
    """How weights that are registered in fp8, with scales, come of the published ones."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for another word than these two, `TypeError` for rules and numbers that are none."""
        for field, kind in (("rules", Rule), ("numbers", Numbers)):
            given = tuple(getattr(self, field))
            wrong = next((each for each in given if not isinstance(each, kind)), None)
            if wrong is not None:
                raise TypeError(f"{field} of a mapping are tensorhub.mapping.{kind.__name__}; got {wrong!r:.80}")
            msgspec.structs.force_setattr(self, field, given)
        if self.unknown not in ("refuse", "keep"):
            raise ValueError(f"unknown is {self.unknown!r}; possible are 'refuse' and 'keep'")

    def extended(self, *rules: Rule) -> "Mapping":
        """Return a mapping that asks these rules first."""
        return msgspec.structs.replace(self, rules=rules + self.rules)

    def entry(self, entry: TensorEntry, registered: Values[str, TensorEntry] | None = None) -> TensorEntry | None:
        """Return the layout's entry of a registered tensor, or None when it is left out.

        A tensor whose parts were given with it keeps them. `registered` are all tensors of the shard, by name, so that
        weights and their scales are found together. Raises `LayoutMismatch` that names the tensor, when no rule is for
        it or when it is not as its rule says.
        """
        if entry.parts or self.quantise is None or not registered:
            return self._plain(entry)
        weight = weight_of(self.quantise, entry, registered)
        if weight is not None:
            found = self._plain(weight)
            return None if found is None else scales(self.quantise, entry, found)
        found = self._plain(entry)
        return None if found is None else values(self.quantise, found, registered)

    def _plain(self, entry: TensorEntry) -> TensorEntry | None:
        """Return the entry as it is without quantising."""
        if entry.parts:
            return entry
        found = self._rule(entry.name)
        if found is None:
            return self._unknown(entry)
        rule, values = found
        if isinstance(rule.of, LeftOut):
            return None
        try:
            parts = lay_out(rule.of, entry.global_shape, self._told(rule, values))
        except Misfit as misfit:
            raise LayoutMismatch(
                f"tensor {entry.name!r} of shape {entry.global_shape} {misfit} (rule {rule.name!r} of {self.title})"
            ) from None
        if 0 in entry.shape:
            return _without_elements(entry, parts)
        if entry.shape == entry.global_shape:
            return _with_parts(entry, [part for part in parts if 0 not in part.shape])
        stop = tuple(at + size for at, size in zip(entry.offset, entry.shape, strict=True))
        return _with_parts(entry, [cut for part in parts if (cut := _clipped(part, entry.offset, stop)) is not None])

    def _rule(self, name: str) -> tuple[Rule, dict[str, str]] | None:
        for rule in self.rules:
            values = matched(rule.name, name)
            if values is not None:
                return rule, values
        return None

    def _told(self, rule: Rule, values: Values[str, str]) -> dict[str, object]:
        """Return the value of each placeholder in the global tensors' names."""
        told: dict[str, object] = dict(values)
        for numbers in self.numbers:
            word = numbers.placeholder
            if word in values:
                told[word] = numbers.told(values[word])
        # A pattern that is filled with what it has matched is the name itself, and here with global numbers in it.
        return {WHOLE_NAME: filled(rule.name, told), **told}

    def _unknown(self, entry: TensorEntry) -> TensorEntry:
        if self.unknown == "keep":
            return entry
        plain = re.sub(r"\d+", "{}", entry.name)
        bare = {re.sub(r"\{[^{}]*\}", "{}", rule.name): rule.name for rule in self.rules}
        near = difflib.get_close_matches(plain, bare, n=1, cutoff=0.0)
        nearest = f"; the nearest is the one for {bare[near[0]]!r}" if near else ""
        raise LayoutMismatch(
            f"tensor {entry.name!r} of shape {entry.global_shape}: {self.title} has no rule for it{nearest}. Add one "
            "with mapping.extended(Rule(name, …)) that says what it consists of, or LEFT_OUT"
        )


def _clipped(part: Part, start: Shape, stop: Shape) -> Part | None:
    """Return what of a part lies in a box of the registered tensor, counted from the box's start."""
    begin = tuple(map(max, part.start, start))
    shape = tuple(min(a, b) - c for a, b, c in zip(part.stop, stop, begin, strict=True))
    if any(size <= 0 for size in shape):
        return None
    here = tuple(a - b for a, b in zip(begin, start, strict=True))
    if part.is_padding:
        return padding(here, shape)
    # The dimensions in front that only the registered tensor has are those of stacks, with one element each.
    extra = len(part.start) - len(part.offset)
    moved = tuple(a - b for a, b in zip(begin, part.start, strict=True))[extra:]
    offset = tuple(a + b for a, b in zip(part.offset, moved, strict=True))
    return Part(part.name, part.global_shape, offset, shape[extra:], here, shape)


def _with_parts(entry: TensorEntry, parts: list[Part]) -> TensorEntry:
    """Return the entry with its parts; a box of a global tensor of its own name needs none."""
    if len(parts) == 1 and _is_own(parts[0], entry):
        return _changed(entry, parts[0].global_shape, parts[0].offset)
    return _changed(entry, entry.shape, (0,) * len(entry.shape), tuple(parts))


def _without_elements(entry: TensorEntry, parts: list[Part]) -> TensorEntry:
    """Return the entry of an uneven shard that has nothing of a tensor: its siblings must agree on the global shape."""
    own = next((part for part in parts if _is_own(part, entry)), None)
    if own is None or any(size > whole for size, whole in zip(entry.shape, own.global_shape, strict=True)):
        return _changed(entry, entry.shape, (0,) * len(entry.shape))
    begin = (at + moved for at, moved in zip(own.offset, entry.offset, strict=True))
    offset = (min(at, whole - size) for at, whole, size in zip(begin, own.global_shape, entry.shape, strict=True))
    return _changed(entry, own.global_shape, tuple(offset))


def _is_own(part: Part, entry: TensorEntry) -> bool:
    """Tell whether a part is a box of the global tensor that has the registered name, in the same dimensions."""
    return part.name == entry.name and len(part.offset) == len(entry.shape)


def _changed(entry: TensorEntry, whole: Shape, offset: Shape, parts: tuple[Part, ...] = ()) -> TensorEntry:
    return TensorEntry(entry.name, entry.dtype, entry.itemsize, entry.shape, whole, offset, parts)
