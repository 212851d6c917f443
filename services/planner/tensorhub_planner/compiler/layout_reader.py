"""A reader of layout blobs that parses and checks equal content once and shares it as one object. Pure.

`LayoutReader` stores entries by their encoded form: equal bytes are the same entry. The ranks of a stage repeat the
same norms and the same rows of a projection. Thousands of layouts have ten times as many entries as there are
different ones. If layouts share nothing, the reader skips the search (`LookupBudget`). If layouts share all but a few
entries, it looks up only those few (`LayoutTemplates`).

`LayoutTemplates` compares a layout as a whole with earlier ones. Ranks of a stage that cut alike differ in their
experts' rows alone. A *template* is the common part of two such layouts. It consists of *runs* of rows, stored byte by
byte, and the number of rows in each *gap* between two runs. A few comparisons tell whether a layout has the same runs,
however many rows they have. The rows in the gaps are read as if there was no template.

Invariants:
- At most `ENTRIES_MAX` entries are kept, and each of them was checked by itself.
- Each layout is checked for how its entries go together.
- A template's runs are whole rows that were read before.
- At most `PLACES_MAX` (`memo.py`) rows of layouts are remembered for comparison.
- Of layouts that begin alike, at most `ALIKE_MAX` layouts and as many templates are remembered.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import is_
from typing import Final, NamedTuple

import msgspec

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout, TensorEntry, check_entries, layout_of, layout_of_checked
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_planner.compiler.memo import TRIALS_MAX, BoundedMemo, LookupBudget

ALIKE_MAX: Final = 16
"""Ranks of trainers and engines of one stage begin alike, and have as many templates as tensor parallelism has ways."""

KEY_BYTES: Final = 64
"""Layouts whose blobs begin with the same bytes are compared: these say how many rows there are, and name the first."""

MOST: Final = 2 / 3
"""Such a part of a layout's rows is alike in two of which a template is made."""

PROBE_BYTES: Final = 64
"""A run is looked for by this many bytes, which is where a gap ends; then all of it is compared."""


class _Run(NamedTuple):
    probe: bytes
    data: bytes
    entries: Sequence[TensorEntry]
    gap: int
    """The number of rows in front of it."""


class Template(NamedTuple):
    """What two layouts have alike, from where their blobs begin to where these end."""

    first: bytes
    """What stands in front of the first gap, the blob's own first bytes included."""
    entries: Sequence[TensorEntry]
    """What was read of that."""
    runs: Sequence[_Run]
    """Those behind the gaps."""
    rows: int
    """The number of rows of all runs."""

    def gaps(self, data: bytes) -> list[bytes] | None:
        """Return what a blob has in the gaps, or None if it has other runs."""
        if not data.startswith(self.first):
            return None
        at, gaps = len(self.first), list[bytes]()
        for run in self.runs:
            end = data.find(run.probe, at)
            if end < 0 or not data.startswith(run.data, end):
                return None
            gaps.append(data[at:end])
            at = end + len(run.data)
        return gaps if at == len(data) else None

    def filled(self, between: Sequence[Sequence[TensorEntry]]) -> list[TensorEntry]:
        """Return a layout's entries, with these in the gaps."""
        entries = [*self.entries]
        for run, its in zip(self.runs, between, strict=True):
            entries += its
            entries += run.entries
        return entries


class _Alike(NamedTuple):
    """What is remembered of layouts that begin alike."""

    templates: Sequence[Template] = ()
    """The one that fitted last is last: ranks come in their order, so the next rank's template is first."""
    others: Sequence[Sequence[TensorEntry]] = ()
    """The entries of layouts that no template was made of."""


class LayoutTemplates:
    """Templates by how blobs begin. Several threads may ask at once."""

    def __init__(self) -> None:
        """Begin with none."""
        self._alike = BoundedMemo[bytes, _Alike]()

    def found(self, data: bytes) -> tuple[Template, list[bytes]] | None:
        """Return a template that fits, and what the blob has in its gaps."""
        alike = self._alike.get(data[:KEY_BYTES])
        if alike is None:
            return None
        for template in alike.templates:
            gaps = template.gaps(data)
            if gaps is not None:
                others = [each for each in alike.templates if each is not template]
                self._alike.keep(data[:KEY_BYTES], 0, alike._replace(templates=(*others, template)))
                return template, gaps
        return None

    def learn(self, data: bytes, rows: Sequence[bytes], entries: Sequence[TensorEntry], known: int) -> None:
        """Take the rows of a blob that was read without a template, and how many of them were known."""
        templates, others = self._alike.get(data[:KEY_BYTES]) or _Alike()
        # Where less than that was known before no other layout has as much of this one.
        for other in others if _is_most(known, rows) else ():
            template = _template(data, rows, entries, other)
            if template is not None and len(templates) < ALIKE_MAX:
                others = [each for each in others if each is not other]
                self._alike.keep(data[:KEY_BYTES], len(rows), _Alike((*templates, template), others))
                return
        if len(others) < ALIKE_MAX:
            self._alike.keep(data[:KEY_BYTES], len(rows), _Alike(templates, (*others, entries)))


