"""Messages are read where they come or by nats-py, and it can't be told which."""

import asyncio
from typing import Any

import pytest

from tensorhub_common.bus.client import NatsClient, take_messages
from tensorhub_common.bus.message import Message
from tensorhub_common.runtime.supervision import Supervisor

SID = 7
HEADERS = b"NATS/1.0\r\nA: 1\r\n\r\n"
STREAM = (
    b"MSG a.b 7 2\r\n{}\r\n"
    b"MSG a.b 7 _INBOX.x 0\r\n\r\n"
    b"+OK\r\n"
    b"HMSG c 7 _INBOX.y %d %d\r\n%s\r\n2\r\n\r\n"
    % (len(HEADERS), len(HEADERS) + 5, HEADERS)
    + b"HMSG c 7 %d %d\r\n%s\r\n" % (len(HEADERS), len(HEADERS), HEADERS)
    + b"PONG\r\nMSG \xff\xfe 7 3\r\n...\r\nMSG a 8 1\r\n-\r\nMSG end 7 1\r\n!\r\n"
)
SAID = [
    ("a.b", "", {}, b"{}"),
    ("a.b", "_INBOX.x", {}, b""),
    ("c", "_INBOX.y", {"A": "1"}, b"\r\n2\r\n"),
    ("c", "", {"A": "1"}, b""),
    ("\ufffd\ufffd", "", {}, b"..."),
    ("end", "", {}, b"!"),
]


class Reading:
    """A client that reads what a test feeds it."""

    def __init__(self) -> None:
        self.client = NatsClient(Supervisor("a test's connection"))
        self.heard: list[Message] = []
        self.client.handle(SID, self.heard.append)
        self.reader: Any = asyncio.StreamReader()
        self.client._read_straight(self.reader)

    async def read_the_rest(self) -> None:
        """Do as nats-py's loop does."""
        while self.reader._buffer:
            await self.client._ps.parse(await self.reader.read(1 << 16))

    @property
    def said(self) -> list[Any]:
        return [(each.subject, each.reply, dict(each.headers), each.data) for each in self.heard]


@pytest.mark.parametrize("prompt", [True, False], ids=["nats-py reads at once", "nats-py reads late"])
async def test_a_stream_says_the_same_wherever_it_is_cut(prompt: bool) -> None:  # noqa: FBT001
    for cut in range(len(STREAM) + 1):
        reading = Reading()
        for part in (STREAM[:cut], STREAM[cut:]):
            reading.reader.feed_data(part)
            if prompt:
                await reading.read_the_rest()
        await reading.read_the_rest()
        assert reading.said == SAID, f"cut at {cut}"


async def test_whole_messages_are_heard_before_anybody_is_woken() -> None:
    reading = Reading()
    reading.reader.feed_data(STREAM[: STREAM.index(b"+OK")])
    assert reading.said == SAID[:2]


LEFT = [b"", b"MSG a 7", b"MSG a 7 5\r\n1234\r\n", b"MSG a 7 x\r\n", b"MSG a\r\n", b"\r\n", b"X"]


@pytest.mark.parametrize("left", [*LEFT, b"HMSG a 7 9 5\r\n12345\r\n"])
def test_what_is_no_whole_message_is_left(left: bytes) -> None:
    heard: list[Any] = []
    first = b"MSG a 7 1\r\n-\r\n"
    assert take_messages(first + left, lambda *each: heard.append(each)) == len(first)
    assert len(heard) == 1


async def test_a_handlers_fault_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    reading = Reading()
    reading.client.handle(8, lambda message: 1 / (len(message.data) - 1))  # type: ignore[arg-type]
    reading.reader.feed_data(STREAM)
    await reading.read_the_rest()
    assert reading.said == SAID
    assert "handling a message on " in caplog.text
    assert "ZeroDivisionError" in caplog.text
