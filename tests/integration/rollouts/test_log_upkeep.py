"""What a leading manager keeps small, on a real NATS: snapshots trim the log, and payloads that nothing names go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine

import pytest
from tests.kit.waiting import until

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogGap
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.payload_store import PayloadStore
from tensorhub_common.jetstream.rollout_log import RolloutLog, open_rollout_log
from tensorhub_common.protocol.rollout.entries import AnyEntry, Attach, GroupSubmitted, Lead, Payload, SdkSender, Submit
from tensorhub_common.protocol.subjects import payload_stream, rollout_snapshot
from tensorhub_rollout.jobs import payload_removal
from tensorhub_rollout.jobs.payload_reader import PayloadReader
from tensorhub_rollout.jobs.payload_removal import PayloadRemoval
from tensorhub_rollout.jobs.snapshots import RolloutSnapshots, SnapshotMaker
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.state import RolloutState, encode_state


class Folded:
    """A job's rollout log and its fold."""

    def __init__(self, bus: Bus, log: RolloutLog, store: PayloadStore) -> None:
        self.bus, self.log, self.store = bus, log, store
        self.state = RolloutState(log.job)
        self.snapshots = RolloutSnapshots(bus, log)

    async def append(self, entry: AnyEntry) -> None:
        seq = await self.log.append(entry, f"m{self.state.seq + 1}")
        fold(self.state, seq, entry)

    async def keep(self) -> None:
        await self.snapshots.keep(encode_state(self.state), self.state.seq)

    async def first(self) -> int:
        return (await self.log.extent()).first

    async def newest(self, beyond: int = 0) -> RolloutState | None:
        """Ask as another manager does."""
        return await RolloutSnapshots(self.bus, self.log).newest(beyond)


@pytest.fixture
async def folded(bus: Bus, job: str) -> Folded:
    store = PayloadStore(bus)
    await store.open(job)
    made = Folded(bus, await open_rollout_log(bus, job), store)
    await made.append(Lead(1, "m"))
    await made.append(Attach("main", "policy", 0, "n"))
    return made


async def test_the_log_loses_what_is_before_the_older_of_two_snapshots(folded: Folded) -> None:
    await folded.keep()
    assert (await folded.first(), await folded.newest()) == (1, folded.state)
    await folded.append(Lead(2, "other"))
    await folded.append(Lead(3, "m"))
    await folded.keep()
    assert await folded.first() == 3
    found = await folded.newest()
    assert found == folded.state
    assert (found.seq, found.term, await folded.newest(beyond=4)) == (4, 3, None)
    # Of an earlier state nothing is kept any more.
    await folded.keep()
    assert await folded.first() == 3


async def test_a_snapshot_that_can_not_be_read_is_passed_over_and_a_gap_is_told(folded: Folded) -> None:
    await folded.keep()
    before = folded.state.seq
    await folded.append(Lead(2, "other"))
    await folded.keep()
    await broken(folded, newer=True)
    found = await folded.newest()
    assert found is not None
    assert found.seq == before
    await broken(folded, newer=False)
    with pytest.raises(LogGap, match=r"begins at 3, and no snapshot leads there"):
        await folded.newest()
    assert await folded.newest(beyond=2) is None


async def broken(folded: Folded, *, newer: bool) -> None:
    """Remove the parts of a snapshot."""
    index = await folded.snapshots._index((await folded.log.extent()).created)
    assert index is not None
    record = index.newer if newer else index.older
    assert record is not None
    subject = rollout_snapshot(folded.log.job, record.digest, 0)
    await api.api(folded.bus, f"STREAM.PURGE.{payload_stream(folded.log.job)}", {"filter": subject})


async def test_a_snapshot_is_made_after_as_many_entries(folded: Folded) -> None:
    maker = SnapshotMaker(folded.snapshots, entries_max=3)
    async with running(maker.run()):
        maker.note(folded.state)
        assert await folded.newest() is None
        await folded.append(Lead(2, "other"))
        maker.note(folded.state)
        await until(lambda: is_kept(folded, 3), "a snapshot is kept")


async def is_kept(folded: Folded, seq: int) -> bool:
    found = await folded.newest()
    return found is not None and found.seq == seq


async def test_payloads_that_nothing_names_are_removed_once_they_are_old(
    folded: Folded, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, store = folded.log.job, folded.store
    named, orphan = await store.put(job, b"named"), await store.put(job, b"orphan")
    await folded.append(Submit(SdkSender(2, 1), (GroupSubmitted("p", "a" * 64, 1, 1, 4),), Payload(named, 5)))
    removal = PayloadRemoval(job, store, PayloadReader(job, store), lambda: folded.state)
    # As old as it is, its entry may still come.
    await removal._remove_orphans()
    assert {each.digest for each in await store.listed(job)} == {named, orphan}
    monkeypatch.setattr(payload_removal, "ORPHAN_S", -1.0)
    monkeypatch.setattr(payload_removal, "ORPHAN_LOOK_S", 0.01)

    async def are_listed(*digests: str) -> bool:
        return {each.digest for each in await store.listed(job)} == set(digests)

    async with running(removal.run_orphans()):
        await until(lambda: are_listed(named), "the orphan is removed")
    async with running(removal.run_freed()):
        removal.free(named)
        await until(removal._freed.empty, "it has looked at what is named still")
        assert await are_listed(named)
        (freed,) = fold(folded.state, folded.state.seq + 1, Attach("main", "policy", 1, "n")).freed
        assert freed == named
        removal.free(freed)
        await until(are_listed, "what was freed is removed")


@contextlib.asynccontextmanager
async def running(work: Coroutine[None, None, object]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
