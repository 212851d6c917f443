"""A network of links on which connections share bandwidth, as flows and not as packets. Pure.

Each connection with something to send gets its max-min fair rate: no connection can have more unless one that has no
more than it gets less. A connection has a ceiling of its own beside its links (`stream_bytes_s`). The rates change only
when a connection begins or ends to have something to send. Then only the rates that the change can reach are solved
again: a link whose connections together can't fill it joins no connections to each other.

`stream_bytes_s` is how fast one stream of a transport can be over a link with a round trip and loss. TCP sends at most
a window in a round trip. If packets are lost, it sends at most what Mathis, Semke, Mahdavi and Ott gave in "The
macroscopic behavior of the TCP congestion avoidance algorithm" (1997): MSS / RTT · sqrt(3/2) / sqrt(p). Newer
congestion controls bear loss better; `loss` is then what it looks like to them. RDMA is used inside a site only, where
neither bounds it.

Invariants:
- The rates on a link add up to at most its capacity.
- The bytes that came out of a link went into it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import sqrt
from typing import Final

from tensorhub_simulator.engine.agenda import Agenda

UNBOUND: Final = 1 << 62
"""The ceiling of a connection that has none, in bytes a second."""

Span = tuple[float, float, float]
"""Bytes that a link carried: from when, until when, how many."""


@dataclass(slots=True, eq=False)
class Link:
    """One direction of a wire, or a memory. Capacities are whole numbers, so that sums of them are exact."""

    name: str
    bytes_s: int
    tier: str = ""
    """Links of one tier are shown together."""
    carried: float = 0.0
    demand: int = 0
    """What its connections could send at most, all together."""
    active: "dict[Connection, None]" = field(default_factory=dict)

    @property
    def is_contended(self) -> bool:
        """Whether its connections have to share it."""
        return self.demand > self.bytes_s


@dataclass(slots=True, eq=False)
class Message:
    """Bytes to be sent as one, and what to do when they have come."""

    nbytes: int
    left: float
    done: Callable[[], None]


@dataclass(slots=True, eq=False)
class Connection:
    """A way from a sender to a receiver. Its messages go one after the other."""

    links: tuple[Link, ...]
    ceiling: int = UNBOUND
    rate: float = 0.0
    messages: deque[Message] = field(default_factory=deque)
    bound: int = 0
    since: float = 0.0
    plans: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        """See what it could send if it were alone."""
        self.bound = max(min(self.ceiling, *(link.bytes_s for link in self.links)), 1)

    def partial_bytes(self) -> float:
        """Return what has come of a message that has not come as a whole."""
        return self.messages[0].nbytes - self.messages[0].left if self.messages else 0.0


class Network:
    """All connections, and the time at which each of their messages has come."""

    def __init__(self, agenda: Agenda) -> None:
        """Take the time."""
        self._agenda = agenda
        self.came_at = 0.0
        """When a message last came."""
        self.seen: dict[str, list[Span]] | None = None
        """What the links of each tier carried when, for who sets this to an empty dictionary: a picture wants it."""

    def send(self, connection: Connection, nbytes: int, done: Callable[[], None]) -> None:
        """Send a message; `done` is called once it has come. On a closed connection nothing comes."""
        if connection.closed:
            return
        self._advance(connection)
        connection.messages.append(Message(nbytes, float(nbytes), done))
        if not connection.rate:
            self._change(connection, begins=True)
        elif len(connection.messages) == 1:
            self._plan(connection)

    def close(self, connection: Connection) -> None:
        """Drop what is under way; nothing more comes."""
        if connection.closed:
            return
        connection.closed = True
        self._advance(connection)
        connection.messages.clear()
        # Also when its last message has just come and neither side has been told yet: its part of the links is free.
        if connection.rate:
            self._change(connection, begins=False)

    def look(self, connection: Connection) -> float:
        """Return how much has come by now of messages that are not there yet."""
        self._advance(connection)
        return connection.partial_bytes()

    def _advance(self, connection: Connection) -> None:
        """Let the messages come as far as they have by now."""
        now, since = self._agenda.now, connection.since
        connection.since = now
        if now <= since or not connection.messages:
            return
        head = connection.messages[0]
        came = min(connection.rate * (now - since), head.left)
        head.left -= came
        self._carry(connection, since, came)

    def _carry(self, connection: Connection, since: float, nbytes: float) -> None:
        """Count what links have carried since a moment."""
        for link in connection.links:
            link.carried += nbytes
            if self.seen is not None:
                self.seen.setdefault(link.tier, []).append((since, self._agenda.now, nbytes))

    def _plan(self, connection: Connection) -> None:
        """Plan when the next message has come."""
        connection.plans += 1
        if not connection.messages:
            return
        takes_s = connection.messages[0].left / connection.rate
        plan = connection.plans
        self._agenda.after(takes_s, lambda: self._come(connection, plan))

    def _come(self, connection: Connection, plan: int) -> None:
        """Deliver what has come, unless the rate has changed since that was planned."""
        if connection.plans != plan:
            return
        self._advance(connection)
        head = connection.messages.popleft()
        self.came_at = self._agenda.now
        # Times are floating-point numbers: what rounding has left of it has come as well.
        self._carry(connection, connection.since, head.left)
        if connection.messages:
            self._plan(connection)
        head.done()
        if not connection.messages and not connection.closed:
            self._change(connection, begins=False)

    def _change(self, connection: Connection, *, begins: bool) -> None:
        """Solve again for all whom a connection's beginning or end can reach."""
        reached: list[Link] = []
        for link in connection.links:
            before = link.is_contended
            if begins and connection not in link.active:
                link.active[connection] = None
                link.demand += connection.bound
            elif not begins and connection in link.active:
                del link.active[connection]
                link.demand -= connection.bound
            if before or link.is_contended:
                reached.append(link)
        if not begins:
            connection.rate = 0.0
            connection.plans += 1
        changed = _component(reached)
        if begins:
            changed.setdefault(connection)
        rates = fair(changed)
        for each, rate in rates.items():
            if rate != each.rate:
                self._advance(each)
                each.rate = rate
                self._plan(each)
            elif each is connection:
                self._plan(each)


