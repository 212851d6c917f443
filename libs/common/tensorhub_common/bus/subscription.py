"""Interest in a subject, kept through whatever becomes of the connection."""

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from tensorhub_common.bus.answering import Answering
from tensorhub_common.bus.message import Message

PENDING_MESSAGES_MAX: Final = 65_536
PENDING_BYTES_MAX: Final = 128 * 1024 * 1024
"""What a subscription keeps unread; what comes on top is dropped, as NATS does with slow consumers."""

NO_HEADERS: Final[Mapping[str, str]] = {}

OnMessage = Callable[[Message], Awaitable[None]]


class Subscription:
    """Interest in a subject. It outlives the connection that it was made on, until `close`."""

    def __init__(
        self, subject: str, queue: str, on_message: OnMessage, forget: Callable[["Subscription"], None]
    ) -> None:
        self.subject = subject
        self._forget = forget
        self._queue = queue
        self._on_message = on_message
        self._inner: NatsSubscription | None = None

    @property
    def is_attached(self) -> bool:
        """Whether it stands on a connection, rather than waiting for one."""
        return self._inner is not None

    def detach(self) -> None:
        """Forget a connection that is gone for good. Only the bus calls it."""
        self._inner = None

    async def attach(self, client: Client) -> None:
        """Subscribe on this connection. Only the bus calls it."""
        self._inner = await client.subscribe(
            self.subject,
            queue=self._queue,
            cb=self._take,
            pending_msgs_limit=PENDING_MESSAGES_MAX,
            pending_bytes_limit=PENDING_BYTES_MAX,
        )

    async def close(self) -> None:
        """End the interest. What has arrived and was not handled yet is dropped."""
        self._forget(self)
        inner, self._inner = self._inner, None
        if inner is not None:
            with contextlib.suppress(nats.errors.Error):
                await inner.unsubscribe()

    async def _take(self, message: Msg) -> None:
        await self._on_message(Message(message.subject, message.reply, message.headers or NO_HEADERS, message.data))


class Service:
    """A handler that answers the questions on a subject, until `close`."""

    def __init__(self, subscription: Subscription, answering: Answering) -> None:
        self._subscription = subscription
        self._answering = answering
        self.is_closed = False

    async def close(self) -> None:
        """Take no more questions and cancel those under way."""
        self.is_closed = True
        await self._subscription.close()
        await self._answering.stop()
