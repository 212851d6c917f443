"""The stream of snapshots: the two newest ones, and the index that names them."""

from dataclasses import dataclass, field

from tensorhub_common.catalog.snapshot import Snapshot, decode

Record = tuple[int, bytes]
"""At which entry, and the bytes that stand for its digest."""


@dataclass(slots=True)
class DurableSnapshots:
    """What stands in the snapshot stream."""

    newer: Record | None = None
    older: Record | None = None
    written: int = 0
    """How often the index was."""
    parts: dict[bytes, None] = field(default_factory=dict)
    made: int = 0
    loaded: int = 0

    def newest(self, job: str, beyond: int) -> Snapshot | None:
        """Return what a fold may go on with, or None."""
        for record in (self.newer, self.older):
            if record is not None and record[0] > beyond and record[1] in self.parts:
                self.loaded += 1
                return decode(job, record[1])
        return None
