"""Layouts and programs: each is read and compiled once, kept within bounds, and a failure is not kept."""

import asyncio
from typing import Any, cast

import pytest

from tensorhub_common.bus.errors import BlobMissing
from tensorhub_common.jetstream.blob_store import BlobStore, blob_digest
from tensorhub_common.layout.layout import Layout, TensorEntry, encoded, layout_digest, layout_of
from tensorhub_common.programs.program import decoded
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.context import program_store as module
from tensorhub_planner.context.layout_store import LayoutStore
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

    def add(self, layout: Layout) -> str:
        self.stored[layout_digest(layout)] = encoded(layout)
        return layout_digest(layout)

    async def get(self, job: str, digest: str) -> bytes:
        self.asked.append(digest)
        self.was_asked.set()
        await self.gate.wait()
        if digest not in self.stored:
            raise BlobMissing("it is not there")
        return self.stored[digest]

    async def put(self, job: str, data: bytes) -> str:
        self.stored[blob_digest(data)] = data
        return blob_digest(data)


def rows(begin: int, end: int, name: str = "w") -> Layout:
    return layout_of([TensorEntry(name, "bfloat16", 2, (end - begin, 4), (ROWS, 4), (begin, 0))])


@pytest.fixture
async def blobs() -> FakeBlobs:
    return FakeBlobs()


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


async def test_many_who_ask_at_once_and_again_get_one_program(
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


async def test_who_gives_up_waiting_loses_nothing(
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


async def test_the_last_used_ones_are_kept(
    blobs: FakeBlobs, programs: ProgramStore, sources: LayoutSet, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROGRAMS_MAX", 2)
    one, two, three = (blobs.add(rows(0, at)) for at in (3, 4, 5))
    for reader in (one, two, one, three, one):
        await programs.compiled(JOB, reader, sources)
    assert compiled == [one, two, three], "the second one was used longest ago"
    await programs.compiled(JOB, two, sources)
    assert compiled[-1] == two


async def test_of_large_programs_fewer_are_kept(
    blobs: FakeBlobs, programs: ProgramStore, sources: LayoutSet, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these has one tensor, with a place at either end. One that has more than all may have is kept alone."""
    monkeypatch.setattr(module, "PLACES_MAX", 4)
    one, two, three = (blobs.add(rows(0, at)) for at in (3, 4, 5))
    for reader in (one, two, one, three, one):
        await programs.compiled(JOB, reader, sources)
    assert compiled == [one, two, three]
    programs.forget(JOB)
    await programs.compiled(JOB, one, sources)
    monkeypatch.setattr(module, "PLACES_MAX", 0)
    for reader in (two, two):
        await programs.compiled(JOB, reader, sources)
    assert compiled == [one, two, three, one, two]


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


async def test_a_program_of_another_planner_is_read_once(
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


async def test_what_was_made_in_a_deleted_job_is_made_and_put_anew(
    blobs: FakeBlobs, programs: ProgramStore, sources: LayoutSet, compiled: list[str]
) -> None:
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


async def test_what_no_shard_has_registered_is_found_in_programs_compiled_once(
    blobs: FakeBlobs, programs: ProgramStore, compiled: list[str]
) -> None:
    whole = LayoutSet((blobs.add(layout_of([*rows(0, ROWS).tensors, *rows(0, ROWS, "v").tensors])),), ())
    one, two, both = (blobs.add(layout) for layout in (rows(0, 4), rows(4, ROWS), rows(0, 4, "v")))
    for layouts, missing in [((one, two), ("v",)), ((one, both), ()), ((two,), ("v",)), (whole.layouts, ())]:
        found = await programs.unregistered(JOB, layouts, whole)
        assert (found.names, found.count) == (missing, len(missing))
    assert sorted(compiled) == sorted([one, two, both, *whole.layouts])
