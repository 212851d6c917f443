"""An agent that has as many shards as it may: what is refused leaves nothing."""

import asyncio
import errno
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.agent.core.test_retained_copies import retaining, wanted
from tests.unit.agent.storage.test_manifest import LAYOUT, PREFIX, left_ready, manifest_of, names, next_run

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.core.agent import AgentCore
from tensorhub_agent.core.command_sequencer import SHARDS_MAX
from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import (
    AllocateCopy,
    AppendCommand,
    CallRegister,
    CopyMade,
    FailCall,
    FreeShard,
    SaveManifest,
)
from tensorhub_agent.core.shard_state import ShardContents, ShardSpec
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.runtime.troubles import TROUBLES
from tensorhub_agent.storage.adoption import AdoptionPolicy, adopt
from tensorhub_agent.storage.disk_segments import DiskSegmentStore
from tensorhub_agent.storage.manifest import Manifest, load, manifest_path, save
from tensorhub_agent.storage.segments import Segment, SegmentStore
from tensorhub_agent.storage.shard_store import JobShardStore, ShardStores
from tensorhub_common.errors import AgentUnavailable, MemoryExhausted
from tensorhub_common.layout.layout import layout_digest, segment_bytes
from tensorhub_common.protocol.log.commands import Join, Release
from tensorhub_common.protocol.log.events import CopyMember, CopyPlaced, ShardReleased
from tensorhub_common.runtime.supervision import Fault
from tensorhub_simulator.drivers.agent import MODEL, NBYTES, OneAgent, joined, spec_of

GIB = 1 << 30


@pytest.fixture
async def pool() -> AsyncIterator[CopyPool]:
    pool = CopyPool(1)
    yield pool
    pool.close()


@pytest.fixture
def store(tmp_path: Path) -> SegmentStore:
    return SegmentStore(tmp_path, PREFIX, GIB)


# What is asked of it.


def full_core(shards: int = SHARDS_MAX) -> AgentCore:
    core = AgentCore("agent-0", CoreConfig(cache_bytes=1000))
    core.join(1, "host", "site", 0.0)
    fill(core, shards)
    return core


def fill(core: AgentCore, count: int) -> None:
    """Let the agent have so many shards more, which are as many as it may have."""
    for number in range(count):
        core.register(number_of(number), CallRegister(call=number, session=1, deadline=10.0), 0.0)
    assert len(core.shards) == SHARDS_MAX


def number_of(number: int) -> ShardSpec:
    return spec_of(ShardKey(MODEL, f"r-{number}", 0))


def test_a_shard_too_many_is_refused_and_its_memory_freed() -> None:
    core = full_core()
    for number in range(3):
        late = number_of(SHARDS_MAX + number)
        freed, failed = core.register(late, CallRegister(call=5000, session=1, deadline=10.0), 0.0)
        assert freed == FreeShard(late.key)
        assert isinstance(failed, FailCall)
        assert (failed.error, "release some" in failed.message) == ("MemoryExhausted", True)
    with pytest.raises(MemoryExhausted, match="release some"):
        core.check_room()
    with pytest.raises(MemoryExhausted):
        core.adopt(number_of(SHARDS_MAX), ShardContents())


def test_a_copy_too_many_is_given_back_to_the_log() -> None:
    agent = retaining()
    copy = wanted(agent)
    fill(agent.core, SHARDS_MAX - len(agent.core.shards))
    freed, released = agent.core.copy_made(CopyMade(copy.key, copy.shards, copy.layout, nbytes=NBYTES), agent.now)
    assert freed == FreeShard(copy.key)
    assert is_release(released)
    assert copy.key not in agent.core.shards
    assert agent.core.tick(agent.now + 1) == []


def test_no_memory_is_made_for_a_copy_too_many() -> None:
    wish = wanted(retaining())
    member = CopyMember(shard=wish.key.shard, agent="agent-0", layout=wish.layout, nbytes=wish.nbytes)
    placed = CopyPlaced(model=MODEL, replica=wish.key.replica, version=1, members=(member,))
    full = full_core()
    full.joined = True
    [released] = full.on_event(placed, 0.0)
    assert is_release(released)
    full.shards.popitem()
    assert [type(effect) for effect in full.on_event(placed, 0.0)] == [AllocateCopy]


def is_release(effect: object) -> bool:
    """Tell whether this gives a copy back on the agent's own lane."""
    assert isinstance(effect, AppendCommand)
    assert effect.command.by is not None
    return isinstance(effect.command, Release) and effect.command.by.lane == "agent-0"


# What an earlier process left.


class TwoAtMost(AdoptionPolicy):
    def __init__(self) -> None:
        self.taken = 0

    def refusal(self, manifest: Manifest) -> str | None:
        return "two are enough" if self.taken == 2 else None

    def take(self, manifest: Manifest) -> None:
        self.taken += 1


