"""Layouts and programs: each is read and compiled once, ahead where a replica waits, kept within bounds."""

import asyncio
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.common.catalog.catalog_world import MODEL, World
from tests.unit.planner.given import MIB, register_replica, wait_for_latest

from tensorhub_common.bus.errors import BlobMissing
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.jetstream.blob_store import BlobStore, blob_digest
from tensorhub_common.layout.layout import Layout, TensorEntry, encoded, layout_digest, layout_of, pieces
from tensorhub_common.programs.program import decoded
from tensorhub_common.protocol.log.events import RoundJoined, VersionPublished
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.context import layout_store, prefetch
from tensorhub_planner.context import program_store as module
from tensorhub_planner.context.layout_store import LayoutStore, most_pieces
from tensorhub_planner.context.prefetch import ProgramPrefetcher
from tensorhub_planner.context.program_store import ProgramStore
from tensorhub_planner.primitives.source_set import LayoutSet

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


@pytest.fixture
async def sources(blobs: FakeBlobs) -> LayoutSet:
    """Two halves."""
    halves = (blobs.add(rows(0, 6)), blobs.add(rows(6, ROWS)))
    return LayoutSet(halves, halves)


@pytest.fixture
async def programs(blobs: FakeBlobs) -> ProgramStore:
    faked = cast("BlobStore", blobs)
    work = Supervisor("the planner of a test")
    return ProgramStore(faked, LayoutStore(faked, work), work)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the layouts for which something is compiled from now on."""
    seen: list[str] = []

    def counting(digest: str, destination: Layout, index: LayoutIndex) -> Any:
        seen.append(digest)
        return compile_program(digest, destination, index)

    monkeypatch.setattr(module, "compile_program", counting)
    return seen


async def test_many_get_one_program(
    blobs: FakeBlobs, programs: ProgramStore, sources: LayoutSet, compiled: list[str]
) -> None:
    """All shards of several replicas: each layout is read once, each program compiled once."""
    readers = [blobs.add(rows(at, at + 3)) for at in range(0, ROWS, 3)]
    found = await asyncio.gather(*(programs.compiled(JOB, reader, sources) for _ in range(5) for reader in readers))
    assert len({each.digest for each in found}) == len(readers)
    assert sorted(compiled) == sorted(readers)
    assert sorted(blobs.asked) == sorted([*readers, *sources.layouts])
    again = await programs.compiled(JOB, readers[0], sources)
    assert again is found[0]
    assert decoded(blobs.stored[again.digest]) == again.execution.program, "it stands in the store when it is told of"


async def test_giving_up_waiting(
    blobs: FakeBlobs, programs: ProgramStore, sources: LayoutSet, compiled: list[str]
) -> None:
    """An agent waits for less than a long compilation takes, and asks again: that one is waited for, not a second."""
    reader = blobs.add(rows(2, 9))
    blobs.gate.clear()
    first = asyncio.create_task(programs.compiled(JOB, reader, sources))
    await blobs.was_asked.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(programs.compiled(JOB, reader, sources))
    await asyncio.sleep(0)
    blobs.gate.set()
    assert (await second).execution.program.layout == reader
    assert compiled == [reader]
    assert blobs.asked.count(reader) == 1


async def test_a_failure_is_not_kept(blobs: FakeBlobs, programs: ProgramStore, sources: LayoutSet) -> None:
    reader = rows(0, ROWS)
    with pytest.raises(BlobMissing):
        await programs.compiled(JOB, layout_digest(reader), sources)
    lacking = blobs.stored.pop(sources.layouts[0])
    blobs.add(reader)
    with pytest.raises(BlobMissing):
        await programs.compiled(JOB, layout_digest(reader), sources)
    blobs.stored[sources.layouts[0]] = lacking
    assert len((await programs.compiled(JOB, layout_digest(reader), sources)).execution) == 2


async def test_the_last_used_programs_are_kept_and_of_large_ones_fewer(
    blobs: FakeBlobs, programs: ProgramStore, sources: LayoutSet, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these has one tensor, with a place at either end. One that has more than all may have is kept alone."""
    one, two, three = (blobs.add(rows(0, at)) for at in (3, 4, 5))
    for limit, value in (("PROGRAMS_MAX", 2), ("PLACES_MAX", 4)):
        programs.forget(JOB)
        compiled.clear()
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, value)
            for reader in (one, two, one, three, one):
                await programs.compiled(JOB, reader, sources)
            assert compiled == [one, two, three], "the second one was used longest ago"
            await programs.compiled(JOB, two, sources)
            assert compiled[-1] == two
    programs.forget(JOB)
    await programs.compiled(JOB, one, sources)
    monkeypatch.setattr(module, "PLACES_MAX", 0)
    for reader in (two, two):
        await programs.compiled(JOB, reader, sources)
    assert compiled[-2:] == [one, two]


async def test_so_many_indexes_are_kept(
    blobs: FakeBlobs, programs: ProgramStore, sources: LayoutSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INDEXES_MAX", 1)
    half, reader, other = sources.layouts[0], blobs.add(rows(0, 3)), blobs.add(rows(0, 4))
    await programs.compiled(JOB, reader, sources)
    await programs.compiled(JOB, other, sources)
    assert blobs.asked.count(half) == 1, "all readers share the index"
    await programs.compiled(JOB, reader, LayoutSet((half,), (half,)))
    await programs.compiled(JOB, blobs.add(rows(0, 5)), sources)
    assert blobs.asked.count(half) == 3, "the second index took the first one's place"


async def test_anothers_program(
    blobs: FakeBlobs, programs: ProgramStore, sources: LayoutSet, compiled: list[str]
) -> None:
    faked = cast("BlobStore", blobs)
    work = Supervisor("another planner of a test")
    made = await ProgramStore(faked, LayoutStore(faked, work), work).compiled(JOB, blobs.add(rows(1, 8)), sources)
    compiled.clear()
    known = await asyncio.gather(*(programs.known(JOB, made.digest) for _ in range(3)))
    assert {each.digest for each in known} == {made.digest}
    assert known[0].execution.program == made.execution.program
    assert blobs.asked.count(made.digest) == 1
    assert not compiled


async def test_a_deleted_job(blobs: FakeBlobs, programs: ProgramStore, sources: LayoutSet, compiled: list[str]) -> None:
    """Its blobs went with it; what other jobs have stays as it is."""
    reader = blobs.add(rows(0, 3))
    made = await programs.compiled(JOB, reader, sources)
    await programs.compiled("other", reader, sources)
    del blobs.stored[made.digest]
    programs.forget(JOB)
    await programs.compiled("other", reader, sources)
    assert made.digest not in blobs.stored
    assert (await programs.compiled(JOB, reader, sources)).digest == made.digest
    assert made.digest in blobs.stored
    assert compiled == [reader] * 3


async def test_what_no_shard_has_registered(blobs: FakeBlobs, programs: ProgramStore, compiled: list[str]) -> None:
    whole = LayoutSet((blobs.add(layout_of([*rows(0, ROWS).tensors, *rows(0, ROWS, "v").tensors])),), ())
    one, two, both = (blobs.add(layout) for layout in (rows(0, 4), rows(4, ROWS), rows(0, 4, "v")))
    for layouts, missing in [((one, two), ("v",)), ((one, both), ()), ((two,), ("v",)), (whole.layouts, ())]:
        found = await programs.unregistered(JOB, layouts, whole)
        assert (found.names, found.count) == (missing, len(missing))
    assert sorted(compiled) == sorted([one, two, both, *whole.layouts])


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
    world, asked = World(), FakePrograms()
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
