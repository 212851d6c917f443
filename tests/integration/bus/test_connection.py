"""The connection to NATS: it comes back whatever becomes of the server, and no call on it waits without a bound."""

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.bounds import BUSY_S, WAIT_S
from tests.kit.nats import RunningNats
from tests.kit.waiting import until

from tensorhub_common.bus import connection, server_check
from tensorhub_common.bus.address import shown
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.errors import MessageTooLarge, NoAnswer, NoBus, NoResponder
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import RegistryUnavailable, TensorHubError, VersionUnavailable


async def echo(message: Message) -> bytes:
    return message.data[::-1]


async def never(_: Message) -> bytes:
    await asyncio.Event().wait()
    return b""


@contextmanager
def promptly(bound_s: float = 0.0) -> Iterator[None]:
    """Expect this to end within its bound, and what a busy machine takes beyond it."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < bound_s + BUSY_S


async def test_what_comes_back_to_who_asks(bus: Bus) -> None:
    """An answer, with the question's headers; that nobody serves, or does not answer; and an error by its name."""

    async def answer(message: Message) -> bytes:
        return message.headers["traceparent"].encode() + message.data

    async def refuse(_: Message) -> bytes:
        raise VersionUnavailable("version 7 is nowhere")

    async def fail(_: Message) -> bytes:
        raise ZeroDivisionError

    answered, silent, refused, broken = (bus.new_inbox() for _ in range(4))
    for subject, handler in ((answered, answer), (silent, never), (refused, refuse), (broken, fail)):
        await bus.serve(subject, handler)
    assert await bus.request(answered, b"body", 2.0, {"traceparent": "00-ab"}) == b"00-abbody"
    with pytest.raises(NoResponder):
        await bus.request(bus.new_inbox(), b"", WAIT_S)
    with promptly(), pytest.raises(NoAnswer):
        await bus.request(silent, b"", 0.2)
    with pytest.raises(VersionUnavailable, match="version 7 is nowhere"):
        await bus.request(refused, b"", WAIT_S)
    with pytest.raises(TensorHubError, match="ZeroDivisionError"):
        await bus.request(broken, b"", WAIT_S)


async def test_one_of_a_queue_group_answers(nats_server: RunningNats, bus: Bus) -> None:
    asked: list[int] = []
    subject = bus.new_inbox()
    for member in range(2):

        async def answer(_: Message, member: int = member) -> bytes:
            asked.append(member)
            return b""

        await bus.serve(subject, answer, queue="registries")
    for _ in range(20):
        await bus.request(subject, b"", WAIT_S)
    assert len(asked) == 20


async def test_a_message_over_the_limit_is_refused_and_the_connection_stays(bus: Bus) -> None:
    """Headers count as well: sent all the same, such a message would make the server cut the connection."""
    subject = bus.new_inbox()
    await bus.serve(subject, echo)
    for body, headers in ((b"x" * (1 << 20), {"a": "b"}), (b"x" * ((1 << 20) + 1), {})):
        with pytest.raises(MessageTooLarge):
            await bus.publish(subject, body, headers)
    assert await bus.request(subject, b"ab", WAIT_S) == b"ba"


@pytest.mark.parametrize(
    "url", ["nats://user:secret@127.0.0.1:1", "nats://", "http://127.0.0.1:4222/", "nats://127.0.0.1:no", ""]
)
async def test_no_server_and_no_address_are_told_within_the_bound(url: str) -> None:
    with promptly(), pytest.raises(RegistryUnavailable, match="tensorhub up" if "@" in url else None):
        await connect(url, name="test", timeout_s=0.3)