def test_a_shard_too_many_is_stated_as_empty_and_freed_if_the_log_does_not_know_it() -> None:
    agent = joined()
    key = agent.register("kept")
    again = OneAgent(after=agent)
    stranger = again.key("unknown")
    for each in (key, stranger):
        again.core.set_aside(each)
    again.join(2)
    assert {holding.replica for holding in again.appended(Join)[0].holds} == {"kept", "unknown"}
    assert again.freed() == [stranger]
    assert again.core.aside == {key}
    assert "kept" in again.catalog.models[MODEL].replicas, "the log has forgotten what stands there"
    # An earlier worker's, which is read late: what stands there is of the one that was registered since.
    again.do(again.core.on_event(ShardReleased(model=MODEL, replica="kept", shard=0), again.now))
    assert again.core.aside == {key}
    again.do(again.core.job_deleted("the job is deleted", again.now))
    assert again.freed() == [stranger, key]


def failing(number: int) -> Callable[..., Any]:
    """Stand in for a call into the kernel that fails."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fails


async def test_too_many_manifests_are_set_aside_and_taken_back_by_a_run_that_has_room(
    tmp_path: Path, store: SegmentStore, pool: CopyPool, caplog: pytest.LogCaptureFixture
) -> None:
    empty = [manifest_of(store.create(segment_bytes(LAYOUT)), replica=f"r-{number}") for number in range(3)]
    for number, manifest in enumerate(empty):
        save(store, manifest)
        # The clock of a file system stands still for some milliseconds.
        os.utime(manifest_path(store, manifest.segment), (number, number))
    ready = await left_ready(store, pool)
    before = names(tmp_path)
    again = next_run(store)
    with caplog.at_level(logging.ERROR):
        adopted, aside = await adopt(again, pool, TwoAtMost())
    assert [each.manifest for each in adopted] == [ready, empty[0]], "what holds a version comes first, then the oldest"
    assert [each.manifest for each in aside] == empty[1:]
    assert len(caplog.messages) == 2
    assert "two are enough" in caplog.text
    assert names(tmp_path) == before
    assert again.account.total_bytes == sum(each.nbytes for each in [*empty, ready])
    again.close()
    adopted, aside = await adopt(next_run(store), pool)
    assert (len(adopted), aside) == (4, [])


@pytest.mark.parametrize("place", ["segments.os.open", "segments._map", "manifest.Path.open"])
async def test_what_cannot_be_opened_now_is_set_aside(
    store: SegmentStore, pool: CopyPool, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Without a free descriptor, or memory for the mapping, nothing is known of what stands there: it stays.

    A machine without memory to spare takes back what it has.
    """
    manifest = await left_ready(store, pool)
    before = names(store.shm_dir)
    with monkeypatch.context() as patched:
        patched.setattr(f"tensorhub_agent.storage.{place}", failing(errno.EMFILE))
        adopted, aside = await adopt(next_run(store), pool)
    assert (adopted, [each.manifest for each in aside]) == ([], [] if "manifest" in place else [manifest])
    assert names(store.shm_dir) == before
    monkeypatch.setattr("tensorhub_agent.storage.segments._memory_spare", lambda _fd: -GIB)
    adopted, _ = await adopt(next_run(store), pool)
    assert [each.whole for each in adopted] == [True]


def shelves_of_jobs(store: SegmentStore, jobs: int) -> ShardStores:
    """Return what the next process finds where an earlier one has left a shard of each job."""
    for number in range(jobs):
        save(store, manifest_of(store.create(segment_bytes(LAYOUT)), job=f"job-{number}"))
    return ShardStores(next_run(store))


async def test_a_shard_that_was_set_aside_is_not_made_anew_beside_it(store: SegmentStore, pool: CopyPool) -> None:
    stores = shelves_of_jobs(store, 2)
    adopted = await stores.adopt(pool, jobs_max=1)
    (job,) = adopted
    shards = stores.of(*{"job-0", "job-1"} - {job})
    ((key, (aside, _)),) = shards.aside.items()
    with pytest.raises(AgentUnavailable, match="serves 1 jobs"):
        await make(shards, key)
    assert manifest_path(store, aside.manifest.segment).exists()
    shards.free(key)
    assert not manifest_path(store, aside.manifest.segment).exists()
    assert stores.store.account.total_bytes == adopted[job][0].segment.nbytes


