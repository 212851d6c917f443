"""Chains of events on a real server: always a beginning of them stands, in order and with nothing in between."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from tests.integration.registry.conftest import Passing

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import WrongLastSequence
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.job_log import JobLog, open_job
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.events import ReplicaReady
from tensorhub_common.protocol.subjects import command_subject
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_registry.core.job_fold import EventBatch, Outgoing, PublicationStored
from tensorhub_registry.core.log_entries import subject_of
from tensorhub_registry.jobs.log_writer import CHAIN_EVENTS_MAX, CHAIN_EVENTS_MIN, LogWriter


@pytest.fixture
async def log(bus: Bus, job: str) -> JobLog:
    return await open_job(bus, job)


def outgoing(job: str, number: int) -> Outgoing:
    said = ReplicaReady(
        cmd=number, i=1, k=1, time=1.0, by=None, model="policy", replica="rollout", version=number, round=None
    )
    return Outgoing(said, subject_of(job, said), encode(said), {})


def publication(job: str, count: int, first: int = 1, *, expected: int = 0, ahead: int = 1) -> EventBatch:
    return EventBatch(expected, ahead, tuple(outgoing(job, first + number) for number in range(count)))


def writer(bus: Any, log: JobLog) -> LogWriter:
    return LogWriter(bus, log, Supervisor("a test"))


async def standing(log: JobLog) -> list[bytes]:
    entries = [await log.entry(seq) for seq in range(1, await log.last_seq() + 1)]
    return [entry.data for entry in entries if entry is not None]


class Meddling(Passing):
    """A bus on which somebody else's command gets in before one of the events."""

    def __init__(self, bus: Bus, log: JobLog, before: bytes) -> None:
        super().__init__(bus)
        self._log, self._before = log, before

    async def request(self, subject: str, body: bytes, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        if body == self._before:
            await self._bus.publish(command_subject(self._log.job, "publish"), b"{}")
        return await self._bus.request(subject, body, timeout_s, headers)


class Clustered(Passing):
    """A bus to one of several nodes, as it says."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self.server_info = {**bus.server_info, "cluster": "tensorhub"}
        self.sent: list[Mapping[str, str]] = []

    async def request(self, subject: str, body: bytes, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        self.sent.append(headers)
        return await self._bus.request(subject, body, timeout_s, headers)


@pytest.mark.parametrize("count", [2, 3, CHAIN_EVENTS_MAX])
async def test_a_chain_stands_as_it_was_sent(bus: Bus, log: JobLog, count: int) -> None:
    said = publication(log.job, count)
    assert await writer(bus, log).store(said) == PublicationStored(count, count)
    assert await standing(log) == [each.body for each in said.events]


@pytest.mark.parametrize("cut", [1, 2, 4])
async def test_where_a_command_gets_in_the_chain_ends_and_the_rest_is_said_again(
    bus: Bus, log: JobLog, cut: int
) -> None:
    said = publication(log.job, 5)
    meddling = Meddling(bus, log, said.events[cut].body)
    storing = writer(meddling, log)
    assert await storing.store(said) == PublicationStored(cut, cut)
    assert storing.chain_max == max(CHAIN_EVENTS_MIN, 2 * cut)
    before, rest = [each.body for each in said.events[:cut]], said.events[cut:]
    assert await standing(log) == [*before, b"{}"]
    storing = writer(bus, log)
    assert await storing.store(EventBatch(cut, cut + 2, rest)) == PublicationStored(len(rest), 6)
    assert await standing(log) == [*before, b"{}", *(each.body for each in rest)]


async def test_a_command_before_the_first_leaves_the_first_alone(bus: Bus, log: JobLog) -> None:
    """The places that were reckoned with are each taken by the one before; none of the others may stand there."""
    said = publication(log.job, 4)
    await bus.publish(command_subject(log.job, "publish"), b"{}")
    assert await writer(bus, log).store(said) == PublicationStored(1, 2)
    assert await standing(log) == [b"{}", said.events[0].body]


async def test_a_cluster_is_sent_no_chain(bus: Bus, log: JobLog) -> None:
    """There the name of the event before, where it is another one, would end the log (see `storing`)."""
    said, clustered = publication(log.job, 5), Clustered(bus)
    storing = writer(clustered, log)
    assert await storing.store(said) == PublicationStored(1, 1)
    assert storing.chain_max == 1
    assert await standing(log) == [said.events[0].body]
    assert not [headers for headers in clustered.sent if api.EXPECTED_LAST_ID in headers]


async def test_of_a_chain_against_another_last_event_nothing_stands(bus: Bus, log: JobLog) -> None:
    other = publication(log.job, 1, 77)
    await writer(bus, log).store(other)
    with pytest.raises(WrongLastSequence):
        await writer(bus, log).store(publication(log.job, 4))
    assert await standing(log) == [other.events[0].body]


async def test_what_is_said_again_does_not_stand_twice(bus: Bus, log: JobLog) -> None:
    """Its acknowledgement was lost: the same process says all of it again, and learns that something stands."""
    storing, said = writer(bus, log), publication(log.job, 4)
    await storing.store(said)
    await asyncio.gather(storing.store(said), return_exceptions=True)
    assert await standing(log) == [each.body for each in said.events]
