"""Interest in a subject, kept through whatever becomes of the connection."""

import contextlib
from collections.abc import Callable

import nats.errors
from nats.aio.subscription import Subscription as NatsSubscription

from tensorhub_common.bus.client import MessageHandler, NatsClient


class Subscription:
    """Interest in a subject. It outlives the connection that it was made on, until `close`."""

    def __init__(
        self, subject: str, queue: str, on_message: MessageHandler, forget: Callable[["Subscription"], None]
    ) -> None:
        self.subject = subject
        self._forget = forget
        self._queue = queue
        self._on_message = on_message
        self._client: NatsClient | None = None
        self._inner: NatsSubscription | None = None

    @property
    def is_attached(self) -> bool:
        """Whether it is active on a connection, rather than waiting for one."""
        return self._inner is not None

    def detach(self) -> None:
        """Forget a connection that is gone for good. Only the bus calls it."""
        self._inner = None

    async def attach(self, client: NatsClient) -> None:
        """Subscribe on this connection. Only the bus calls it."""
        inner = await client.subscribe(self.subject, queue=self._queue, cb=_never)
        client.handle(inner._id, self._on_message)  # noqa: SLF001 (nats-py tells a subscription's number nowhere else)
        self._client, self._inner = client, inner

    async def close(self) -> None:
        """End the interest. What has arrived and was not handled yet is dropped."""
        self._forget(self)
        inner, self._inner = self._inner, None
        if inner is not None and self._client is not None:
            self._client.forget(inner._id)  # noqa: SLF001 (as above)
            with contextlib.suppress(nats.errors.Error):
                await inner.unsubscribe()


async def _never(_: object) -> None:
    """Fill the place of the callback that nats-py wants; `NatsClient` hands messages to the handler instead."""
