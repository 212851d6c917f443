"""Padding is zero after a fill by a program, and nothing else is touched."""

import numpy as np

from tensorhub_agent.jobs.memory_tasks import blank
from tensorhub_common.layout.layout import TensorEntry, layout_of, placements, segment_bytes
from tensorhub_common.layout.parts import Part, padding


def test_padding_becomes_zero_and_nothing_else_does() -> None:
    """Right of one part, and between it and another one."""
    upper = Part("v", (3, 3), (0, 0), (3, 3), (0, 0), (3, 3))
    lower = Part("u", (1, 4), (0, 0), (1, 4), (4, 0), (1, 4))
    consists = (upper, padding((0, 3), (3, 1)), padding((3, 0), (1, 4)), lower)
    fused = TensorEntry("e", "int16", 2, (5, 4), (5, 4), (0, 0), consists)
    layout = layout_of([fused, TensorEntry("w", "int16", 2, (7,), (7,), (0,))])
    memory = bytearray(b"\xff" * segment_bytes(layout))
    blank(memoryview(memory), layout)
    at = dict(zip((entry.name for entry in layout.tensors), placements(layout), strict=True))
    expected = np.full(segment_bytes(layout), 255, np.uint8)
    for row in range(3):
        expected[at["e"] + row * 8 + 6 : at["e"] + row * 8 + 8] = 0
    expected[at["e"] + 3 * 8 : at["e"] + 4 * 8] = 0
    np.testing.assert_array_equal(np.frombuffer(memory, np.uint8), expected)
