"""What differs from nats-py where a connection has ended: nothing is written to it, and no socket of it stays."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlparse

import pytest

from tensorhub_common.bus.client import GuardedTcpTransport
from tensorhub_common.bus.connection_state import ConnectionState

WAIT_S = 5.0


class Server:
    """Takes connections and says nothing, as a NATS server that is stopped does."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[asyncio.StreamReader] = asyncio.Queue()
        self.writers: list[asyncio.StreamWriter] = []
        self.url = ""

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.came.put_nowait(reader)
        self.writers.append(writer)


@asynccontextmanager
async def silent_server() -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.take, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    server.url = f"nats://{host}:{port}"
    async with listening:
        yield server
        for writer in server.writers:
            writer.transport.abort()


async def dial(tcp: GuardedTcpTransport, server: Server) -> asyncio.StreamReader:
    await tcp.connect(urlparse(server.url), 1024, 2)
    async with asyncio.timeout(WAIT_S):
        return await server.came.get()


async def test_nothing_is_written_to_a_connection_that_has_ended() -> None:
    """Python 3.13 raises `TypeError: 'NoneType' object is not callable` there."""
    async with silent_server() as server:
        tcp = GuardedTcpTransport()
        assert tcp, "nats-py would put its own in the place of one that says that it is none"
        tcp.write(b"before there is a connection")
        await dial(tcp, server)
        assert tcp._io_writer is not None
        tcp._io_writer.transport.abort()
        await tcp.wait_closed()
        tcp.write(b"after its end")
        tcp.writelines([b"after", b"its end"])
        with pytest.raises(OSError, match="has ended"):
            await tcp.drain()


async def test_dialling_anew_ends_the_connection_before() -> None:
    """Else each attempt at a server that says nothing would leave a socket here, and one there."""
    async with silent_server() as server:
        tcp = GuardedTcpTransport()
        first = await dial(tcp, server)
        second = await dial(tcp, server)
        async with asyncio.timeout(WAIT_S):
            assert await first.read() == b""
        tcp.write(b"hello")
        async with asyncio.timeout(WAIT_S):
            assert await second.read(5) == b"hello"
        assert tcp._io_writer is not None
        tcp._io_writer.transport.abort()
        await tcp.wait_closed()


def test_each_change_is_told_once() -> None:
    presence, told = ConnectionState(), list[bool]()
    unwatch = presence.watch(told.append)
    for connected in (False, True, True, False, False, True):
        presence.note(connected=connected)
        assert (presence.since is not None) == connected
    assert told == [True, False, True]
    unwatch()
    unwatch()
    presence.note(connected=False)
    assert told == [True, False, True]


async def test_who_waits_is_let_go_by_the_connection_or_by_the_bound() -> None:
    presence = ConnectionState()
    assert not await presence.wait(0.01)
    waiting = asyncio.create_task(presence.wait(30.0))
    await asyncio.sleep(0)
    presence.note(connected=True)
    assert await waiting
    assert await presence.wait(0.0)
