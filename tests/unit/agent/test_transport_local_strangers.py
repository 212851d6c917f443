"""The local transport between agents of which one keeps to no rule: it says nonsense, nothing, or is not let in."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from tests.unit.agent.lease_book import Lost
from tests.unit.agent.local_hub import MIB, FakeSource, Hub, digests_of, end_of, local_hub, whole

from tensorhub_agent.primitives.lease_messages import (
    ConfirmRequest,
    Denied,
    Hello,
    LeaseBroken,
    LeaseMessage,
    ReaderDone,
    Renew,
    Welcome,
)
from tensorhub_agent.runtime import unix_server
from tensorhub_agent.runtime.rejections import RejectionCounter
from tensorhub_agent.transports import lease_session
from tensorhub_agent.transports.base import TransportLost
from tensorhub_agent.transports.local import transport
from tensorhub_agent.transports.local.framing import from_reader, send
from tensorhub_common.protocol.log.commands import PROTOCOL


@pytest.fixture(autouse=True)
def refused(monkeypatch: pytest.MonkeyPatch) -> RejectionCounter:
    """The counts of a process that has refused nothing yet, and so tells of the first."""
    counts = RejectionCounter()
    monkeypatch.setattr(transport, "REJECTIONS", counts)
    monkeypatch.setattr(unix_server, "REJECTIONS", counts)
    return counts


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    async with local_hub(tmp_path) as hub:
        yield hub


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeSource]:
    source = FakeSource(tmp_path / "fake.peers")
    with contextlib.closing(source):
        yield source


# Readers.


@pytest.mark.parametrize("first", [Renew(), ConfirmRequest(1), ReaderDone()])
async def test_a_frame_out_of_order_ends_the_connection(
    hub: Hub, first: LeaseMessage, caplog: pytest.LogCaptureFixture
) -> None:
    framed = await hub.raw(first)
    await end_of(framed)
    framed.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "first frame must be Hello" in caplog.text


async def test_a_second_hello_ends_the_lease(hub: Hub) -> None:
    hub.book.offer("L1", hub.published(1))
    framed = await hub.raw(Hello(PROTOCOL, "ticket-L1", "reader"))
    await send(framed, Hello(PROTOCOL, "ticket-L1", "reader"))
    await end_of(framed)
    framed.close()
    await hub.book.until("gone", "L1")


@pytest.mark.parametrize(
    "data", [b"\x00\x00\x00\x03abc", b"\xff\xff\xff\xff", b"\x00\x00\x20\x00", b"\x00\x00\x00\x00"]
)
async def test_what_is_no_frame_ends_the_connection(hub: Hub, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    framed = await hub.raw()
    framed._sock.send(data)
    await end_of(framed)
    framed.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_a_connection_that_says_nothing_is_cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HELLO_S", 0.02)
    framed = await hub.raw()
    await end_of(framed)
    framed.close()


async def test_a_reader_that_falls_silent_is_cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "SILENCE_S", 0.02)
    lost = Lost()
    session = await hub.open("L1", hub.published(1), lost)
    assert "gone" in await lost.wait()
    await hub.book.until("gone", "L1")
    await session.close()


async def test_there_is_a_bound_on_connections(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_server, "CONNECTIONS_MAX", 1)
    segment = hub.published(1)
    session = await hub.open("L1", segment)
    with pytest.raises(TransportLost, match="can't be read from"):
        await hub.open("L2", segment)
    await session.close()


async def test_another_user_is_not_let_in(hub: Hub, monkeypatch: pytest.MonkeyPatch, refused: RejectionCounter) -> None:
    monkeypatch.setattr(unix_server, "peer_of", lambda _: (1, os.geteuid() + 1))
    with pytest.raises(TransportLost):
        await hub.open("L1", hub.published(1))
    assert "ticket-L1" in hub.book.tickets
    assert refused.counts["user"] == 1


async def test_a_connection_of_which_no_one_can_be_told_costs_no_other(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> NoReturn:
        raise OSError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(unix_server, "peer_of", fails)
        with pytest.raises(TransportLost):
            await hub.open("L1", hub.published(1))
    session = await hub.open("L2", hub.published(1))
    await session.close()


# Sources.


async def test_nobody_there_is_lost_at_once(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(TransportLost, match="nobody answers"):
        await hub.reader.open(hub.grant("L1", str(tmp_path / "no")), reader="reader", on_lost=lambda _: None)


async def test_a_source_that_stands_still_holds_nobody_up(
    hub: Hub, fake: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts for it, as for a stopped process, and nothing comes."""
    monkeypatch.setattr(transport, "OPEN_S", 0.05)
    with pytest.raises(TransportLost, match=r"did not let us in within 0.05 s"):
        await hub.reader.open(hub.grant("L1", str(fake.path)), reader="reader", on_lost=lambda _: None)


async def test_a_source_that_stands_still_later_is_lost_when_asked(
    hub: Hub, fake: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_session, "CONFIRM_S", 0.05)
    segment, lost = hub.published(MIB), Lost()
    opening = asyncio.create_task(hub.reader.open(hub.grant("L1", str(fake.path)), reader="reader", on_lost=lost))
    framed = await fake.welcome(segment)
    session = await opening
    destination = memoryview(bytearray(segment.nbytes))
    assert await session.read(destination, whole(segment), digests=True) == digests_of(segment.view, whole(segment))
    assert not await session.still_holds()
    assert "has not said within" in await lost.wait()
    await session.close()
    framed.close()


@pytest.mark.parametrize("frame", [Welcome("name", 1), Denied("too late"), ReaderDone()])
async def test_a_source_that_says_nonsense_is_lost(hub: Hub, fake: FakeSource, frame: LeaseMessage) -> None:
    lost = Lost()
    opening = asyncio.create_task(hub.reader.open(hub.grant("L1", str(fake.path)), reader="reader", on_lost=lost))
    framed = await fake.welcome(hub.published(1))
    session = await opening
    await send(framed, frame)
    assert "can't be read" in await lost.wait()
    await session.close()
    framed.close()


@pytest.mark.parametrize(
    "frame", [LeaseBroken("too early"), Welcome("name", 1), Welcome("name", 1 << 40), ReaderDone()]
)
async def test_a_source_that_lets_in_wrongly_is_lost(hub: Hub, fake: FakeSource, frame: LeaseMessage) -> None:
    """Too early, without a descriptor, with a descriptor of less memory than said, in no known words."""
    segment = hub.published(1)
    opening = asyncio.create_task(
        hub.reader.open(hub.grant("L1", str(fake.path)), reader="reader", on_lost=lambda _: None)
    )
    framed = await fake.accept()
    await from_reader(framed)
    await send(framed, frame, segment.fd if frame == Welcome("name", 1 << 40) else None)
    with pytest.raises(TransportLost, match="can't be read from"):
        await opening
    await end_of(framed)
    framed.close()
