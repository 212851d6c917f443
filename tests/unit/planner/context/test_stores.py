"""Layouts and programs: each is read and compiled once, ahead where a replica waits, kept within bounds."""

import asyncio
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner.given import MIB, register_replica, wait_for_latest

from tensorhub_common.bus.errors import BlobMissing
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.jetstream.blob_store import BlobStore, blob_digest
from tensorhub_common.layout.layout import Layout, TensorEntry, encoded, layout_digest, layout_of, pieces
from tensorhub_common.programs.program import decoded
from tensorhub_common.protocol.log.events import RoundJoined, VersionPublished
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_planner.compiler.compiler import CompiledProgram, compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.context import layout_store, prefetch
from tensorhub_planner.context import program_store as module
from tensorhub_planner.context.layout_store import LayoutStore, most_pieces
from tensorhub_planner.context.prefetch import ProgramPrefetcher
from tensorhub_planner.context.program_store import ProgramStore
from tensorhub_planner.primitives.source_set import LayoutSet
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver

JOB = "run-7"
ROWS = 12


class FakeBlobs:
    """Blobs in a dict; what is asked for while `gate` is closed waits."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.was_asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    def add(self, layout: object) -> str:
        data = encoded(layout) if isinstance(layout, Layout) else msgspec.msgpack.encode(layout)
        self.stored[blob_digest(data)] = data
        return blob_digest(data)

    async def get(self, job: str, digest: str) -> bytes:
        self.asked.append(digest)
        self.was_asked.set()
        await asyncio.sleep(0)
        await self.gate.wait()
        if digest not in self.stored:
            raise BlobMissing("it is not there")
        return self.stored[digest]

    async def put(self, job: str, data: bytes) -> str:
        self.stored[blob_digest(data)] = data
        return blob_digest(data)


@pytest.fixture
async def blobs() -> FakeBlobs:
    return FakeBlobs()


# ------------------------------------------------------------------------------------------------------------ layouts


def entry(name: str, *shape: int, itemsize: int = 2) -> TensorEntry:
    return TensorEntry(name, "bfloat16", itemsize, shape, shape, (0,) * len(shape))


@pytest.fixture
async def known(blobs: FakeBlobs) -> LayoutStore:
    return LayoutStore(cast("BlobStore", blobs), Supervisor("the planner of a test"))


async def test_sizes_are_those_of_the_pieces_and_many_who_ask_read_once(blobs: FakeBlobs, known: LayoutStore) -> None:
    layout = layout_of([entry("w", 5 * MIB, 1), entry("b", 3)])
    digest = blobs.add(layout)
    assert digest == layout_digest(layout), "a layout's name in the catalog is its name in the store"
    found = await asyncio.gather(*(known.sizes(JOB, digest) for _ in range(20)))
    assert all(each is found[0] for each in found)
    assert [found[0].of(((piece, 1),)) for piece in range(len(found[0]))] == [6, 4 * MIB, 4 * MIB, 2 * MIB]
    assert await known.sizes(JOB, digest) is known.known(digest)
    assert blobs.asked == [digest]
    assert await known.layout(JOB, digest) == layout


@pytest.mark.parametrize("limit", ["LAYOUTS_MAX", "PIECES_KEPT_MAX"])
async def test_few_are_kept(blobs: FakeBlobs, known: LayoutStore, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(layout_store, limit, 3)
    digests = [blobs.add(layout_of([entry(f"w{n}", 4)])) for n in range(5)]
    for digest in digests:
        await known.sizes(JOB, digest)
    assert [known.known(digest) is not None for digest in digests] == [False, False, True, True, True]


@pytest.mark.parametrize(
    "bad",
    [
        [1, 2],
        Layout((entry("w", 4), entry("w", 4))),
        Layout((TensorEntry("w", "bfloat16", 2, (-4,), (4,), (0,)),)),
        Layout((entry("w", 2**60),)),
        Layout((entry("w", 2**62, 2**62),)),
    ],
)
async def test_a_bad_layout_is_refused(blobs: FakeBlobs, known: LayoutStore, bad: object) -> None:
    """At once: nothing of it is counted out."""
    with pytest.raises(LayoutMismatch):
        await known.sizes(JOB, blobs.add(bad))


shapes = st.lists(st.integers(0, 4000), max_size=4).map(tuple)


@given(st.lists(shapes, max_size=3), st.sampled_from([1, 2, 8, 16]))
def test_the_bound_on_pieces_is_one(some: list[tuple[int, ...]], itemsize: int) -> None:
    """No layout has more pieces than the bound that is checked before they are counted out."""
    layout = layout_of(entry(f"t{n}", *shape, itemsize=itemsize) for n, shape in enumerate(some))
    if most_pieces(layout) < 20_000:
        assert len(pieces(layout)) <= most_pieces(layout)


# ----------------------------------------------------------------------------------------------------------- programs


def rows(begin: int, end: int, name: str = "w") -> Layout:
    return layout_of([TensorEntry(name, "bfloat16", 2, (end - begin, 4), (ROWS, 4), (begin, 0))])


class Store:
    """A store of programs over blobs, with two halves to read from, and what it has compiled."""

    def __init__(self, blobs: FakeBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blobs, self.compilations = blobs, list[str]()
        halves = (blobs.add(rows(0, 6)), blobs.add(rows(6, ROWS)))
        self.sources = LayoutSet(halves, halves)
        self.programs = self.another()

        def counting(digest: str, destination: Layout, index: LayoutIndex) -> Any:
            self.compilations.append(digest)
            return compile_program(digest, destination, index)

        monkeypatch.setattr(module, "compile_program", counting)

    def another(self) -> ProgramStore:
        faked, work = cast("BlobStore", self.blobs), Supervisor("the planner of a test")
        return ProgramStore(faked, LayoutStore(faked, work), work)

    async def compiled(self, reader: str, sources: LayoutSet | None = None, job: str = JOB) -> CompiledProgram:
        return await self.programs.compiled(job, reader, sources or self.sources)


@pytest.fixture
async def store(blobs: FakeBlobs, monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(blobs, monkeypatch)


async def test_many_who_ask_at_once_and_again_get_one_program(store: Store) -> None:
    """All shards of several replicas: each layout is read once, each program compiled once."""
    readers = [store.blobs.add(rows(at, at + 3)) for at in range(0, ROWS, 3)]
    found = await asyncio.gather(*(store.compiled(reader) for _ in range(5) for reader in readers))
    assert len({each.digest for each in found}) == len(readers)
    assert sorted(store.compilations) == sorted(readers)
    assert sorted(store.blobs.asked) == sorted([*readers, *store.sources.layouts])
    again = await store.compiled(readers[0])
    assert again is found[0]
    assert decoded(store.blobs.stored[again.digest]) == again.execution.program, "it is stored before"


async def test_who_gives_up_waiting_loses_nothing(store: Store) -> None:
    """An agent waits for less than a long compilation takes, and asks again: that one is waited for, not a second."""
    reader = store.blobs.add(rows(2, 9))
    store.blobs.gate.clear()
    first = asyncio.create_task(store.compiled(reader))
    await store.blobs.was_asked.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(store.compiled(reader))
    await asyncio.sleep(0)
    store.blobs.gate.set()
    assert (await second).execution.program.layout == reader
    assert store.compilations == [reader]
    assert store.blobs.asked.count(reader) == 1


async def test_a_failure_is_not_kept(store: Store) -> None:
    reader = rows(0, ROWS)
    with pytest.raises(BlobMissing):
        await store.compiled(layout_digest(reader))
    lacking = store.blobs.stored.pop(store.sources.layouts[0])
    store.blobs.add(reader)
    with pytest.raises(BlobMissing):
        await store.compiled(layout_digest(reader))
    store.blobs.stored[store.sources.layouts[0]] = lacking
    assert len((await store.compiled(layout_digest(reader))).execution) == 2


async def test_the_last_used_are_kept_and_of_large_ones_fewer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these has one tensor, with a place at either end. One that has more than all may have is kept alone."""
    one, two, three = (store.blobs.add(rows(0, at)) for at in (3, 4, 5))
    for limit, value in (("PROGRAMS_MAX", 2), ("PLACES_MAX", 4)):
        store.programs.forget(JOB)
        store.compilations.clear()
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, value)
            for reader in (one, two, one, three, one):
                await store.compiled(reader)
            assert store.compilations == [one, two, three], "the second one was used longest ago"
            await store.compiled(two)
            assert store.compilations[-1] == two
    store.programs.forget(JOB)
    await store.compiled(one)
    monkeypatch.setattr(module, "PLACES_MAX", 0)
    for reader in (two, two):
        await store.compiled(reader)
    assert store.compilations[-2:] == [one, two]


