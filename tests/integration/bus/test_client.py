"""What raw clients may put on a subject, and what followers make of it."""

import asyncio

from tests.bounds import WAIT_S

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.message import parse_headers
from tensorhub_common.jetstream.job_log import open_job
from tensorhub_common.protocol.subjects import command_subject


async def _raw(url: str, *lines: bytes) -> None:
    """Say these bytes to the server as a client that keeps no rule but the protocol's lengths."""
    address = url.rpartition("@")[2]
    host, _, port = address.removeprefix("nats://").partition(":")
    user, _, password = url.partition("//")[2].rpartition("@")[0].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await reader.readline()
    login = f'"user":"{user}","pass":"{password}",' if user else ""
    writer.write(f'CONNECT {{{login}"verbose":false,"headers":true}}\r\n'.encode())
    for line in lines:
        writer.write(line)
    writer.write(b"PING\r\n")
    await writer.drain()
    while (await reader.readline()).strip() != b"PONG":
        pass
    writer.close()


async def test_a_log_with_poison_in_it_is_followed(bus: Bus, job: str) -> None:
    """A subject that is no UTF-8 and a header block that is none are entries like others; one reads on behind them."""
    log = await open_job(bus, job)
    prefix = f"tensorhub.v1.{job}.cmd.".encode()
    garbage = b"garbage!!!"
    await _raw(
        bus.url,
        b"PUB " + prefix + b"\xff\xfe 2\r\n{}\r\n",
        b"HPUB " + prefix + b"publish %d %d\r\n" % (len(garbage), len(garbage) + 2) + garbage + b"{}\r\n",
        b"HPUB " + prefix + b"publish 16 16\r\nNATS/1.0 503\r\n\r\n\r\n",
    )
    last = await log.append(command_subject(job, "publish"), b"{}", "after")
    seen = []
    async with asyncio.timeout(WAIT_S):
        async for entry in log.follow(1):
            seen.append(entry.seq)
            if entry.seq == last:
                break
    assert seen == list(range(1, last + 1))
    assert last >= 2
    assert await log.entry(last - 1) is not None


def test_headers_that_are_none_are_left_out() -> None:
    """What can be read of a header block is read; nothing in it raises."""
    assert parse_headers(b"NATS/1.0\r\nA: 1\r\nno colon\r\n: empty\r\nB:2\r\n\r\n") == {"A": "1", "B": "2"}
    assert parse_headers(b"NATS/1.0 503\r\n\r\n") == {"Status": "503"}
    assert parse_headers(b"NATS/1.0 100 Idle Heartbeat\r\nX: y\r\n\r\n")["Status"] == "100"
    assert parse_headers(b"\xff\xfe") == {}