def _template(
    data: bytes, rows: Sequence[bytes], entries: Sequence[TensorEntry], other: Sequence[TensorEntry]
) -> Template | None:
    """Return what two layouts have alike, or None if that is not most of them, or they begin or end unlike."""
    alike = [*map(is_, entries, other)]
    if len(entries) != len(other) or not (_is_most(sum(alike), rows) and alike[0] and alike[-1]):
        return None
    runs, at, gap = [], 0, 0
    for is_alike, group in groupby(alike):
        end = at + len([*group])
        if is_alike:
            its = b"".join(rows[at:end])
            runs.append(_Run(its[:PROBE_BYTES], its, entries[at:end], gap))
        gap, at = end - at, end
    body = b"".join(rows)
    if not data.endswith(body):
        return None
    first, *behind = runs
    return Template(data[: -len(body)] + first.data, first.entries, behind, sum(alike))


def _is_most(count: int, rows: Sequence[bytes]) -> bool:
    return len(rows) > 0 and count >= MOST * len(rows)


ENTRIES_MAX: Final = 131_072
"""Some 80 MB at worst. Once there are more all are forgotten, and read anew."""

_ARRAY: Final = b"\xdd"
"""MessagePack: an array, whose length follows in four bytes."""


class _Blob(msgspec.Struct):
    tensors: tuple[msgspec.Raw, ...]


_layouts: Final = msgspec.msgpack.Decoder(Layout)
_blobs: Final = msgspec.msgpack.Decoder(_Blob)
_entries: Final = msgspec.msgpack.Decoder(tuple[TensorEntry, ...])


class LayoutReader:
    """The entries that were read, by their encoded form. Several threads may read at once."""

    def __init__(self, entries_max: int = ENTRIES_MAX, trials_max: int = TRIALS_MAX) -> None:
        """Begin with none."""
        self._entries_max = entries_max
        self._known: dict[bytes, TensorEntry] = {}
        self._between: dict[bytes, tuple[TensorEntry, ...]] = {}
        """What stands in gaps of templates."""
        self._between_count = 0
        self._templates = LayoutTemplates()
        self._trials = LookupBudget(trials_max)

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._known) + self._between_count

    def decoded(self, data: bytes, digest: str) -> Layout:
        """Read a layout and check it. Raises `LayoutMismatch` for what is none."""
        try:
            entries = self._by_template(data)
            if entries is None:
                raw = _blobs.decode(data).tensors
                if not self._trials.pays(raw, lambda row: bytes(row) in self._known):
                    return layout_of(_layouts.decode(data).tensors)
                rows, before = [*map(bytes, raw)], len(self._known)
                entries = self._read(rows)
                self._templates.learn(data, rows, entries, len(rows) + before - len(self._known))
            return layout_of_checked(entries)
        except MALFORMED as error:
            raise LayoutMismatch(
                f"what stands in the blob store as layout {digest[:12]} is no layout: {error}"
            ) from None

    def _by_template(self, data: bytes) -> list[TensorEntry] | None:
        """Return what stands in a blob that has most rows of one before, or None if there is none such."""
        found = self._templates.found(data)
        if found is None:
            return None
        template, gaps = found
        known = [*map(self._between.get, gaps)]
        try:
            between = [
                _entries.decode(_array(run.gap, gap)) if each is None else each
                for each, gap, run in zip(known, gaps, template.runs, strict=True)
            ]
        except MALFORMED:
            # A run was found where none begins, or a row is none: reading row by row finds out.
            return None
        if any(len(each) != run.gap for each, run in zip(between, template.runs, strict=True)):
            return None
        missing = [(gap, each) for gap, each, old in zip(gaps, between, known, strict=True) if old is None]
        if missing:
            read = [entry for _, each in missing for entry in each]
            check_entries(read)
            self._make_room(len(read))
            if len(read) <= self._entries_max:
                self._between.update(missing)
                self._between_count += len(read)
        self._trials.count(template.rows, 0)
        return template.filled(between)

    def _make_room(self, count: int) -> None:
        if len(self) + count > self._entries_max:
            self._known.clear()
            self._between.clear()
            self._between_count = 0

    def _read(self, raw: Sequence[bytes]) -> list[TensorEntry]:
        """Return what stands in these; what is not known yet is read, and kept."""
        known = [*map(self._known.get, raw)]
        whole = [entry for entry in known if entry is not None]
        if len(whole) == len(raw):
            self._trials.count(len(raw), 0)
            return whole
        missing = [row for row, entry in zip(raw, known, strict=True) if entry is None]
        read = _entries.decode(_array(len(missing), *missing))
        check_entries(read)
        self._trials.count(len(raw) - len(read), len(read))
        self._make_room(len(read))
        self._known.update(zip(missing[: self._entries_max], read, strict=False))
        rest = iter(read)
        return [next(rest) if entry is None else entry for entry in known]


def _array(count: int, *items: bytes) -> bytes:
    """Return this many items as a MessagePack array."""
    return b"".join((_ARRAY, count.to_bytes(4), *items))
