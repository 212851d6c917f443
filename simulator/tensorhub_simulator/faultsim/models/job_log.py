"""The modelled log: one total order, a duplicate window, appends against the last event, and a beginning that moves.

What arrives here is stored at once; that requests and acknowledgements take time and get lost is the business of those
who send them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tensorhub_common.protocol.log.codec import decode_event
from tensorhub_common.protocol.log.events import AnyEvent
from tensorhub_simulator.engine.clock import Clock, Node
from tensorhub_simulator.faultsim.models.snapshots import DurableSnapshots

EPOCH_S: Final = 1_700_000_000.0
NO_HEADERS: Final[Mapping[str, str]] = {}
MESSAGES_A_STEP_MAX: Final = 64
"""A follower that begins far behind reads this many entries in one step."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What stands in the log under one number."""

    seq: int
    time: float
    subject: str
    data: bytes
    msg_id: str
    event: AnyEvent | None
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)


class WrongLast(Exception):
    """The log's last event is another one than was expected."""


class JobLogModel:
    """A job's stream."""

    def __init__(self, clock: Clock, window_s: float, nats: Node) -> None:
        """Begin empty; ids are remembered for `window_s`. `nats` is the process that keeps it."""
        self.clock, self.window_s = clock, window_s
        self.up = True
        self.nats = nats
        self.skew_s = 0.0
        """How far the servers' wall clock is off now; it may also go back."""
        self.entries: list[Entry] = []
        """All that ever stood in it, for the invariants; followers get nothing from before `first`."""
        self.first = 1
        self.snapshots = DurableSnapshots()
        self.last_event_seq = 0
        self.watchers: list[Callable[[Entry], None]] = []
        self.followers: list[Follower] = []
        self._ids: dict[str, tuple[float, int]] = {}

    def append(
        self, subject: str, data: bytes, msg_id: str, expected: int | None = None, behind: str | None = None
    ) -> int:
        """Store an entry unless its id is known; returns its number. Raises `WrongLast`.

        `behind`: the id that the last entry must have.
        """
        # The server compares with what it still has.
        standing = self.last_event_seq if self.last_event_seq >= self.first else 0
        if expected is not None and expected != standing:
            last = self.entries[self.last_event_seq - 1] if self.last_event_seq else None
            if last is not None and last.msg_id == msg_id:
                return last.seq
            raise WrongLast
        known = self._ids.get(msg_id)
        if known is not None and self.clock.now - known[0] <= self.window_s:
            return known[1]
        if behind is not None and (not self.entries or self.entries[-1].msg_id != behind):
            raise WrongLast
        event = decode_event(data) if ".event." in subject else None
        entry = Entry(len(self.entries) + 1, EPOCH_S + self.clock.now + self.skew_s, subject, data, msg_id, event)
        self.entries.append(entry)
        self._ids[msg_id] = (self.clock.now, entry.seq)
        if event is not None:
            self.last_event_seq = entry.seq
        for watcher in self.watchers:
            watcher(entry)
        self.followers = [follower for follower in self.followers if follower.lives]
        self.wake()
        return entry.seq

    def trim(self, first: int) -> None:
        """Remove what stands before, but not what an agent is still to read: production keeps it for long."""
        wanted = [each.position + 1 for each in self.followers if each.lives and each.gap is None]
        self.first = max(self.first, min([first, *wanted]))

    def back(self) -> None:
        """The log can be reached again."""
        self.up = True
        self.wake()

    def wake(self) -> None:
        """Go on with the followers that wait for entries."""
        for follower in self.followers:
            follower.wake()


class Follower:
    """Brings a node the log's entries in their order, each once, some time after they were stored."""

    def __init__(
        self,
        log: JobLogModel,
        node: Node,
        position: int,
        take: Callable[[Entry], None],
        *,
        events: bool,
        gap: Callable[[], None] | None = None,
    ) -> None:
        """Begin after entry number `position`. `events`: nothing but events. `gap`: the next entry is gone."""
        self.log, self.node, self.position = log, node, position
        self.gap = gap
        self._take, self._events = take, events
        self._life = node.life
        self._planned = False
        log.followers.append(self)
        self.wake()

    @property
    def lives(self) -> bool:
        """Whether its node still lives the life in which this was begun."""
        return self.node.up and self.node.life == self._life

    @property
    def _reaches(self) -> bool:
        log = self.log
        return log.up and not log.nats.state.paused and not self.node.state.cut_off

    def wake(self) -> None:
        """Plan the next delivery if there is something to deliver."""
        if not self._planned and self.lives and self._reaches and self.position < len(self.log.entries):
            self._planned = True
            self.log.clock.after(self.node.lag(), self.node, self._deliver)

    def _deliver(self) -> None:
        self._planned = False
        if not self._reaches:
            return
        if self.gap is not None and self.position + 1 < self.log.first:
            self.log.followers = [each for each in self.log.followers if each is not self]
            self.gap()
            return
        entries = self.log.entries
        behind = len(entries) - self.position
        for _ in range(1 if behind < MESSAGES_A_STEP_MAX else MESSAGES_A_STEP_MAX):
            while self._events and self.position < len(entries) and entries[self.position].event is None:
                self.position += 1
            if self.position >= len(entries) or not self.lives:
                break
            self.position += 1
            self._take(entries[self.position - 1])
        self.wake()
