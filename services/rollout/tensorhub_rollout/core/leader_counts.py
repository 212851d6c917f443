"""What a leader has counted since it began, for metrics. Never a part of a decision."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

DiscardReason = Literal["restart", "age", "rewind"]
"""Why a response is begun anew, and its tokens are made again."""


@dataclass(slots=True)
class LeaderCounts:
    """Counts of one leader. Each is counted where something ends, and none for a token or a frame."""

    attempts: int = 0
    instances_lost: int = 0
    tokens_of_lost: int = 0
    """Tokens that came from instances which are lost."""
    discarded: Counter[DiscardReason] = field(default_factory=Counter)
    """Tokens that are made again."""