async def test_so_many_indexes_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INDEXES_MAX", 1)
    half, reader, other = store.sources.layouts[0], store.blobs.add(rows(0, 3)), store.blobs.add(rows(0, 4))
    await store.compiled(reader)
    await store.compiled(other)
    assert store.blobs.asked.count(half) == 1, "all readers share the index"
    await store.compiled(reader, LayoutSet((half,), (half,)))
    await store.compiled(store.blobs.add(rows(0, 5)))
    assert store.blobs.asked.count(half) == 3, "the second index took the first one's place"


async def test_a_program_of_another_planner_is_read_once(store: Store) -> None:
    made = await store.another().compiled(JOB, store.blobs.add(rows(1, 8)), store.sources)
    store.compilations.clear()
    known = await asyncio.gather(*(store.programs.known(JOB, made.digest) for _ in range(3)))
    assert {each.digest for each in known} == {made.digest}
    assert known[0].execution.program == made.execution.program
    assert store.blobs.asked.count(made.digest) == 1
    assert not store.compilations


async def test_what_was_made_in_a_deleted_job_is_made_and_put_anew(store: Store) -> None:
    """Its blobs went with it; what other jobs have stays as it is."""
    reader = store.blobs.add(rows(0, 3))
    made = await store.compiled(reader)
    await store.compiled(reader, job="other")
    del store.blobs.stored[made.digest]
    store.programs.forget(JOB)
    await store.compiled(reader, job="other")
    assert made.digest not in store.blobs.stored
    assert (await store.compiled(reader)).digest == made.digest
    assert made.digest in store.blobs.stored
    assert store.compilations == [reader] * 3