async def test_a_job_of_which_all_was_set_aside_is_joined_while_there_is_room(
    store: SegmentStore, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log would take its agent for gone, and the agent would never hear what became of what it has."""
    stores = shelves_of_jobs(store, 3)
    monkeypatch.setattr("tensorhub_agent.storage.segments.os.open", failing(errno.EMFILE))
    adopted = await stores.adopt(pool, jobs_max=2)
    assert list(adopted.values()) == [[], []]
    assert len(stores.set_aside()) == 3


@pytest.mark.parametrize("aside", [True, False], ids=["aside", "taken-back"])
async def test_a_disk_that_removes_nothing_costs_neither_job_nor_agent(
    tmp_path: Path, pool: CopyPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, aside: bool
) -> None:
    broken = failing(errno.EIO)
    shm = tmp_path / "shm"
    shm.mkdir()
    disk = DiskSegmentStore(tmp_path, PREFIX, GIB)
    manifest = manifest_of(disk.create(segment_bytes(LAYOUT), disk.head_of(LAYOUT)), replica="_cache-1-5")
    save(disk, manifest)
    disk.close()
    with monkeypatch.context() as patched:
        if aside:
            patched.setattr("tensorhub_agent.storage.segments.os.open", broken)
        stores = ShardStores(SegmentStore(shm, PREFIX, GIB), DiskSegmentStore(tmp_path, PREFIX, GIB))
        await stores.adopt(pool, jobs_max=2)
    shards = stores.of(manifest.job)
    [key] = shards.aside if aside else shards.shards
    escaped: list[Fault] = []
    with monkeypatch.context() as patched:
        patched.setattr("tensorhub_common.runtime.supervision._process.last_resort", escaped.append)
        # The same fault is logged once in a while, whichever test it was of.
        patched.setattr("tensorhub_common.runtime.supervision._process._logged", {})
        patched.setattr(Path, "unlink", broken)
        shards.free(key)
        await stores.files.idle()
    work = "removing what was set aside" if aside else "removing a file from the disk"
    assert f"{work} failed: OSError(5, 'Input/output error')" in caplog.text
    assert (shards.aside, shards.shards, escaped) == ({}, {}, [])


# A worker that goes while its memory is made.


async def make(shards: JobShardStore, key: ShardKey) -> None:
    await shards.make(key, 1, LAYOUT, layout_digest(LAYOUT), spot=False, incarnation=1)


async def test_a_worker_that_dies_while_its_memory_is_made_leaves_none(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on, create = threading.Event(), threading.Event(), store.create

    def slow(nbytes: int, head: bytes = b"") -> Segment:
        began.set()
        assert goes_on.wait(10)
        return create(nbytes, head)

    monkeypatch.setattr(store, "create", slow)
    shards = JobShardStore("run-7", store)
    making = asyncio.create_task(make(shards, ShardKey("policy", "trainer", 0)))
    await asyncio.to_thread(began.wait, 10)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    goes_on.set()
    async with asyncio.timeout(10):
        while store.account.total_bytes or names(store.shm_dir):  # noqa: ASYNC110 (a thread's work)
            await asyncio.sleep(0.005)
        await shards.files.idle()
    assert shards.shards == {}
    store.close()


async def test_a_manifest_without_room_costs_nothing_and_is_told(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before stands. It is believed only for bytes that hash to it."""
    shards, key = JobShardStore("run-7", store), ShardKey("policy", "trainer", 0)
    await make(shards, key)
    place = shards.shards[key]
    filling = SaveManifest(key=key, state="filling", partial=True, version=None, root=None, digests=b"", swap=False)
    with monkeypatch.context() as patched:
        patched.setattr("tensorhub_agent.storage.manifest.os.replace", failing(errno.ENOSPC))
        shards.save(filling)
        (trouble,) = TROUBLES.told()
        assert (trouble.kind, "make room in" in trouble.why) == ("no-room-for-manifests", True)
    before = load(store, place.segment.name)
    assert isinstance(before, Manifest)
    assert before.state == "empty"
    shards.save(filling)
    assert load(store, place.segment.name) == place.manifest
    assert TROUBLES.told() == ()
    store.close()


# A busy disk.


async def test_a_disk_that_takes_its_time_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests of copies are written beside the event loop, in order, and the last state is what stands there."""
    disk = DiskSegmentStore.in_state(tmp_path, GIB)
    assert disk is not None
    shards = JobShardStore("run-7", SegmentStore(tmp_path, PREFIX, GIB), disk)
    key = ShardKey("policy", "retained-1", 0)
    place = await shards.make(key, 1, LAYOUT, layout_digest(LAYOUT), spot=False, incarnation=1, on_disk=True)
    goes_on, threads = threading.Event(), set()
    real = save

    def slow(store: SegmentStore, manifest: Manifest) -> None:
        threads.add(threading.get_ident())
        assert goes_on.wait(10)
        real(store, manifest)

    monkeypatch.setattr("tensorhub_agent.storage.manifest.save", slow)
    for version in (1, 2, 3):
        shards.save(
            SaveManifest(key=key, state="ready", partial=False, version=version, root="a", digests=b"", swap=False)
        )
        await asyncio.sleep(0)
    settling = asyncio.create_task(shards.settle(key))
    await asyncio.sleep(0)
    assert not settling.done()
    goes_on.set()
    await settling
    assert threading.get_ident() not in threads
    found = load(disk, place.segment.name)
    assert isinstance(found, Manifest)
    assert found.version == 3
    shards.free(key)
    await shards.files.idle()
    assert (names(disk.shm_dir), disk.account.total_bytes) == ([], 0)
