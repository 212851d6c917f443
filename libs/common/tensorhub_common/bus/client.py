"""The nats-py client, made robust against malformed messages and cheaper per message.

`NatsClient` differs from nats-py's client in three ways:
- It delivers a malformed message as far as the message can be read. Examples are a subject that is not UTF-8 and a
  header block without line ends. The reading loop of nats-py ends at such a message. Any client may write one into a
  job's log, where it would end the reading loop of every follower.
- It calls a handler as soon as a message arrives, without a queue and tasks in between. Each update of a replica takes
  thirty messages, so the queue and the tasks are a good part of a process's work. Handlers therefore don't wait, and
  the client stores no message for them.
- It writes outgoing messages to the socket directly, without a queue, for the same reason.

nats-py wakes a task for all incoming data, copies the data twice and applies regular expressions to it. Incoming data
is nearly always a sequence of whole messages. `take_messages` parses the whole messages at the beginning of the data
in place. It leaves everything else to nats-py: a message that has arrived in part, the server's pings, errors and
news, and anything that can't be parsed.

Invariants:
- Reading goes on, whatever bytes arrive.
- Messages are handled in the order in which they arrive.
- A handler's exception ends neither the reading nor the handler.
- While the socket accepts no data, nats-py's own bound on pending data holds.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import ParseResult

from nats.aio.client import Client, Srv
from nats.aio.transport import TcpTransport
from nats.errors import SecureConnRequiredError, StaleConnectionError, UnexpectedEOF
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from tensorhub_common.bus.message import NO_HEADERS, Headers, Message
from tensorhub_common.runtime.supervision import Supervisor, log_only

Deliver = Callable[[int, bytes, bytes, bytes, bytes], None]
"""Takes the subscription's number, the subject, the reply subject or b"", the header block or b"", and the data."""

_LINE_END: Final = b"\r\n"
_PLAIN: Final = (b"MSG", 4)
_WITH_HEADERS: Final = (b"HMSG", 5)
"""How a message begins, and of how many words its line is where no reply is wanted."""


def take_messages(came: bytes, deliver: Deliver) -> int:
    """Deliver the whole messages at the beginning of the buffer, and return how many bytes they are."""
    at, length = 0, len(came)
    while at < length:
        line_end = came.find(_LINE_END, at)
        if line_end < 0:
            break
        words = came[at:line_end].split()
        verb, count = words[0] if words else b"", len(words)
        least = _WITH_HEADERS[1] if verb == _WITH_HEADERS[0] else _PLAIN[1]
        if verb not in (_WITH_HEADERS[0], _PLAIN[0]) or not least <= count <= least + 1:
            break
        try:
            number, size = int(words[2]), int(words[-1])
            header_size = int(words[-2]) if verb == _WITH_HEADERS[0] else 0
        except ValueError:
            break
        data, end = line_end + len(_LINE_END) + header_size, line_end + len(_LINE_END) + size
        if not 0 <= header_size <= size or end + len(_LINE_END) > length:
            break
        deliver(number, words[1], words[3] if count > least else b"", came[data - header_size : data], came[data:end])
        at = end + len(_LINE_END)
    return at


class ResumableParser(Parser):
    """nats-py's own, which tells whether it is in the middle of something."""

    def __init__(self, client: object) -> None:
        super().__init__(client)
        self._busy = False

    @property
    def is_idle(self) -> bool:
        """Whether all that was given to it is read, so that what comes next may be read elsewhere."""
        return not self._busy and not self.buf and self.state == AWAITING_CONTROL_LINE

    async def parse(self, data: bytes = b"") -> None:
        """Read what has come, and do what it asks."""
        self._busy = True
        try:
            await super().parse(data)
        finally:
            self._busy = False


MessageHandler = Callable[[Message], None]


def _in_words(error: Exception) -> str:
    """Say why a connection is given up."""
    if isinstance(error, UnexpectedEOF | ConnectionError):
        return "it has closed the connection"
    if isinstance(error, StaleConnectionError):
        return "it has stopped answering pings"
    return str(error) or type(error).__name__


