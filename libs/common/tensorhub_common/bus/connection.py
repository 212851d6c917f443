"""One process's connection to NATS.

It is made once and kept for good: whatever becomes of the server, the connection comes back, with all its
subscriptions, within about a tenth of a second of the server; in a cluster, of noticing that its node is gone. Always
true: no call waits without a bound; a request that is under way when the connection breaks fails at once with `NoBus`
and doesn't wait for its time-out; while there is no connection nothing is kept to be sent later, so what was given up
is not said after all.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import SystemRandom, token_hex
from types import TracebackType
from typing import Any, Final, Self

import nats.errors

from tensorhub_common.auth.tls import TlsFiles
from tensorhub_common.bus.address import CONNECT_TIMEOUT_S, Login, addresses, login, shown
from tensorhub_common.bus.client import MessageHandler as OnMessage
from tensorhub_common.bus.client import NatsClient
from tensorhub_common.bus.connection_state import ConnectionState, ConnectionWatcher
from tensorhub_common.bus.errors import MessageTooLarge, NoAnswer, NoBus, NoResponder
from tensorhub_common.bus.keepalive import PING_EVERY_S, PINGS_OUTSTANDING_MAX
from tensorhub_common.bus.message import NO_HEADERS, Message, header_bytes
from tensorhub_common.bus.permission_errors import PermissionErrors
from tensorhub_common.bus.request_mux import TOKEN_BYTES, RequestMux
from tensorhub_common.bus.request_server import (
    CONCURRENT_MAX,
    HANDLER_S_MAX,
    PENDING_MAX,
    RequestHandler,
    RequestServer,
    RequestService,
    answer_or_raise,
)
from tensorhub_common.bus.server_check import check_server, why_never
from tensorhub_common.bus.subscription import Subscription
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.runtime.supervision import Supervisor, log_only

RECONNECT_WAIT_S: Final = 0.1
REQUEST_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 2.0

NO_RESPONDERS: Final = "503"

_log: Final = logging.getLogger(__name__)


class Bus:
    """The connection. Make it with `connect`; use it in the event loop that made it."""

    def __init__(self, nats: str, name: str, user: Login, ping_every_s: float = PING_EVERY_S) -> None:
        self.url = nats
        self._addresses = addresses(nats) or [nats]
        # Clients start at different nodes. From here on the order is fixed, so that after a failure the next node is
        # tried before the one that failed.
        SystemRandom().shuffle(self._addresses)
        self._ping_every_s = ping_every_s
        self._refusals_left = len(self._addresses)
        self.name = name
        self._user = user
        self._refusals = PermissionErrors(name)
        self.work = Supervisor(f"the connection of {name} to NATS")
        """Background work of this connection, and of what is made of it. What fails here ends a service."""
        self._client = NatsClient(self.work)
        self._closing = False
        self._closer: asyncio.Task[Any] | None = None
        self._lost_at: float | None = None
        self._presence = ConnectionState()
        self._presence.watch(self._on_change)
        self._refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._last_error = "no answer"
        self._subscriptions: list[Subscription] = []
        self._services: list[RequestService] = []
        self._awaited = RequestMux(self.new_inbox())
        self._revival: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------- state

    @property
    def server_info(self) -> Mapping[str, Any]:
        """What the server says of itself."""
        return self._client.server_info

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached, as far as is known."""
        return self._presence.since is not None

    @property
    def connected_since(self) -> float | None:
        """Since when (`time.monotonic`) the connection has lasted without a break; None while there is none."""
        return self._presence.since

    @property
    def lost_count(self) -> int:
        """How many times the connection was lost."""
        return self._presence.lost_count

    def watch(self, watcher: ConnectionWatcher) -> Callable[[], None]:
        """Call `watcher(connected)` at each change from now on, and return what ends that. It must not raise."""
        return self._presence.watch(watcher)

    async def wait_connected(self, timeout_s: float) -> None:
        """Return once there is a connection. Raises `NoBus` when there is none within the bound."""
        if self.is_connected or (not self._closing and await self._presence.wait(timeout_s)):
            return
        raise NoBus(f"there is no connection to NATS at {shown(self.url)}: start it, or wait until it is back")

    # ---------------------------------------------------------------------------------------- messages

    def new_inbox(self) -> str:
        """Return a subject that no other client uses, and that no other user may listen on."""
        return f"{self._user.inbox}.{token_hex(TOKEN_BYTES)}"

    async def publish(
        self, subject: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS, reply: str = ""
    ) -> None:
        """Send a message and don't wait for anything. Raises `NoBus` while there is no connection."""
        if not self.is_connected:
            raise NoBus(f"there is no connection to NATS at {shown(self.url)}, so nothing was sent on {subject}")
        size = len(body) + header_bytes(headers)
        if size > self._client.max_payload:
            # Sent all the same, it would make the server cut the connection.
            raise MessageTooLarge(
                f"a message of {size} bytes for {subject} is over NATS's limit of {self._client.max_payload}: "
                "put what is large into the blob store and send its digest"
            )
        try:
            await self._client.publish(subject, body, reply=reply, headers=dict(headers) or None)
        except (nats.errors.Error, OSError) as error:
            raise NoBus(f"nothing could be sent on {subject}: {error}") from None

    async def request(
        self,
        subject: str,
        body: bytes = b"",
        timeout_s: float = REQUEST_TIMEOUT_S,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> bytes:
        """Ask and return the answer, or raise the error that the answering side raised.

        Raises `NoResponder` when no service listens, `NoAnswer` after `timeout_s`, `NoBus` without a connection,
        `NotPermitted` where this user may not ask that.
        """
        return answer_or_raise(await self.request_message(subject, body, timeout_s, headers))

    async def request_message(
        self,
        subject: str,
        body: bytes = b"",
        timeout_s: float = REQUEST_TIMEOUT_S,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Message:
        """Ask and return the whole answer, headers and all, as it came."""
        message = await self._exchange(subject, body, timeout_s, headers)
        if message.status == NO_RESPONDERS:
            raise NoResponder(f"no service answers on {subject}: it is not running")
        return message

    async def _exchange(self, subject: str, body: bytes, timeout_s: float, headers: Mapping[str, str]) -> Message:
        """Publish with a reply subject of our own: to `subject` or, when that is empty, to this reply subject."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        await self.wait_connected(timeout_s)
        inbox, answer = self._awaited.begin(subject)
        try:
            async with asyncio.timeout_at(deadline):
                await self.publish(subject or inbox, body, headers, inbox)
                return await answer
        except TimeoutError:
            raise NoAnswer(f"no answer on {subject} within {timeout_s:g} s") from None
        finally:
            self._awaited.end(inbox)

    async def subscribe(self, subject: str, on_message: OnMessage, queue: str = "") -> Subscription:
        """Call `on_message` for each message, one after the other; of one `queue` group one member takes each.

        Once it returns, what anybody publishes arrives; without a connection that is so once there is one again.
        Raises `NotPermitted` where this user may not listen there.
        """
        subscription = Subscription(subject, queue, on_message, self._forget)
        self._subscriptions.append(subscription)
        if self._revival is None or self._revival.done():
            await subscription.attach(self._client)
        if self.is_connected:
            # A message to ourselves comes back after the server has read the subscription, which was sent before it.
            with contextlib.suppress(NoBus, NoAnswer):
                await self._exchange("", b"", REQUEST_TIMEOUT_S, NO_HEADERS)
            if (refused := self._refusals.of_subscription(subject)) is not None:
                await subscription.close()
                raise refused
        return subscription

    async def serve(
        self,
        subject: str,
        handler: RequestHandler,
        *,
        queue: str = "",
        concurrent_max: int = CONCURRENT_MAX,
        pending_max: int = PENDING_MAX,
        age_s_max: float = HANDLER_S_MAX,
    ) -> RequestService:
        """Answer the questions on a subject with what `handler` returns, or with the error that it raises.

        Askers that wait no longer than `age_s_max` have given up a question that is older, so it is dropped.
        """

        async def respond(question: Message, body: bytes, headers: Mapping[str, str]) -> None:
            await self.publish(question.reply, body, headers)

        answering = RequestServer(
            handler, respond, self.work, concurrent_max=concurrent_max, pending_max=pending_max, age_s_max=age_s_max
        )
        service = RequestService(await self.subscribe(subject, answering.take, queue), answering)
        self._services = [each for each in self._services if not each.is_closed]
        self._services.append(service)
        return service

    # -------------------------------------------------------------------------------------- connecting

    async def start(self, timeout_s: float) -> None:
        """Connect for the first time. Only `connect` calls it."""
        dialling = self.work.start(self._dial(), "dialling", awaited=True)
        waited: set[asyncio.Future[Any]] = {dialling, self._refused}
        try:
            await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not dialling.done():
                self._closing, self._closer = True, asyncio.current_task()
                dialling.cancel()
                await asyncio.wait({dialling})
                await self._end()
        if self._closing:
            why = self._refused.result() if self._refused.done() else f"within {timeout_s:g} s: {self._last_error}"
            raise RegistryUnavailable(
                f"NATS at {shown(self.url)} can't be reached ({why}): start the hub with `tensorhub up`, "
                "or say where it is with TENSORHUB_NATS"
            )
        try:
            dialling.result()
        except (nats.errors.Error, OSError, ValueError, ImportError) as error:
            raise RegistryUnavailable(f"{shown(self.url)} can't be used as the address of NATS: {error}") from None
        await self.subscribe(f"{self._awaited.inbox}.*", self._awaited.take)
        await self._on_connected()

    async def _dial(self) -> None:
        await self._client.connect(
            list(self._addresses),
            dont_randomize=True,
            name=self.name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_connected,
            closed_cb=self._on_closed,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # It takes fractions of a second as well.
            ping_interval=self._ping_every_s,  # type: ignore[arg-type]
            max_outstanding_pings=PINGS_OUTSTANDING_MAX,
            **self._user.options,
        )

    async def _revive(self) -> None:
        """Take a new client where the old one has given up, which nats-py does at some errors that the server sends."""
        _log.warning("NATS ended the connection of %s (%s); connecting anew", self.name, self._last_error)
        for subscription in self._subscriptions:
            subscription.detach()
        while True:
            await asyncio.sleep(RECONNECT_WAIT_S)
            self._client = NatsClient(self.work)
            try:
                await self._dial()
                break
            except (RegistryUnavailable, nats.errors.Error, OSError) as error:
                if str(error) != self._last_error:
                    _log.warning("%s can't connect to NATS yet: %s", self.name, error)
                self._last_error = str(error)
        # Others may subscribe meanwhile, so look again until none is left.
        while loose := [each for each in self._subscriptions if not each.is_attached]:
            for subscription in loose:
                await subscription.attach(self._client)
        await self._on_connected()

    def _forget(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    async def close(self) -> None:
        """End everything, within `CLOSE_TIMEOUT_S`. A second call does nothing."""
        if self._closing:
            return
        self._closing, self._closer = True, asyncio.current_task()
        if self._revival is not None:
            self._revival.cancel()
        await self._end()
        self._presence.note(connected=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.work.close()

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for service in self._services:
                    await service.close()
                for subscription in list(self._subscriptions):
                    await subscription.close()
                # It flushes what it has kept, which fails when the connection is gone; there is nothing to do about it.
                with contextlib.suppress(nats.errors.Error, OSError):
                    await self._client.close()
        except TimeoutError:
            _log.warning("the connection of %s to NATS did not close within %g s", self.name, CLOSE_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -------------------------------------------------------------------------- what nats-py tells us

    def _on_change(self, connected: bool) -> None:  # noqa: FBT001 (the signature of a watcher)
        if not connected:
            self._awaited.give_up()
        if not self._closing:
            self._tell(connected=connected)

    def _tell(self, *, connected: bool) -> None:
        """Log that NATS is lost, and that it is back: one line each."""
        now = time.monotonic()
        if not connected:
            self._lost_at = now
            why = self._client.why_lost or self._last_error
            _log.warning("%s has lost NATS at %s (%s); it dials until NATS is back", self.name, shown(self.url), why)
        elif self._lost_at is not None:
            at = shown(self._client.connected_url.geturl()) if self._client.connected_url is not None else "another"
            _log.warning("%s has NATS back after %.1f s, at %s", self.name, now - self._lost_at, at)
            self._lost_at = None

    def _take_refusal(self, text: str) -> bool:
        """End the request whose publish was refused with that error; False: the text is another complaint."""
        refused = self._refusals.take(text)
        if refused is None:
            return False
        subject, error = refused
        if subject is not None:
            self._awaited.refuse(subject, error)
        return True

    async def _on_connected(self) -> None:
        if self._closing:
            # It was about to come back when `close` was called, and the cancellation was lost (see `_on_error`).
            self.work.start(self._client.close(), "closing", on_fault=log_only)
        else:
            self._presence.note(connected=True)

    async def _on_disconnected(self) -> None:
        self._presence.note(connected=False)

    async def _on_closed(self) -> None:
        if not self._closing:
            self._revival = self.work.start(self._revive(), "connecting anew")

    async def _on_error(self, error: Exception) -> None:
        if self._closing and asyncio.current_task() is not self._closer:
            # `wait_for` of Python 3.11 loses a cancellation that comes together with a refused connection, and then
            # nats-py would dial for ever. Here every round of its dialling comes by.
            raise asyncio.CancelledError
        if self._take_refusal(str(error)):
            return
        is_silent = isinstance(error, TimeoutError)
        self._last_error = "it does not answer" if is_silent else str(error) or type(error).__name__
        why = why_never(error)
        if why is not None:
            # One node that does not know a new key yet is no reason not to try the others.
            self._refusals_left -= 1
            if self._refusals_left <= 0 and not self._refused.done():
                self._refused.set_result(why)
        if isinstance(error, nats.errors.SlowConsumerError):
            _log.warning("%s reads %s too slowly: messages are dropped", self.name, error.subject)
        elif isinstance(error, nats.errors.Error | OSError | TimeoutError):
            _log.debug("NATS at %s: %s", shown(self.url), self._last_error)
        else:
            self.work.fault("nats-py", error, log_only)


async def connect(
    nats: str,
    *,
    name: str,
    credentials: str | Path | None = None,
    tls: TlsFiles | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
    ping_every_s: float = PING_EVERY_S,
) -> Bus:
    """Connect to NATS and check that it can do what the hub needs. Raises `RegistryUnavailable` within the bound.

    `nats` is an address, or those of several nodes of one cluster with commas between. Each `ping_every_s`
    the server is asked whether it is there (see `silence`). `credentials` is a file: a key, NATS's own `.creds`, or one
    line "user:password" (see `address`). With `tls` the server must prove who it is.
    """
    bus = Bus(nats, name, login(nats, None if credentials is None else Path(credentials), tls), ping_every_s)
    await bus.start(timeout_s)
    try:
        await check_server(bus, timeout_s)
    except BaseException:
        await bus.close()
        raise
    return bus
