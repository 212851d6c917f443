"""Padding is zero after a fill by a program, and nothing else is touched."""

import numpy as np

from tensorhub_agent.padding import blank
from tensorhub_common.layout import TensorEntry, layout_of, placements, segment_bytes
from tensorhub_common.parts import Part, padding


def test_padding_becomes_zero_and_nothing_else_does() -> None:
    part = Part("v", (3, 4), (0, 0), (3, 4), (0, 0), (3, 4))
    fused = TensorEntry("e", "int16", 2, (5, 4), (5, 4), (0, 0), (part, padding((3, 0), (2, 4))))
    layout = layout_of([fused, TensorEntry("w", "int16", 2, (7,), (7,), (0,))])
    memory = bytearray(b"\xff" * segment_bytes(layout))
    blank(memoryview(memory), layout)
    at = dict(zip((entry.name for entry in layout.tensors), placements(layout), strict=True))
    expected = np.full(segment_bytes(layout), 255, np.uint8)
    expected[at["e"] + 3 * 8 : at["e"] + 5 * 8] = 0
    np.testing.assert_array_equal(np.frombuffer(memory, np.uint8), expected)