class GuardedTcpTransport(TcpTransport):
    """A connection by TCP: nats-py's, which writes to what has ended, and dials anew without ending what it had."""

    def __init__(self) -> None:
        """Begin without a connection."""
        super().__init__()  # type: ignore[no-untyped-call]

    def __bool__(self) -> bool:
        # Else nats-py would put one of its own in its place.
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Connect; the connection before this one is ended first.

        A server that is stopped lets us connect and says nothing, so without this each attempt would leave a socket.
        """
        if self._io_writer is not None:
            self._io_writer.transport.abort()
        await super().connect(uri, buffer_size, connect_timeout)

    def write(self, payload: bytes) -> None:
        """Write, unless the connection has ended: `drain` says so, and asyncio may raise TypeError here (from 3.12)."""
        if self._io_writer is not None and not self._io_writer.is_closing():
            self._io_writer.write(payload)

    def writelines(self, payload: Iterable[bytes]) -> None:
        """Write several."""
        if self._io_writer is not None and not self._io_writer.is_closing():
            self._io_writer.writelines(payload)

    async def wait_closed(self) -> None:
        """Wait for the end of the connection."""
        if self._io_writer is not None:
            await self._io_writer.wait_closed()

    async def drain(self) -> None:
        """Wait until the socket takes more. Raises OSError when the connection has ended."""
        if self._io_writer is None or self._io_writer.is_closing():
            raise ConnectionResetError("the connection has ended")
        await self._io_writer.drain()


class NatsClient(Client):
    """A client whose subscriptions may have a handler of their own; see the module's head."""

    def __init__(self, work: Supervisor) -> None:
        """Begin without a connection. `work` is where the errors of handlers end."""
        super().__init__()
        self._work = work
        self.why_lost = ""
        """Why the last connection was given up, in words."""
        self._ps: ResumableParser = ResumableParser(self)
        self._handlers: dict[int, MessageHandler] = {}
        self._flushing: asyncio.Handle | None = None

    @property
    def server_info(self) -> Mapping[str, Any]:
        """What the server said of itself when we connected."""
        return self._server_info

    def _connect_command(self) -> bytes:
        # nats-py goes on in the clear where the server doesn't ask for TLS, so a machine between the two could read
        # the credentials and everything else. This is the last moment before that.
        if self.options.get("tls") is not None and not self._server_info.get("tls_required"):
            raise SecureConnRequiredError
        if self._server_info.get("tls_required"):
            self._introduce_tls()
        return super()._connect_command()

    def _introduce_tls(self) -> None:
        # nats-py reads what comes through TLS with a protocol of its own and never tells it of its transport. So it
        # would keep all that comes while we are slow, without a bound, and complain whenever a connection ends.
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None  # noqa: SLF001
        if writer is None or (protocol := writer.transport.get_protocol()) is None:
            return  # A web socket, which asks for nothing, or a connection that the server has ended already.
        protocol.connection_made(writer.transport)

    async def _connect_to_server(self, s: Srv) -> None:
        if self._transport is None and s.uri.scheme not in ("ws", "wss"):
            self._transport = GuardedTcpTransport()
        await super()._connect_to_server(s)

    async def _process_op_err(self, e: Exception) -> None:
        if self.is_connected:
            self.why_lost = _in_words(e)
        # Before it dials anew nats-py waits until the old connection is closed, and TLS closes one only with a word of
        # the other side, for which it would wait half a minute where that one has stopped.
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None  # noqa: SLF001
        if writer is not None:
            writer.transport.abort()
        await super()._process_op_err(e)

    def handle(self, sid: int, handler: MessageHandler) -> None:
        """Call `handler` with each message of this subscription from now on."""
        self._handlers[sid] = handler

    def forget(self, sid: int) -> None:
        """Handle nothing of this subscription any more."""
        self._handlers.pop(sid, None)

    # -------------------------------------------------------------------------------------------- reading

    async def _read_loop(self) -> None:
        if isinstance(self._transport, TcpTransport) and (reader := self._transport._io_reader) is not None:  # noqa: SLF001
            self._read_straight(reader)
        await super()._read_loop()

    def _read_straight(self, reader: asyncio.StreamReader) -> None:
        """Read what comes where it comes; what is left, and all behind it, goes the long way until that is done."""
        feed = reader.feed_data

        def take(came: bytes) -> None:
            at = 0
            # What nats-py has not read yet comes before this; the handshake may have left something there.
            if self._ps.is_idle and not reader._buffer:  # type: ignore[attr-defined]  # noqa: SLF001
                at = take_messages(came, self._deliver)
            if at < len(came):
                feed(came[at:] if at else came)

        reader.feed_data = take  # type: ignore[assignment, method-assign]

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self._deliver(sid, subject, reply, headers or b"", data)

    def _deliver(self, sid: int, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        handler = self._handlers.get(sid)
        if handler is None:
            # Its subscription was closed just now, or is being made: no handler waits for the message.
            return
        message = Message(
            subject.decode(errors="replace"),
            reply.decode(errors="replace"),
            Headers(headers) if headers else NO_HEADERS,
            data,
        )
        try:
            handler(message)
        except Exception as error:  # noqa: BLE001 (a fault in one handler must not silence all others)
            self._work.fault(f"handling a message on {message.subject}", error, log_only)

    # -------------------------------------------------------------------------------------------- sending

    async def _flush_pending(self, force_flush: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 (nats-py's form)
        if force_flush:
            return await super()._flush_pending(force_flush)
        if self._flushing is None:
            # Once for all that is sent in this turn of the loop.
            self._flushing = self._work.call_soon(self._flush, what="sending what was said")
        return None

    def _flush(self) -> None:
        self._flushing = None
        if not self.is_connected:
            return
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None  # noqa: SLF001
        if writer is not None and not writer.transport.get_write_buffer_size() and not writer.is_closing():
            pending, self._pending, self._pending_data_size = self._pending, [], 0
            if pending:
                writer.write(b"".join(pending))
        elif self._flush_queue is not None and self._flush_queue.empty():
            # The socket is slow, or is no TCP: nats-py's flusher waits until it has taken what it has.
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())
