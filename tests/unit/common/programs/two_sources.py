"""A program by hand: rows of two sources and a copy, as a whole and in halves."""

from tensorhub_common.programs.program import Cell, SourceBox, TensorGroup, TransferProgram, UnitSplit

CUT = UnitSplit((5, 4), (8, 2), 2, dim=0, rows=2, units=3)
"""A box of 5 rows of 4 elements of two bytes, two rows at a time."""
HALF = UnitSplit((5, 2), (8, 2), 2, dim=0, rows=5, units=1)
BOTH = (Cell(0, HALF, (SourceBox(0, 0, (4, 2), 2, ""),)), Cell(4, HALF, (SourceBox(1, 0, (4, 2), 2, ""),)))
"""The left half of each row is one source's, the right half another one's."""
PROGRAM = TransferProgram(
    "reader",
    ("left", "right", "copy"),
    ((Cell(0, CUT, (SourceBox(0, 16, (100, 2), 2, ""), SourceBox(1, 0, (8, 2), 2, ""))),), BOTH),
    (TensorGroup(0, (0, 2), (0, 256), ((1000, 0), (2000, 40))), TensorGroup(1, (0, 1), (512,), ((3000, 4000),))),
)