async def test_what_no_shard_has_registered_is_found_in_programs_compiled_once(store: Store) -> None:
    whole = LayoutSet((store.blobs.add(layout_of([*rows(0, ROWS).tensors, *rows(0, ROWS, "v").tensors])),), ())
    one, two, both = (store.blobs.add(layout) for layout in (rows(0, 4), rows(4, ROWS), rows(0, 4, "v")))
    for layouts, missing in [((one, two), ("v",)), ((one, both), ()), ((two,), ("v",)), (whole.layouts, ())]:
        found = await store.programs.unregistered(JOB, layouts, whole)
        assert (found.names, found.count) == (missing, len(missing))
    assert sorted(store.compilations) == sorted([one, two, both, *whole.layouts])


# ------------------------------------------------------------------------------------------------------ compiled ahead

JOINED = RoundJoined(model=MODEL, replica="engine", round=1, shard=0, missing=())


class FakePrograms:
    """Compiles nothing, and says who asked; the layout "e1" can't be filled."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.came: asyncio.Queue[str] = asyncio.Queue()
        self.gate = asyncio.Event()
        self.gate.set()

    async def compiled(self, _job: str, layout: str, _sources: LayoutSet) -> None:
        self.asked.append(layout)
        self.came.put_nowait(layout)
        await self.gate.wait()
        if layout == "e1":
            raise LayoutMismatch("no holder has it")


async def test_each_program_is_asked_for_once_also_one_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who joins during a look is seen by the next; what can't be compiled is left to the read."""
    monkeypatch.setattr(prefetch, "SETTLE_S", 0.0)
    world, asked = CatalogDriver(), FakePrograms()
    register_replica(world, "trainer", "t0")
    register_replica(world, "engine", "e0", "e1", "e2")
    wait_for_latest(world, "engine", 3)
    work = Supervisor("the planner of a test")
    ahead = ProgramPrefetcher(cast("ProgramStore", asked), lambda job: world.catalog if job == JOB else None, work)
    ahead.see(JOB, VersionPublished(model=MODEL, version=1, replica="trainer", roots=("a",)))
    assert not ahead.looks
    ahead.see("other", JOINED)
    await asyncio.gather(*ahead.looks)
    assert not asked.asked
    asked.gate.clear()
    ahead.see(JOB, JOINED)
    for _ in range(3):
        await asked.came.get()
    assert sorted(asked.asked) == ["e0", "e1", "e2"]
    register_replica(world, "late", "l0")
    wait_for_latest(world, "late", 1)
    ahead.see(JOB, JOINED)
    asked.gate.set()
    await asyncio.gather(*ahead.looks)
    ahead.see(JOB, JOINED)
    await asyncio.gather(*ahead.looks)
    assert asked.asked[3:] == ["l0"]
