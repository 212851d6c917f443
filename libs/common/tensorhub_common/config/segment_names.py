"""How the shared segments of one hub are named, so that a process finds those of its own hub and of no other."""

import hashlib
from pathlib import Path
from typing import Final

HUB_ID_BYTES: Final = 4
"""The length of the digest of the hub's directory in the names of its segments."""


def segment_beginning(directory: Path) -> str:
    """Return how the names of all segments of the hub in this directory begin; it keeps two hubs on one host apart."""
    hub = hashlib.blake2b(str(directory.resolve()).encode(), digest_size=HUB_ID_BYTES).hexdigest()
    return f"tensorhub-{hub}-"
