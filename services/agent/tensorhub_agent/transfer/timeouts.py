"""How long a source of a read may go on as it does, without progress or without anything new. Pure.

docs/design/protocol/transfer-faults.md, says why each bound is safe.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tensorhub_agent.transfer.source import Source

OPEN_S_MAX: Final = 2.0
"""A source that has not granted a lease and opened a transport within this is left out."""

CROSSER_OPEN_S_MAX: Final = 10.0
"""Nor one of the reader's group within this, which has to open a source in another site first; nor that one: where it
is left its part crosses to another reader."""

WAITING_SILENT_S: Final = 3.0
"""A half-filled source of which pieces are awaited says at least with each renewal that it lives: three of them."""

CROSSER_SILENT_S: Final = 30.0
"""One of the reader's group may be silent for longer, as long as the log has not lost its agent: to leave it means to
bring its part over once more. The connection of one that is killed ends at once, and one that is stopped is lost."""

CROSSER_STARVED_S: Final = 60.0
"""Such a one may have nothing new for so long: what it promises it has under way, and gives up by itself."""

FAR_BPS_MIN: Final = 500_000
"""A source in another site is given so long as this takes for what is under way: the transport brings all of that side
by side, so that the first of it may come with the last."""

FAR_SILENT_S: Final = 30.0
"""But not longer. One that is stopped is lost to the log long before, and then the bounds of any source count."""

STARVED_TIMES: Final = 2
"""A half-filled source may have nothing new for so many times `stall_s`: it may have to leave its own source first."""

FOREVER: Final = float("inf")


def opening_s(source: "Source") -> float:
    """Return how long a source may take that is being opened, or asked for a lease."""
    is_worth_it = (source.share.crosses or source.share.far) and not source.is_lost
    return CROSSER_OPEN_S_MAX if is_worth_it else OPEN_S_MAX


def waiting_deadline(source: "Source", stall_s: float) -> float:
    """Return until when an open source may go on of which nothing but what it does not have yet is awaited."""
    if not source.share.crosses:
        return min(source.last_progress_at + WAITING_SILENT_S, source.last_new_at + STARVED_TIMES * stall_s)
    silent_s = WAITING_SILENT_S if source.is_lost else CROSSER_SILENT_S
    return min(source.last_progress_at + silent_s, source.last_new_at + CROSSER_STARVED_S)


def silence_limit_s(source: "Source", stall_s: float) -> float:
    """Return how long an open source may be silent."""
    is_awaited = bool(source.in_flight) or source.confirming or bool(source.confirming_early)
    if is_awaited and not source.is_lost:
        if source.share.crosses:
            return CROSSER_SILENT_S
        if source.share.far:
            return min(FAR_SILENT_S, stall_s + (source.flying_bytes + source.unconfirmed_bytes) / FAR_BPS_MIN)
    if source.confirming or (source.confirming_early and not source.in_flight):
        return stall_s
    return source.pace.patience_s(source.flying_bytes, stall_s) if source.in_flight else FOREVER
