"""An agent that has as many shards as it may: what is refused leaves nothing."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.agent.core.scene import MODEL, NBYTES, OneAgent
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

GIB = 1 << 30


@pytest.fixture
async def pool() -> AsyncIterator[CopyPool]:
    pool = CopyPool(1)
    yield pool
    pool.close()


def place_of(number: int) -> ShardSpec:
    return ShardSpec(ShardKey(MODEL, f"r-{number}", 0), 1, spot=False, layout="f" * 64, nbytes=NBYTES)


def fill(core: AgentCore, count: int) -> None:
    """Let the agent have so many shards more."""
    for number in range(count):
        core.register(place_of(number), CallRegister(call=number, session=1, deadline=10.0), 0.0)
    assert len(core.shards) == SHARDS_MAX


# What is asked of it.


def test_a_shard_too_many_is_refused_and_its_memory_freed() -> None:
    core = AgentCore("agent-0", CoreConfig())
    core.join(1, "host", "site", 0.0)
    fill(core, SHARDS_MAX)
    for number in range(3):
        late = place_of(SHARDS_MAX + number)
        effects = core.register(late, CallRegister(call=5000, session=1, deadline=10.0), 0.0)
        assert [type(effect) for effect in effects] == [FreeShard, FailCall]
        assert effects[0] == FreeShard(late.key)
        assert isinstance(effects[1], FailCall)
        assert (effects[1].error, "release some" in effects[1].message) == ("MemoryExhausted", True)
    with pytest.raises(MemoryExhausted, match="release some"):
        core.check_room()


def test_a_copy_too_many_is_given_back_to_the_log() -> None:
    agent = retaining()
    agent.core.joined = True
    copy = wanted(agent)
    agent.unsaid.clear()
    fill(agent.core, SHARDS_MAX - len(agent.core.shards))
    effects = agent.core.copy_made(CopyMade(copy.key, copy.shards, copy.layout, nbytes=NBYTES), agent.now)
    assert effects[0] == FreeShard(copy.key)
    assert [said_by(effect) for effect in effects[1:]] == [(Release, "agent-0")]
    assert copy.key not in agent.core.shards
    assert agent.core.tick(agent.now + 1) == []


def test_no_memory_is_made_for_a_copy_too_many() -> None:
    placed = placed_by(retaining())
    full = AgentCore("agent-0", CoreConfig(cache_bytes=1000))
    full.join(1, "host", "site", 0.0)
    fill(full, SHARDS_MAX)
    full.joined = True
    effects = full.on_event(placed, 0.0)
    assert [said_by(effect) for effect in effects] == [(Release, "agent-0")]
    full.shards.popitem()
    assert [type(effect) for effect in full.on_event(placed, 0.0)] == [AllocateCopy]


def placed_by(agent: OneAgent) -> CopyPlaced:
    """Return the event with which the log has placed the copy."""
    wish = wanted(agent)
    member = CopyMember(shard=wish.key.shard, agent="agent-0", layout=wish.layout, nbytes=wish.nbytes)
    return CopyPlaced(model=wish.key.model, replica=wish.key.replica, version=1, members=(member,))


def said_by(effect: object) -> tuple[type, str] | None:
    if not isinstance(effect, AppendCommand) or effect.command.by is None:
        return None
    return type(effect.command), effect.command.by.lane


# What an earlier process left.


class TwoAtMost(AdoptionPolicy):
    def __init__(self) -> None:
        self.taken = 0

    def refusal(self, manifest: Manifest) -> str | None:
        return "two are enough" if self.taken == 2 else None

    def take(self, manifest: Manifest) -> None:
        self.taken += 1


def test_a_shard_too_many_is_stated_as_empty_and_freed_if_the_log_does_not_know_it() -> None:
    agent = OneAgent()
    agent.join()
    key = agent.register("kept")
    again = OneAgent(catalog=agent.catalog)
    stranger = again.key("unknown")
    for each in (key, stranger):
        again.core.set_aside(each)
    again.join(2)
    joins = [
        effect.command
        for effect in again.seen
        if isinstance(effect, AppendCommand) and isinstance(effect.command, Join)
    ]
    assert {holding.replica for holding in joins[0].holds} == {"kept", "unknown"}
    assert [effect for effect in again.seen if isinstance(effect, FreeShard)] == [FreeShard(stranger)]
    assert again.core.aside == {key}
    assert "kept" in again.catalog.models[MODEL].replicas, "the log has forgotten what stands there"
    # An earlier worker's, which is read late: what stands there is of the one that was registered since.
    again.do(again.core.on_event(ShardReleased(model=MODEL, replica="kept", shard=0), again.now))
    assert again.core.aside == {key}
    again.do(again.core.job_deleted("the job is deleted", again.now))
    assert again.last(FreeShard) == FreeShard(key)


def test_an_agent_that_is_full_adopts_no_more() -> None:
    core = AgentCore("agent-0", CoreConfig())
    for number in range(SHARDS_MAX):
        core.adopt(place_of(number), ShardContents())
    with pytest.raises(MemoryExhausted):
        core.adopt(place_of(SHARDS_MAX), ShardContents())


async def test_too_many_manifests_are_set_aside_and_taken_back_by_a_run_that_has_room(
    tmp_path: Path, pool: CopyPool, caplog: pytest.LogCaptureFixture
) -> None:
    store = SegmentStore(tmp_path, PREFIX, GIB)
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
    assert again.total_bytes == sum(each.nbytes for each in [*empty, ready])
    again.close()
    adopted, aside = await adopt(next_run(store), pool)
    assert (len(adopted), aside) == (4, [])


async def test_what_cannot_be_opened_now_is_set_aside(
    tmp_path: Path, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a free descriptor, or memory for the mapping, nothing is known of what stands there: it stays."""
    store = SegmentStore(tmp_path, PREFIX, GIB)
    manifest = await left_ready(store, pool)
    before = names(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("tensorhub_agent.storage.segments.os.open", full)
        adopted, aside = await adopt(next_run(store), pool)
    assert (adopted, [each.manifest for each in aside]) == ([], [manifest])
    with monkeypatch.context() as patched:
        patched.setattr("tensorhub_agent.storage.segments._map", full)
        adopted, aside = await adopt(next_run(store), pool)
    assert (adopted, [each.manifest for each in aside]) == ([], [manifest])
    with monkeypatch.context() as patched:
        patched.setattr("tensorhub_agent.storage.manifest.Path.open", full)
        assert await adopt(next_run(store), pool) == ([], [])
    assert names(tmp_path) == before
    adopted, _ = await adopt(next_run(store), pool)
    assert [each.whole for each in adopted] == [True]


async def test_a_machine_without_memory_to_spare_takes_back_what_it_has(
    tmp_path: Path, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SegmentStore(tmp_path, PREFIX, GIB)
    await left_ready(store, pool)
    monkeypatch.setattr("tensorhub_agent.storage.segments._memory_spare", lambda _fd: -GIB)
    adopted, _ = await adopt(next_run(store), pool)
    assert [each.whole for each in adopted] == [True]


async def test_a_shard_that_was_set_aside_is_not_made_anew_beside_it(tmp_path: Path, pool: CopyPool) -> None:
    store = SegmentStore(tmp_path, PREFIX, GIB)
    for number in range(2):
        save(store, manifest_of(store.create(segment_bytes(LAYOUT)), job=f"job-{number}"))
    shelves = ShardStores(next_run(store))
    adopted = await shelves.adopt(pool, jobs_max=1)
    (job,) = adopted
    (other,) = {"job-0", "job-1"} - {job}
    shelf = shelves.of(other)
    ((key, (aside, _)),) = shelf.aside.items()
    with pytest.raises(AgentUnavailable, match="serves 1 jobs"):
        await make(shelf, key)
    assert manifest_path(store, aside.manifest.segment).exists()
    shelf.free(key)
    assert not manifest_path(store, aside.manifest.segment).exists()
    assert shelves.store.total_bytes == adopted[job][0].segment.nbytes


async def test_a_job_of_which_all_was_set_aside_is_joined_while_there_is_room(
    tmp_path: Path, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log would take its agent for gone, and the agent would never hear what became of what it has."""
    store = SegmentStore(tmp_path, PREFIX, GIB)
    for number in range(3):
        save(store, manifest_of(store.create(segment_bytes(LAYOUT)), job=f"job-{number}"))

    def full(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("tensorhub_agent.storage.segments.os.open", full)
    shelves = ShardStores(next_run(store))
    adopted = await shelves.adopt(pool, jobs_max=2)
    assert list(adopted.values()) == [[], []]
    assert len(shelves.set_aside()) == 3


@pytest.mark.parametrize("aside", [True, False], ids=["aside", "taken-back"])
async def test_a_disk_that_removes_nothing_costs_neither_job_nor_agent(
    tmp_path: Path,
    pool: CopyPool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    aside: bool,  # noqa: FBT001 (a test's parameter)
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    shm = tmp_path / "shm"
    shm.mkdir()
    disk = DiskSegmentStore(tmp_path, PREFIX, GIB)
    manifest = manifest_of(disk.create(segment_bytes(LAYOUT), disk.head_of(LAYOUT)), replica="_cache-1-5")
    save(disk, manifest)
    disk.close()
    with monkeypatch.context() as patched:
        if aside:
            patched.setattr("tensorhub_agent.storage.segments.os.open", broken)
        shelves = ShardStores(SegmentStore(shm, PREFIX, GIB), DiskSegmentStore(tmp_path, PREFIX, GIB))
        await shelves.adopt(pool, jobs_max=2)
    shelf = shelves.of(manifest.job)
    [key] = shelf.aside if aside else shelf.shards
    escaped: list[Fault] = []
    with monkeypatch.context() as patched:
        patched.setattr("tensorhub_common.runtime.supervision._process.last_resort", escaped.append)
        # The same fault is logged once in a while, whichever test it was of.
        patched.setattr("tensorhub_common.runtime.supervision._process._logged", {})
        patched.setattr(Path, "unlink", broken)
        shelf.free(key)
        await shelves.files.idle()
    work = "removing what was set aside" if aside else "removing a file from the disk"
    assert f"{work} failed: OSError(5, 'Input/output error')" in caplog.text
    assert (shelf.aside, shelf.shards, escaped) == ({}, {}, [])


# A worker that goes while its memory is made.


async def make(shelf: JobShardStore, key: ShardKey) -> None:
    await shelf.make(key, 1, LAYOUT, layout_digest(LAYOUT), spot=False, incarnation=1)


class SlowStore(SegmentStore):
    """Makes a segment, and hands it over when the test lets it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, PREFIX, GIB)
        self.began, self.goes_on = threading.Event(), threading.Event()

    def create(self, nbytes: int, head: bytes = b"") -> Segment:
        self.began.set()
        assert self.goes_on.wait(10)
        return super().create(nbytes, head)


async def test_a_worker_that_dies_while_its_memory_is_made_leaves_none(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    shelf = JobShardStore("run-7", store)
    making = asyncio.create_task(make(shelf, ShardKey("policy", "trainer", 0)))
    await asyncio.to_thread(store.began.wait, 10)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    store.goes_on.set()
    async with asyncio.timeout(10):
        while store.total_bytes or names(tmp_path):  # noqa: ASYNC110 (a thread's work)
            await asyncio.sleep(0.005)
        await shelf.files.idle()
    assert shelf.shards == {}
    store.close()


async def test_a_manifest_without_room_costs_nothing_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before stands. It is believed only for bytes that hash to it."""
    store = SegmentStore(tmp_path, PREFIX, GIB)
    shelf, key = JobShardStore("run-7", store), ShardKey("policy", "trainer", 0)
    await make(shelf, key)
    place = shelf.shards[key]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    filling = SaveManifest(key=key, state="filling", partial=True, version=None, root=None, digests=b"", swap=False)
    with monkeypatch.context() as patched:
        patched.setattr("tensorhub_agent.storage.manifest.os.replace", full)
        shelf.save(filling)
        (trouble,) = TROUBLES.told()
        assert (trouble.kind, "make room in" in trouble.why) == ("no-room-for-manifests", True)
    before = load(store, place.segment.name)
    assert isinstance(before, Manifest)
    assert before.state == "empty"
    shelf.save(filling)
    assert load(store, place.segment.name) == place.manifest
    assert TROUBLES.told() == ()
    store.close()


# A busy disk.


async def test_a_disk_that_takes_its_time_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests of copies are written beside the event loop, in order, and the last state is what stands there."""
    disk = DiskSegmentStore.in_state(tmp_path, GIB)
    assert disk is not None
    shelf = JobShardStore("run-7", SegmentStore(tmp_path, PREFIX, GIB), disk)
    key = ShardKey("policy", "retained-1", 0)
    place = await shelf.make(key, 1, LAYOUT, layout_digest(LAYOUT), spot=False, incarnation=1, on_disk=True)
    goes_on, threads = threading.Event(), set()
    real = save

    def slow(store: SegmentStore, manifest: Manifest) -> None:
        threads.add(threading.get_ident())
        assert goes_on.wait(10)
        real(store, manifest)

    monkeypatch.setattr("tensorhub_agent.storage.manifest.save", slow)
    for version in (1, 2, 3):
        shelf.save(
            SaveManifest(key=key, state="ready", partial=False, version=version, root="a", digests=b"", swap=False)
        )
        await asyncio.sleep(0)
    settling = asyncio.create_task(shelf.settle(key))
    await asyncio.sleep(0)
    assert not settling.done()
    goes_on.set()
    await settling
    assert threading.get_ident() not in threads
    found = load(disk, place.segment.name)
    assert isinstance(found, Manifest)
    assert found.version == 3
    shelf.free(key)
    await shelf.files.idle()
    assert (names(disk.shm_dir), disk.total_bytes) == ([], 0)
