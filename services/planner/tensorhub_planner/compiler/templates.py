"""Layouts that have all rows alike but for a few: what one had at a place the next is looked at for as a whole. Pure.

Ranks of a stage that cut alike differ in their experts' rows alone. A *template* is what two of them have alike: *runs*
of rows, byte by byte, and how many rows stand in each *gap* between two runs. Whether a layout has the same runs is
told by few comparisons, however many rows these have; what it has in the gaps is read as if there was no template.

Always true: a template's runs are whole rows that were read before; at most `PLACES_MAX` rows of layouts are remembered
to compare others with (`remembered`), and of those that begin alike at most `ALIKE_MAX` layouts and as many templates.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import is_
from typing import Final, NamedTuple

from tensorhub_common.layout.layout import TensorEntry
from tensorhub_planner.compiler.memo import Remembered

ALIKE_MAX: Final = 16
"""Ranks of trainers and engines of one stage begin alike, and have as many templates as tensor parallelism has ways."""

KEY_BYTES: Final = 64
"""Layouts whose blobs begin with the same bytes are compared: these say how many rows there are, and name the first."""

MOST: Final = 2 / 3
"""Such a part of a layout's rows is alike in two of which a template is made."""

PROBE_BYTES: Final = 64
"""A run is looked for by so many bytes, which is where a gap ends; then all of it is compared."""


class _Run(NamedTuple):
    probe: bytes
    data: bytes
    entries: Sequence[TensorEntry]
    gap: int
    """So many rows stand in front of it."""


class Template(NamedTuple):
    """What two layouts have alike, from where their blobs begin to where these end."""

    first: bytes
    """What stands in front of the first gap, the blob's own first bytes included."""
    entries: Sequence[TensorEntry]
    """What was read of that."""
    runs: Sequence[_Run]
    """Those behind the gaps."""
    rows: int
    """All of them have so many rows."""

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
        """Return a layout's entries, of which these stand in the gaps."""
        entries = [*self.entries]
        for run, its in zip(self.runs, between, strict=True):
            entries += its
            entries += run.entries
        return entries


class _Alike(NamedTuple):
    """What is remembered of layouts that begin alike."""

    templates: Sequence[Template] = ()
    """The one that fitted last stands last: ranks come in their order, and so the next one's comes first."""
    others: Sequence[Sequence[TensorEntry]] = ()
    """The entries of layouts that no template was made of."""


class Templates:
    """Templates by how blobs begin. Several threads may ask at once."""

    def __init__(self) -> None:
        """Begin with none."""
        self._alike = Remembered[bytes, _Alike]()

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
        """Take what was read of a blob without a template: its rows, of which so many were known."""
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
