"""The flow control of a read's sources: which sources to ask for more after an event, and when to confirm early. Pure.

`RefillQueue` selects the sources to ask for more: those that the event concerned, and those that had to wait. A source
is asked for as much as it may have under way. One of three limits stops it:
- its own pace, which only an event of its own changes;
- its part of the window, which grows when fewer sources are busy;
- the window, in which other sources make room.

`wants_early_confirmation` tells when to ask a source to confirm what has come, while it still brings more.

Invariant: a source that may be asked for more is `concerned`, or one of those that `waiting` yields while there is
room.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tensorhub_agent.transfer.role_index import RoleIndex, by_number
from tensorhub_agent.transfer.source import Source


@dataclass(slots=True, eq=False)
class RefillQueue:
    """The sources of one read that have pieces to be asked for, and could be asked for no more."""

    is_relayed: bool = False
    """Others waited for what came when sources were asked last."""
    _for_room: dict[int, Source] = field(default_factory=dict)
    _for_part: dict[int, Source] = field(default_factory=dict)
    """The longest waiting first; some may be closed by now, or have nothing more."""
    _part_bytes: int = 0
    """What a source's part of the window was when these were asked."""

    def affected(self, index: RoleIndex, part_bytes: int) -> list[Source]:
        """Return, by number, those that something has happened to, or whose part of the window has grown to this."""
        found = index.fresh
        if self._for_part and part_bytes > self._part_bytes:
            found = {**found, **self._for_part}
            self._for_part.clear()
        self._part_bytes = part_bytes
        return list(found.values()) if len(found) == 1 else by_number(found)

    def waiting(self) -> Iterator[Source]:
        """Yield those that wait for room in the window, each once. One that is not taken goes on waiting."""
        for _ in range(len(self._for_room)):
            yield self._for_room.pop(next(iter(self._for_room)))

    def stopped(self, source: Source, part_bytes: int) -> None:
        """Take note of what stops a source that was asked for as much as it may have."""
        if not source.queue:
            return
        if source.in_flight_bytes < source.pace.in_flight_limit(part_bytes):
            self._for_room[source.number] = source
        elif source.in_flight_bytes >= part_bytes:
            self._for_part[source.number] = source


def wants_early_confirmation(source: Source, *, is_relayed: bool) -> bool:
    """Tell whether to ask a source about what has come so far; `is_relayed`: others wait for what comes here.

    Partials are always asked about: the next ones come after that, and values wait for their folds.
    """
    wanted_bytes = source.limits.relayed_far_bytes if source.share.far else source.limits.relayed_bytes
    return bool(source.partials_outstanding) or (is_relayed and source.unconfirmed_bytes >= wanted_bytes)
