"""A reader of layout blobs that parses and checks equal content once and shares it as one object. Pure.

`LayoutReader` stores entries by their encoded form: equal bytes are the same entry. The ranks of a stage repeat the
same norms and the same rows of a projection. Thousands of layouts have ten times as many entries as there are
different ones. If layouts share nothing, the reader skips the search (`LookupBudget`).

Invariants:
- At most `ENTRIES_MAX` entries are kept, and each of them was checked by itself.
- Each layout is checked for how its entries go together.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout, TensorEntry, check_entries, layout_of, layout_of_checked
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_planner.compiler.memo import TRIALS_MAX, LookupBudget

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
        self._trials = LookupBudget(trials_max)

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._known)

    def decoded(self, data: bytes, digest: str) -> Layout:
        """Read a layout and check it. Raises `LayoutMismatch` for what is none."""
        try:
            raw = _blobs.decode(data).tensors
            if not self._trials.pays(raw, lambda row: bytes(row) in self._known):
                return layout_of(_layouts.decode(data).tensors)
            return layout_of_checked(self._read([*map(bytes, raw)]))
        except MALFORMED as error:
            raise LayoutMismatch(
                f"what stands in the blob store as layout {digest[:12]} is no layout: {error}"
            ) from None

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
        if len(self._known) + len(read) > self._entries_max:
            self._known.clear()
        self._known.update(zip(missing[: self._entries_max], read, strict=False))
        rest = iter(read)
        return [next(rest) if entry is None else entry for entry in known]


def _array(count: int, *items: bytes) -> bytes:
    """Return so many items as MessagePack has them."""
    return b"".join((_ARRAY, count.to_bytes(4, "big"), *items))
