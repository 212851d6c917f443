"""Padding of mapped tensors: elements that no global tensor has, and that no program writes.

Replicas of one layout must hold equal bytes at equal versions, so whoever was filled by a program makes its padding
zero before it says what its memory hashes to: whatever stood there belonged to nobody.
"""

import numpy as np

from tensorhub_common.layout.layout import Layout, placements


def blank(view: memoryview, layout: Layout) -> None:
    """Write zeros into the padding of a segment of this layout."""
    if not any(entry.parts for entry in layout.tensors):
        return
    memory = np.frombuffer(view, np.uint8)
    for entry, at in zip(layout.tensors, placements(layout), strict=True):
        empty = [part for part in entry.parts if part.is_padding and 0 not in part.shape]
        if empty:
            tensor = memory[at : at + entry.nbytes].reshape(*entry.shape, entry.itemsize)
            for part in empty:
                tensor[tuple(slice(a, b) for a, b in zip(part.start, part.stop, strict=True))] = 0
