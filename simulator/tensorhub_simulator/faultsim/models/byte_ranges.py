"""Where the pieces or units of a read stand, at the source and here, byte by byte."""

from collections.abc import Sequence
from typing import Protocol

from tensorhub_common.layout.layout import PieceTable
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.regions import Sizes


class Spans(Protocol):
    """What the numbers of a read mean."""

    def there(self, number: int) -> Sequence[int]:
        """Return which bytes of the source it is."""
        ...

    def here(self, number: int) -> Sequence[int]:
        """Return which bytes of the reader it is, in the same order."""
        ...


class PieceBytes:
    """Numbers are pieces of a layout that both ends have."""

    def __init__(self, table: PieceTable) -> None:
        """Take the pieces."""
        self._table = table

    def there(self, number: int) -> Sequence[int]:
        """Return which bytes of the source it is."""
        at = self._table.at[number]
        return range(at, at + self._table.nbytes[number])

    here = there


class UnitBytes:
    """Numbers are units of a program."""

    def __init__(self, program: NumberedProgram, layout: str) -> None:
        """Take them as a source of this layout gives them."""
        self._program, self._layout = program, layout

    def there(self, number: int) -> Sequence[int]:
        """Return which bytes of the source it is."""
        regions = self._program.regions(self._layout, [(number, 1)])
        form = regions.form[0]
        return _bytes(regions.origin[0], form.origin_shape, form.origin_strides, form.itemsize)

    def here(self, number: int) -> Sequence[int]:
        """Return which bytes of the reader it is, in the same order."""
        return bytes_here(self._program, self._layout, number)


def bytes_here(program: NumberedProgram, layout: str, unit: int) -> Sequence[int]:
    """Return which bytes of the destination a unit is, that a source of this layout gives."""
    regions = program.regions(layout, [(unit, 1)])
    form = regions.form[0]
    return _bytes(regions.to[0], form.shape, form.to_strides, form.to_itemsize)


def bytes_folded(program: NumberedProgram, unit: int) -> Sequence[int]:
    """Return which bytes of the destination a unit is that has to do with a fold; of a partial none."""
    if unit < program.partials:
        return ()
    entries = next(program.entries([(unit, 1)]))
    return _bytes(entries.to, entries.form.shape, entries.form.to_strides, entries.form.to_itemsize)


def _bytes(at: int, shape: Sizes, strides: Sizes, itemsize: int) -> list[int]:
    where = [at]
    for size, stride in zip(shape, strides, strict=True):
        where = [start + step * stride for start in where for step in range(size)]
    return [start + byte for start in where for byte in range(itemsize)]
