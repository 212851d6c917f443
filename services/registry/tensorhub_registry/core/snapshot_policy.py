"""When a job's snapshot is due, and how far its log may be trimmed. Pure.

Invariants:
- Only entries that a snapshot covers are trimmed.
- While the log has room, only entries that two snapshots cover, and none that a follower which was away may still need.
- The last event stays, since the next one is published against its sequence.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

SNAPSHOT_ENTRIES_MAX: Final = 20_000
"""A snapshot is due after this many entries. A registry that starts folds at most twice that, in a second or two."""

SNAPSHOT_LOG_BYTES_MAX: Final = 16 * 1024 * 1024
"""The same by the entries' bytes."""

SNAPSHOTS_PER_LOG_MIN: Final = 8
"""In a log with a low limit a snapshot is due each time that such a part of it has been written."""

LOG_KEEP_S_MIN: Final = 600.0
"""Entries younger than this stay, for watchers and agents that were away."""

LOG_KEEP_ENTRIES_MIN: Final = 10_000
"""This many entries before the older snapshot stay, whatever their age; the last outcomes are read from them."""

TIGHT_SHARE_MAX: Final = 0.5
"""Above this part of its limit the log is trimmed as far as the older snapshot, whatever may still be wanted."""

FULL_SHARE_MAX: Final = 0.9
"""Above this part it counts as full: it is trimmed as far as the newer snapshot, once that was read back."""

MARKS_MAX: Final = 4_096
"""Limit of snapshots whose times are remembered."""


@dataclass(slots=True)
class SnapshotPolicy:
    """How much of the log has come since the last snapshot."""

    at: int = 0
    """The entry of the last snapshot."""
    nbytes: int = 0
    """How large that was, compressed: while the log has room, none is made that is larger than what it sums up."""
    log_bytes: int = 0
    """The bytes of the entries since."""
    bytes_max: int = 0
    """The log's limit, 0: none is known."""
    is_full: bool = False
    """Whether the log takes nothing more, or soon will not: all that may go is to go at once."""
    roomy: int = 0
    """The last snapshot behind which all went that may go of a full log."""
    _summed_bytes: int = 0
    """The bytes of the entries that the snapshot sums up which is being kept."""
    _marks: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MARKS_MAX))

    def is_due(self, seq: int) -> bool:
        """Tell whether a snapshot at this entry is due."""
        if self.is_full:
            # One of this very entry may stand, and the log not be trimmed yet: then none but this would ever do it.
            return seq > self.at or self.at > self.roomy
        share = self.bytes_max // SNAPSHOTS_PER_LOG_MIN or SNAPSHOT_LOG_BYTES_MAX
        if self.log_bytes >= min(share, SNAPSHOT_LOG_BYTES_MAX):
            return seq > self.at
        return seq - self.at >= SNAPSHOT_ENTRIES_MAX and self.log_bytes >= self.nbytes

    def took(self, seq: int) -> None:
        """Count from this snapshot on; it is being kept."""
        self.at, self._summed_bytes, self.log_bytes = seq, self.log_bytes, 0

    def failed(self) -> None:
        """It could not be kept: what it was to sum up counts again, so the next one is due at once."""
        self.at = self._marks[-1][0] if self._marks else 0
        self.log_bytes += self._summed_bytes
        self._summed_bytes = 0

    def stored(self, seq: int, time: float) -> None:
        """A snapshot is kept; remember when its last entry was stored."""
        if not self._marks or seq > self._marks[-1][0]:
            self._marks.append((seq, time))
            self._summed_bytes = 0
        if seq > self.at:
            self.at, self.log_bytes = seq, 0

    def made_room(self, seq: int) -> None:
        """All that may go of a full log is gone behind this snapshot."""
        self.roomy, self.is_full = seq, False

    def first_kept(self, newer: int, older: int | None, last_event: int, now: float, fullness: float) -> int:
        """Return the first entry that must stay. `newer`, `older`: the snapshots that were read back and are whole.

        `last_event`: where the last event that is known stands. `now` is the log's own time.
        """
        if fullness >= FULL_SHARE_MAX:
            behind = newer
        elif older is None:
            return 0
        elif fullness >= TIGHT_SHARE_MAX:
            behind = older
        else:
            aged = [seq for seq, time in self._marks if time <= now - LOG_KEEP_S_MIN]
            behind = min(older, max(aged, default=0)) - LOG_KEEP_ENTRIES_MIN
        return max(0, min(behind + 1, last_event))
