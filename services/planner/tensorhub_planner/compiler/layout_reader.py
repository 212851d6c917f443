"""Reads layouts out of their blobs; what many ranks have alike is read and checked once, and is one object. Pure.

The ranks of a stage hold the same norms and the same rows of a projection many times over, and thousands of layouts
have ten times as many entries as there are different ones. An entry's encoded form is its content: the same bytes are
the same entry.

Where nothing is alike nothing is looked for (`trials`); where all is alike but for a few entries, only these are taken
by themselves (`templates`).

Always true: at most `ENTRIES_MAX` entries are kept, each of which was checked by itself; how the entries of a layout go
together is checked for each layout.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout, TensorEntry, check_entries, layout_of, layout_of_checked
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_planner.compiler.templates import Templates
from tensorhub_planner.compiler.trials import Trials

ENTRIES_MAX: Final = 131_072
"""Some 80 MB at worst. Once there are more all are forgotten, and read anew."""

_ARRAY: Final = b"\xdd"
"""MessagePack: an array, whose length follows in four bytes."""


class _Blob(msgspec.Struct):
    tensors: tuple[msgspec.Raw, ...]


_layouts: Final = msgspec.msgpack.Decoder(Layout)
_blobs: Final = msgspec.msgpack.Decoder(_Blob)
_entries: Final = msgspec.msgpack.Decoder(tuple[TensorEntry, ...])


class Entries:
    """The entries that were read, by their encoded form. Several threads may read at once."""

    def __init__(self, entries_max: int = ENTRIES_MAX, trials: Trials | None = None) -> None:
        """Begin with none."""
        self._entries_max = entries_max
        self._known: dict[bytes, TensorEntry] = {}
        self._between: dict[bytes, tuple[TensorEntry, ...]] = {}
        """What stands in gaps of templates."""
        self._between_count = 0
        self._templates = Templates()
        self._trials = Trials() if trials is None else trials

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
            # A run was found where none begins, or a row is none: whoever reads row by row finds out.
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
    """Return so many items as MessagePack has them."""
    return b"".join((_ARRAY, count.to_bytes(4, "big"), *items))