def _component(links: Iterable[Link]) -> dict[Connection, None]:
    """Return all connections that these links join, over links that are contended."""
    found: dict[Connection, None] = {}
    seen: dict[Link, None] = dict.fromkeys(links)
    actions = list(seen)
    while actions:
        for connection in actions.pop().active:
            if connection in found:
                continue
            found[connection] = None
            for link in connection.links:
                if link.is_contended and link not in seen:
                    seen[link] = None
                    actions.append(link)
    return found


def fair(connections: Iterable[Connection]) -> dict[Connection, float]:
    """Return the max-min fair rates of connections that share contended links with each other alone."""
    waiting = sorted(connections, key=lambda connection: connection.bound)
    filling = _Filling(waiting)
    for connection in waiting:
        while connection not in filling.rates:
            tight, share = filling.tightest()
            if connection.bound <= share or tight is None:
                filling.settle(connection, float(connection.bound))
                continue
            for each in [one for one in tight.active if one not in filling.rates]:
                filling.settle(each, share)
    return filling.rates


class _Filling:
    """Links that are filled, connection by connection: what room is left, and for how many."""

    def __init__(self, connections: Iterable[Connection]) -> None:
        self.rates: dict[Connection, float] = {}
        self._room: dict[Link, float] = {}
        self._count: dict[Link, int] = {}
        for connection in connections:
            for link in connection.links:
                if link.is_contended:
                    self._room[link] = float(link.bytes_s)
                    self._count[link] = self._count.get(link, 0) + 1

    def tightest(self) -> tuple[Link | None, float]:
        """Return the link that has the least for each of its connections, and how much that is."""
        room, count = self._room, self._count
        tight = min(room, key=lambda link: room[link] / count[link], default=None)
        return tight, float(UNBOUND) if tight is None else room[tight] / count[tight]

    def settle(self, connection: Connection, rate: float) -> None:
        """Give a connection its rate for good."""
        self.rates[connection] = rate
        for link in connection.links:
            if link in self._room:
                self._room[link] = max(self._room[link] - rate, 0.0)
                self._count[link] -= 1
                if not self._count[link]:
                    del self._room[link], self._count[link]


MSS_BYTES: Final = 1448
"""An Ethernet frame's payload without the headers of IP and TCP with time stamps."""

FRAME_BYTES: Final = 1514
"""What the same frame takes of a wire that is shaped by frames."""

WIRE: Final = MSS_BYTES / FRAME_BYTES
"""So much of a wire's bytes is payload, over TCP."""

MATHIS: Final = sqrt(1.5)


def stream_bytes_s(window_bytes: int, rtt_s: float, loss: float) -> int:
    """Return the ceiling of one stream, in bytes a second."""
    if rtt_s <= 0:
        return UNBOUND
    by_window = window_bytes / rtt_s
    by_loss = MATHIS * MSS_BYTES / (rtt_s * sqrt(loss)) if loss > 0 else float(UNBOUND)
    return max(int(min(by_window, by_loss, UNBOUND)), 1)
