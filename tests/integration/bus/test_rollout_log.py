"""The log of rollouts: an entry is written once and read in order; what is no entry is told, and the log is trimmed."""

from contextlib import aclosing

import pytest
from tests.bounds import WAIT_S
from tests.integration.bus.conftest import take
from tests.kit.nats import RunningNats
from tests.kit.waiting import until

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogFull, LogGap, LogMissing, MessageTooLarge, StreamMismatch
from tensorhub_common.jetstream import api, rollout_log
from tensorhub_common.jetstream.rollout_log import RolloutLog, RolloutLogEntry, open_rollout_log
from tensorhub_common.protocol.rollout.entries import (
    ENTRY_BYTES_MAX,
    AnyEntry,
    Attach,
    Cancel,
    Done,
    End,
    Lead,
    RequestEnded,
    RequestId,
    Scale,
    SdkSender,
    UnreadableEntry,
)
from tensorhub_common.protocol.subjects import rollout_entry, rollout_stream

ENTRIES: list[AnyEntry] = [
    Attach("main", "policy", 0, "n"),
    Lead(1, "rollout-0"),
    Cancel(SdkSender(1, 1), ("g",)),
    End(1, (RequestEnded(RequestId(3, 0), None, "failed", 0, "no instance"),)),
    Done(SdkSender(1, 2), (RequestId(3, 0),)),
    Scale(1, 2, "", "a test"),
]


@pytest.fixture
async def rollouts(bus: Bus, job: str) -> RolloutLog:
    return await open_rollout_log(bus, job)


async def read(log: RolloutLog, number: int, start: int = 1) -> list[RolloutLogEntry]:
    async with aclosing(log.follow(start)) as entries:
        return await take(entries, number, WAIT_S)


async def test_entries_are_read_as_they_were_appended(rollouts: RolloutLog) -> None:
    """Each on the subject of its verb; a repeat is the entry that is there."""
    seqs = [await rollouts.append(entry, f"m{index}") for index, entry in enumerate(ENTRIES)]
    assert seqs == [1, 2, 3, 4, 5, 6]
    assert await rollouts.append(ENTRIES[0], "m0") == 1
    assert await rollouts.last_seq() == 6
    assert [(each.seq, each.entry) for each in await read(rollouts, 6)] == list(enumerate(ENTRIES, 1))
    assert [each.entry for each in await read(rollouts, 2, start=5)] == ENTRIES[4:]
    stored = await rollouts.entry(4)
    assert stored is not None
    assert stored.subject == rollout_entry(rollouts.job, "end")
    assert stored.headers[api.MSG_ID] == "m3"
    assert stored.time == (await read(rollouts, 1, start=4))[0].time, "time is the same in each way of reading"
    assert rollout_log.decoded(stored) == ENTRIES[3]
    assert await rollouts.entry(7) is None


async def test_who_waits_at_the_end_gets_the_next_entry(rollouts: RolloutLog) -> None:
    async with aclosing(rollouts.follow()) as entries:
        assert await rollouts.append(ENTRIES[0], "m0") == 1
        assert [each.entry for each in await take(entries, 1)] == [ENTRIES[0]]
        assert await rollouts.append(ENTRIES[1], "m1") == 2
        assert [each.entry for each in await take(entries, 1)] == [ENTRIES[1]]


async def test_what_is_trimmed_is_a_gap(rollouts: RolloutLog) -> None:
    for index, entry in enumerate(ENTRIES):
        await rollouts.append(entry, f"m{index}")
    created = (await rollouts.extent()).created
    await rollouts.trim(4)
    extent = await rollouts.extent()
    assert (extent.first, extent.last, extent.created) == (4, 6, created)
    assert 0 < extent.fullness < 0.01
    with pytest.raises(LogGap, match="no entry 3"):
        await read(rollouts, 1, start=3)
    assert [each.seq for each in await read(rollouts, 3, start=4)] == [4, 5, 6]


async def test_what_is_no_entry_is_told(rollouts: RolloutLog, bus: Bus) -> None:
    """Bytes that are none, another verb's body, and JetStream's own answer, which a request sent here as its reply."""
    lead = rollout_entry(rollouts.job, "lead")
    await api.store(bus, lead, b"none")
    await api.store(bus, rollout_entry(rollouts.job, "attach"), b'{"verb":"lead","term":1,"manager":"m"}')
    await bus.publish(f"{api.API}.STREAM.MSG.GET.{rollouts.stream}", b'{"seq":2}', reply=lead)

    async def is_stored() -> bool:
        return await rollouts.last_seq() == 3

    await until(is_stored)
    await rollouts.append(ENTRIES[1], "m")
    found = [each.entry for each in await read(rollouts, 4)]
    assert [isinstance(each, UnreadableEntry) for each in found] == [True, True, True, False]
    stored = await rollouts.entry(3)
    assert stored is not None
    assert b"stream_msg_get_response" in stored.data


async def test_too_large_and_too_full_are_refused_and_drop_nothing(rollouts: RolloutLog, bus: Bus) -> None:
    with pytest.raises(MessageTooLarge, match="split it up"):
        await rollouts.append(Scale(1, 1, "", "x" * ENTRY_BYTES_MAX), "large")
    largest = "x" * (ENTRY_BYTES_MAX - 200)
    assert await rollouts.append(Scale(1, 1, "", largest), "largest") == 1
    config = rollout_log._config(rollouts.job, 1) | {"max_bytes": 300_000}
    await api.api(bus, f"STREAM.UPDATE.{rollouts.stream}", config)
    with pytest.raises(LogFull):
        await rollouts.append(Scale(1, 2, "", largest), "beyond")
    assert (await rollouts.extent()).last == 1


async def test_opening_again_changes_nothing_and_another_stream_is_none(bus: Bus, job: str) -> None:
    log = await open_rollout_log(bus, job)
    await log.append(ENTRIES[0], "m")
    assert await (await open_rollout_log(bus, job)).last_seq() == 1
    await log.remove()
    await log.remove()
    for call in (log.append(ENTRIES[0], "m"), log.extent(), log.entry(1), anext(log.follow())):
        with pytest.raises(LogMissing, match=r"no rollout log|no stream"):
            await call
    config = rollout_log._config(job, 1)
    await api.api(bus, f"STREAM.CREATE.{rollout_stream(job)}", config | {"allow_direct": True})
    with pytest.raises(StreamMismatch, match="allow_direct is True"):
        await open_rollout_log(bus, job)


async def test_an_append_goes_on_through_a_restart(own_nats_server: RunningNats, own_bus: Bus, job: str) -> None:
    log = await open_rollout_log(own_bus, job)
    own_nats_server.kill()
    async with aclosing(log.follow()) as entries:
        own_nats_server.restart()
        assert await log.append(ENTRIES[0], "m") == 1
        assert [each.entry for each in await take(entries, 1, WAIT_S)] == [ENTRIES[0]]
