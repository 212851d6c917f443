"""The reading side of a lease on one connection. Each transport adds how messages and bytes travel.

Invariants:
- The owner is told of a loss once, and not after it has called `close`.
- An error that escapes in a task of the session is a loss of the session.
- `close` returns only when no byte can be written into a destination any more.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

from tensorhub_agent.compute.batch import CopyStopped, PoolBatch
from tensorhub_agent.primitives.lease_messages import (
    CONFIRM_S,
    RENEW_S,
    ConfirmReply,
    ConfirmRequest,
    LeaseBroken,
    LeaseMessage,
    PiecesAvailable,
    PiecesHandedOff,
    PiecesPromised,
    PromiseRetracted,
    Renew,
)
from tensorhub_agent.runtime.shield import SharedShutdown
from tensorhub_agent.transports.base import OnAvailability, OnLost, TransportLost
from tensorhub_common.errors import BadCommand, TensorHubError
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.runtime.framed_socket import PeerGone
from tensorhub_common.runtime.supervision import Fault, Supervisor

_log: Final = logging.getLogger(__name__)


class LeaseSession(ABC):
    """One open lease, whatever is done with its memory; see `SourceSession`."""

    def __init__(self, what: str, on_lost: OnLost, on_have: OnAvailability) -> None:
        """Begin. `what` names the session in logs."""
        self._on_lost, self._on_have = on_lost, on_have
        self.over: str | None = None
        """Why the session is over, if it is."""
        self._confirmations: dict[int, asyncio.Future[bool]] = {}
        self._asked = 0
        self._copies: set[PoolBatch] = set()
        self._ending = SharedShutdown(self._end)
        self._work = Supervisor(what, self._failed)

    @abstractmethod
    async def _send(self, message: LeaseMessage) -> None:
        """Send a message to the source. Raises `PeerGone` when it can't be sent."""

    @abstractmethod
    async def _end(self) -> None:
        """End the session and the lease, once; see `SourceSession.close`."""

    async def close(self) -> None:
        """See `SourceSession.close`."""
        await self._ending.reached()

    def check_open(self) -> None:
        """Raise `TransportLost` if the session is over."""
        if self.over is not None:
            raise TransportLost(self.over)

    def lose(self, reason: str) -> None:
        """The source is of no more use: end all waiting, and tell the owner."""
        if self.over is None:
            self.over = reason
            self._end_waiting()
            self._on_lost(reason)

    def _failed(self, fault: Fault) -> None:
        self.lose(f"this agent has failed with {fault.error!r}")

    def _end_waiting(self) -> None:
        """End every wait for a message of the source: the lease has not held."""
        for answer in self._confirmations.values():
            if not answer.done():
                answer.set_result(False)

    async def still_holds(self) -> bool:
        """See `SourceSession.still_holds`."""
        if self.over is not None:
            return False
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._confirmations[number] = answer
        try:
            await self._send(ConfirmRequest(number))
            async with asyncio.timeout(CONFIRM_S):
                return await answer
        except TimeoutError:
            self.lose(f"the source has not said within {CONFIRM_S:g} s whether the lease holds")
        except PeerGone as why:
            self.lose(f"the source is gone: {why}")
        finally:
            del self._confirmations[number]
        return False

    async def renew(self) -> None:
        """Tell the source each `RENEW_S` that this reader is alive, until the session is over."""
        with self.receiving():
            while self.over is None:
                await asyncio.sleep(RENEW_S)
                await self._send(Renew())

    def received(self, message: object) -> None:
        """Take a message of the source on an open lease, on any transport. Raises `BadCommand` for others."""
        match message:
            case ConfirmReply(number, holds):
                answer = self._confirmations.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(holds)
            case PiecesAvailable() | PiecesPromised() | PromiseRetracted() | PiecesHandedOff():
                self._on_have(message)
            case LeaseBroken(reason):
                self.lose(f"the source has broken the lease: {reason}")
            case other:
                raise BadCommand(f"{type(other).__name__} makes no sense on an open lease")

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """Lose the session, instead of raising, where the source is gone or sends what can't be read."""
        try:
            yield
        except PeerGone as why:
            self.lose(f"the source is gone: {why}")
        except (TensorHubError, *MALFORMED) as why:
            _log.warning("a source's lease is given up, for it sent what can't be read: %s", why)
            self.lose(f"the source sent what can't be read: {why}")

    async def finish(self, batch: PoolBatch) -> None:
        """Wait for a batch of the copy pool. Raises `TransportLost` when the session's end has stopped it."""
        self._copies.add(batch)
        try:
            if self.over is not None:
                batch.stop()
            await batch.done()
        except CopyStopped:
            raise TransportLost(str(self.over)) from None
        finally:
            self._copies.discard(batch)

    async def stop_copies(self) -> None:
        """Stop the batches under way; returns when none of them writes any more."""
        copies = list(self._copies)
        for batch in copies:
            batch.stop()
        for batch in copies:
            await batch.ended()
