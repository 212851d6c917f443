"""The serving side of a lease on one connection, without I/O: messages in, messages out. Both transports use it.

`_MOVES` is the whole life of a connection. A ticket opens a lease; the reader is done, the source breaks the lease, or
the connection is lost. After the last byte of a lease that is done, a connection may wait for another ticket.

Invariant: the authority is told of the end of each opened lease exactly once, unless it has broken the lease itself.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from tensorhub_agent.primitives.lease_messages import (
    REASON_CHARS_MAX,
    AvailabilityUpdate,
    ConfirmReply,
    ConfirmRequest,
    Denied,
    Hello,
    LeaseBroken,
    PiecesAvailable,
    PiecesPromised,
    ReaderDone,
    Renew,
    SourceMessage,
    Welcome,
)
from tensorhub_agent.transports.base import LeaseAuthority, LeaseOpened, TicketRejected
from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.handshake import Speaks, agreed, speaks


class LeaseState(Enum):
    """What a connection may do."""

    WAITING = auto()
    """It has shown no ticket yet."""
    OPEN = auto()
    DONE = auto()
    """The reader has finished; what it asked for before may still be on its way."""
    BROKEN = auto()
    """The source has ended the lease."""
    ENDED = auto()
    """No lease can be opened on it any more."""


class _Move(Enum):
    ACCEPT = auto()
    REJECT = auto()
    FINISH = auto()
    RELEASE = auto()
    BREAK = auto()
    LOSE = auto()


_MOVES: Final[Mapping[tuple[LeaseState, _Move], tuple[LeaseState, bool | None]]] = {
    (LeaseState.WAITING, _Move.ACCEPT): (LeaseState.OPEN, None),
    (LeaseState.WAITING, _Move.REJECT): (LeaseState.ENDED, None),
    (LeaseState.WAITING, _Move.LOSE): (LeaseState.ENDED, None),
    (LeaseState.OPEN, _Move.FINISH): (LeaseState.DONE, None),
    (LeaseState.OPEN, _Move.BREAK): (LeaseState.BROKEN, None),
    (LeaseState.OPEN, _Move.LOSE): (LeaseState.ENDED, False),
    (LeaseState.DONE, _Move.RELEASE): (LeaseState.WAITING, True),
    (LeaseState.DONE, _Move.BREAK): (LeaseState.BROKEN, None),
    (LeaseState.DONE, _Move.LOSE): (LeaseState.ENDED, False),
    (LeaseState.BROKEN, _Move.LOSE): (LeaseState.ENDED, None),
}
"""For each state and move: the next state, and whether the authority is told that the reader is done (None: not told).

A move that is not here has no effect."""


class LeaseServer:
    """One connection of a reader. The transport sends what the methods return, in that order."""

    def __init__(self, agent: str, authority: LeaseAuthority) -> None:
        """Wait for a ticket for `agent`, which `authority` redeems."""
        self._agent, self._authority = agent, authority
        self.state = LeaseState.WAITING
        self.opened: LeaseOpened | None = None
        """What may be read, from the ticket to the end of the lease."""

    def receive(self, message: object) -> list[SourceMessage]:
        """Take what the reader says. Raises `BadCommand` for what may not be said now."""
        match self.state, message:
            case LeaseState.WAITING, Hello() as hello:
                return self._redeem(hello)
            case LeaseState.WAITING, _:
                raise BadCommand(f"the first frame must be Hello and was {type(message).__name__}")
            case LeaseState.OPEN, Renew():
                return [PiecesAvailable()] if self._authority.renew(self._lease) else []
            case LeaseState.OPEN, ConfirmRequest(number):
                return [ConfirmReply(number, self._authority.holds(self._lease))]
            case LeaseState.OPEN, ReaderDone():
                self._move(_Move.FINISH)
                return []
            case ((LeaseState.BROKEN | LeaseState.ENDED), _):
                return []  # The reader has not read of the end yet.
        raise BadCommand(f"{type(message).__name__} may not be said when a lease is {self.state.name.lower()}")

    def announce(self, update: AvailabilityUpdate) -> list[SourceMessage]:
        """Tell the reader of a half-filled shard of its pieces. `split_update` cuts what is too long for a frame."""
        return [update] if self.state is LeaseState.OPEN else []

    def break_lease(self, reason: str) -> list[SourceMessage]:
        """End the lease. The connection is to be closed once the reader has been told."""
        return [LeaseBroken(reason[:REASON_CHARS_MAX])] if self._move(_Move.BREAK) else []

    def release(self) -> bool:
        """End a lease that is done: nothing of it is under way any more. False: there is none."""
        if not self._move(_Move.RELEASE):
            return False
        self.opened = None
        return True

    def connection_lost(self) -> None:
        """End whatever is left: no message of this connection comes or goes any more."""
        self._move(_Move.LOSE)

    @property
    def _lease(self) -> str:
        assert self.opened is not None
        return self.opened.lease

    def _redeem(self, hello: Hello) -> list[SourceMessage]:
        answer: LeaseOpened | TicketRejected
        try:
            agreed(speaks(f"agent {self._agent}"), Speaks(hello.reader, hello.protocol, hello.newest))
        except BadCommand as why:
            answer = TicketRejected(str(why))
        else:
            answer = self._authority.redeem(hello.ticket, hello.reader)
        if isinstance(answer, TicketRejected):
            self._move(_Move.REJECT)
            return [Denied(answer.reason[:REASON_CHARS_MAX])]
        self.opened = answer
        self._move(_Move.ACCEPT)
        segment = answer.segment
        messages: list[SourceMessage] = [Welcome(segment.name, segment.nbytes, segment.origin, segment.device)]
        if answer.pieces is not None:
            messages.append(PiecesAvailable(answer.pieces))
        if answer.promised:
            messages.append(PiecesPromised(answer.promised))
        return messages

    def _move(self, move: _Move) -> bool:
        found = _MOVES.get((self.state, move))
        if found is None:
            return False
        self.state, done = found
        if done is not None:
            self._authority.ended(self._lease, done)
        return True