async def test_wrong_credentials_and_an_old_server_are_told_at_once(
    nats_server: RunningNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    bare = "nats://" + nats_server.url.rpartition("@")[2]
    for written, why in (("tensorhub:wrong\n", "refuses the credentials"), ("nothing", "holds no credentials")):
        file.write_text(written)
        with promptly(), pytest.raises(RegistryUnavailable, match=why):
            await connect(bare, name="test", credentials=file, timeout_s=WAIT_S)
    with pytest.raises(RegistryUnavailable, match="can't be read"):
        await connect(bare, name="test", credentials=tmp_path / "none")
    secret = nats_server.url.partition("//")[2].rpartition("@")[0]
    file.write_text(f"{secret}\n")
    async with await connect(bare, name="test", credentials=file) as bus:
        assert bus.is_connected
    monkeypatch.setattr(server_check, "API_LEVEL_MIN", 1000)
    with pytest.raises(RegistryUnavailable, match="too old"):
        await connect(nats_server.url, name="test")


def test_secrets_are_not_shown() -> None:
    assert shown("nats://user:secret@host:4222") == "nats://host:4222"
    assert shown("nats://user:secret@host") == "nats://host"
    assert "secret" not in shown("nats://user:secret@host:port")
    assert shown("nats://user:secret@a:1, nats://user:secret@b:2") == "nats://a:1, nats://b:2"


async def test_the_connection_comes_back_with_all_subscriptions(own_nats_server: RunningNats, own_bus: Bus) -> None:
    """A request that is made meanwhile waits for it."""
    changes: list[bool] = []
    own_bus.watch(changes.append)
    await own_bus.serve("question", echo)
    for number in (signal.SIGKILL, signal.SIGTERM):
        since = own_bus.connected_since
        own_nats_server.signal(number)
        await until(lambda: not own_bus.is_connected)
        with pytest.raises(NoBus):
            await own_bus.publish("question", b"")
        asked = asyncio.create_task(own_bus.request("question", b"ab", 10.0))
        own_nats_server.restart()
        assert await asked == b"ba"
        assert since is not None
        assert own_bus.connected_since is not None
        assert own_bus.connected_since > since
    assert changes == [False, True, False, True]


async def test_the_bus_outlives_an_error_at_which_the_client_gives_up(own_bus: Bus) -> None:
    """Some errors that the server sends make nats-py close for good; the bus then takes a new client."""
    await own_bus.serve("question", echo)
    first = own_bus._client
    await first._process_err("'Maximum Connections Exceeded'")
    await until(lambda: own_bus._client is not first and own_bus.is_connected)
    assert await own_bus.request("question", b"ab", WAIT_S) == b"ba"


async def test_close_is_bounded_without_a_server(own_nats_server: RunningNats) -> None:
    bus = await connect(own_nats_server.url, name="test")
    asked = asyncio.create_task(bus.wait_connected(0.1))
    await asked
    own_nats_server.signal(signal.SIGSTOP)
    with promptly(connection.CLOSE_TIMEOUT_S):
        await bus.close()
        await bus.close()
    with pytest.raises(NoBus):
        await bus.request("question", b"", 1.0)


async def test_a_handler_that_is_cancelled_does_not_hold_up_those_that_wait(bus: Bus) -> None:
    async def answer(message: Message) -> bytes:
        await asyncio.sleep(0)
        if message.data == b"cancel":
            raise asyncio.CancelledError
        return b"done"

    subject = bus.new_inbox()
    await bus.serve(subject, answer, concurrent_max=1)
    first = asyncio.create_task(bus.request(subject, b"cancel", 0.5))
    second = asyncio.create_task(bus.request(subject, b"", 5.0))
    assert await second == b"done"
    with pytest.raises(NoAnswer):
        await first


async def test_a_service_answers_others_at_once_and_no_more_once_it_is_closed(
    nats_server: RunningNats, bus: Bus
) -> None:
    async with await connect(nats_server.url, name="other") as other:
        for _ in range(50):
            subject = bus.new_inbox()
            service = await bus.serve(subject, echo)
            assert await other.request(subject, b"ab", WAIT_S) == b"ba"
            await service.close()
    service = await bus.serve(subject, echo)
    await service.close()
    with pytest.raises(NoResponder):
        await bus.request(subject, b"ab", WAIT_S)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_lost_server_is_told_once_and_its_return_once(
    own_nats_server: RunningNats, caplog: pytest.LogCaptureFixture, how: signal.Signals
) -> None:
    """With how long it was away. What is asked meanwhile fails, and adds nothing to the log."""
    async with await connect(own_nats_server.url, name="agent-7", ping_every_s=0.1) as bus:
        is_stopped = how == signal.SIGSTOP
        own_nats_server.signal(how) if is_stopped else own_nats_server.kill()
        await until(lambda: not bus.is_connected)
        for _ in range(3):
            with pytest.raises(NoBus):
                await bus.request("somewhere", b"", 0.05)
        own_nats_server.signal(signal.SIGCONT) if is_stopped else own_nats_server.start()
        await until(lambda: bus.is_connected)
        assert bus.lost_count == 1
    lost, back = [record.getMessage() for record in caplog.records]
    assert lost.startswith(f"agent-7 has lost NATS at {shown(own_nats_server.url)} (")
    why = "it has stopped answering pings" if is_stopped else "it has closed the connection"
    assert f"({why})" in lost
    assert re.fullmatch(rf"agent-7 has NATS back after \d+\.\d s, at {shown(own_nats_server.url)}", back)
