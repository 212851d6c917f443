"""Transfer programs, compiled once for a reader's layout and those of its sources, and kept.

Invariants:
- At most `PROGRAMS_MAX` programs with `PLACES_MAX` places of tensors (or one that has more), and `INDEXES_MAX` indexes
  of source layouts are kept, the last used ones.
- A compiled program is in the blob store before a caller gets it.
- A program is compiled once at a time, and all its callers wait for it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from tensorhub_common.jetstream.blob_store import BlobStore, blob_digest
from tensorhub_common.layout.layout import Layout
from tensorhub_common.programs.numbered_program import NumberedProgram, PatternCache
from tensorhub_common.programs.program import TransferProgram, decoded, encoded
from tensorhub_common.runtime.gather_bounded import gather_bounded
from tensorhub_common.runtime.single_flight import SingleFlight
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_planner.compiler.compiler import CompiledProgram, compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.context.layout_store import LayoutStore
from tensorhub_planner.planning.unregistered import NOTHING, Unregistered, global_names, unregistered
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.source_set import LayoutSet

PROGRAMS_MAX: Final = 4096
"""Each reader has a program, so a replica of this many shards finds all of them again at its next version."""
PLACES_MAX: Final = 32_000_000
"""Of all kept programs: each place where a tensor begins, at either end, takes some 30 bytes, so 1 GB at worst."""
NO_SOURCES: Final = LayoutSet((), ())
"""The key of programs that another planner compiled, by their own digest."""
INDEXES_MAX: Final = 8
"""An index of 256 ranks of 10^12 parameters takes some 30 MB."""


_Key = tuple[str, str, LayoutSet]


class ProgramStore:
    """The programs of all jobs. Layouts and programs are named by their content, so a compiled program stays true."""

    def __init__(self, blobs: BlobStore, layouts: LayoutStore, work: Supervisor) -> None:
        self._blobs, self._layouts = blobs, layouts
        self._made: OrderedDict[_Key, CompiledProgram] = OrderedDict()
        self._by_digest: dict[str, CompiledProgram] = {}
        self._places = 0
        self._compiling = asyncio.Lock()
        self._making = SingleFlight[_Key, CompiledProgram](work, "making a transfer program")
        self._indexing = SingleFlight[tuple[str, LayoutSet], LayoutIndex](work, "reading the sources' layouts")
        self._indexes: OrderedDict[tuple[str, LayoutSet], LayoutIndex] = OrderedDict()

    async def compiled(self, job: str, layout: str, sources: LayoutSet) -> CompiledProgram:
        """Return the program that fills `layout` from `sources`. Raises `LayoutMismatch`, and what `BlobStore` does."""
        key = (job, layout, sources)
        made = self._made.get(key)
        if made is not None:
            self._made.move_to_end(key)
            return made
        return await self._making.run(key, lambda: self._make(*key))

    async def known(self, job: str, digest: str) -> CompiledProgram:
        """Return a program that a reader names: made here, or by another planner."""
        made = self._by_digest.get(digest)
        if made is not None:
            return made
        return await self._making.run((job, digest, NO_SOURCES), lambda: self._read(job, digest))

    async def unregistered(self, job: str, layouts: Sequence[str], sources: LayoutSet) -> Unregistered:
        """Return the sources' tensors of which none of these layouts has a part. Raises what `compiled` raises."""
        # Most were compiled for the siblings' own requests. A task for each would cost more than all the rest.
        names = [(await self.compiled(job, layout, sources)).names for layout in layouts]
        registered = [each for each in names if each is not None]
        if len(registered) < len(names):
            return NOTHING
        return await asyncio.to_thread(unregistered, registered, await self._index(job, sources))

    def forget(self, job: str) -> None:
        """Forget the programs of a job: its blobs went with it, and its name may be used again."""
        for key in [key for key in self._made if key[0] == job]:
            self._drop(key)

    async def _read(self, job: str, digest: str) -> CompiledProgram:
        program = await asyncio.to_thread(decoded, await self._blobs.get(job, digest))
        made = await asyncio.to_thread(_ready, program, digest)
        self._keep((job, digest, NO_SOURCES), made)
        return made

    async def _make(self, job: str, layout: str, sources: LayoutSet) -> CompiledProgram:
        destination = await self._layouts.layout(job, layout)
        index = await self._index(job, sources)
        async with self._compiling:
            # The compiler uses tables that all readers of an index share.
            made, data = await asyncio.to_thread(_compile, layout, destination, index)
        assert await self._blobs.put(job, data) == made.digest
        self._keep((job, layout, sources), made)
        return made

    async def _index(self, job: str, sources: LayoutSet) -> LayoutIndex:
        key = (job, sources)
        index = self._indexes.get(key)
        if index is None:
            index = await self._indexing.run(key, lambda: self._indexed(job, sources))
            self._indexes[key] = index
        self._indexes.move_to_end(key)
        while len(self._indexes) > INDEXES_MAX:
            self._indexes.popitem(last=False)
        return index

    async def _indexed(self, job: str, sources: LayoutSet) -> LayoutIndex:
        layouts: dict[str, Layout] = {}

        async def read(number: int) -> None:
            digest = sources.layouts[number]
            layouts[digest] = await self._layouts.layout(job, digest)

        await gather_bounded(range(len(sources.layouts)), read)
        in_order = {digest: layouts[digest] for digest in sources.layouts}
        return await asyncio.to_thread(LayoutIndex, in_order, sources.originals)

    def _keep(self, key: _Key, made: CompiledProgram) -> None:
        self._made[key] = self._by_digest[made.digest] = made
        self._places += _places(made)
        while len(self._made) > PROGRAMS_MAX or (self._places > PLACES_MAX and len(self._made) > 1):
            self._drop(next(iter(self._made)))

    def _drop(self, key: _Key) -> None:
        old = self._made.pop(key)
        self._places -= _places(old)
        # Other sources may have made the same program.
        if self._by_digest.get(old.digest) is old:
            del self._by_digest[old.digest]


def _places(made: CompiledProgram) -> int:
    return sum(len(group.to) + sum(map(len, group.at)) for group in made.execution.program.groups)


def _compile(layout: str, destination: Layout, index: LayoutIndex) -> tuple[CompiledProgram, bytes]:
    """Return a program and its blob: all in one thread, as there are thousands."""
    program = compile_program(layout, destination, index)
    data = encoded(program)
    names = global_names(destination) if program.unread_count else None
    return _ready(program, blob_digest(data), index.executed, names), data


def _ready(
    program: TransferProgram, digest: str, patterns: PatternCache | None = None, names: tuple[str, ...] | None = None
) -> CompiledProgram:
    execution = NumberedProgram(program, digest, patterns)
    return CompiledProgram(digest, execution, PieceSizes.repeated(execution.runs()), names)
