"""What one read gets from its sources: boxes that can't be brought are a source lost, and encodings may be off."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tensorhub_agent.compute.pool import Spans
from tensorhub_agent.core.effects import BatchDone, EffectOutcome, ReadBatch, RequestLease, SourceLost, SourceOpened
from tensorhub_agent.leases.delta_store import SIZE
from tensorhub_agent.primitives.forms import InvalidForm
from tensorhub_agent.primitives.ids import BaseVersion, ShardKey
from tensorhub_agent.sources.manager import SourceManager
from tensorhub_agent.transports.base import TransportLost
from tensorhub_common.layout.layout import TensorEntry, layout_of, pieces
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import Cell, SourceBox, TensorGroup, TransferProgram, UnitSplit
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.protocol.plans import Share, SourceId

KEY = ShardKey("m", "engine", 0)
THEIRS = SourceId("there", 1, "trainer", 0)
HEARD_S = 60.0


class Bus:
    """Grants every lease."""

    async def request(self, *_: object) -> bytes:
        grant = LeaseGrant(lease="l", ticket="t", ticket_s=1.0, endpoint="e", pieces=1, digests=b"")
        return msgspec.msgpack.encode(grant)


class Offering:
    """Grants every lease on a piece of which there is a patch in which nothing has changed."""

    async def request(self, *_: object) -> bytes:
        grant = LeaseGrant(
            lease="l", ticket="t", ticket_s=1.0, endpoint="e", pieces=1, digests=bytes(16), patch_sizes=SIZE.pack(0)
        )
        return msgspec.msgpack.encode(grant)


class Session:
    """Brings nothing, for one reason."""

    def __init__(self, why: Exception) -> None:
        self.why = why

    async def gather(self, *_: object, **__: object) -> None:
        raise self.why

    async def close(self) -> None:
        pass


class Transports:
    def __init__(self, session: Any) -> None:
        self.session = session

    async def open(self, *_: object, **__: object) -> Any:
        return self.session


@pytest.mark.parametrize(
    "why",
    [InvalidForm("a box has 17 dimensions"), ValueError("the destination can't be written"), TransportLost("it went")],
)
async def test_boxes_that_can_not_be_brought_are_a_source_lost(why: Exception) -> None:
    said: asyncio.Queue[EffectOutcome] = asyncio.Queue()
    given: Any = SimpleNamespace(bus=Bus(), transports=Transports(Session(why)), deltas=None)
    sources = SourceManager("job", given.bus, given.transports, given.deltas, said.put_nowait, deltas=given.deltas)
    cell = Cell(0, UnitSplit((4,), (1,), 1, 0, 4, 1), (SourceBox(0, 0, (1,), 1, ""),))
    execution = NumberedProgram(
        TransferProgram("mine", ("theirs",), ((cell,),), (TensorGroup(0, (0,), (0,), ((0,),)),)), "program"
    )
    share = Share(source=THEIRS, transport="local", pieces=((0, 1),), nbytes=4, why="", layout="theirs")
    sources.open(RequestLease(KEY, 7, share, 1, None, program=execution), SourceId("here", 1, "engine", 0))
    async with asyncio.timeout(HEARD_S):
        assert isinstance(await said.get(), SourceOpened)
        table = pieces(layout_of([TensorEntry("w", "int8", 1, (4,), (4,), (0,))]))
        segment: Any = SimpleNamespace(view=memoryview(bytearray(256)))
        sources.post(ReadBatch(KEY, 7, 8, ((0, 1),)), segment, None, table, digests=True)
        lost = await said.get()
    assert isinstance(lost, SourceLost)
    assert (lost.source, lost.reason) == (7, str(why))
    await sources.stop()


class Encoding:
    """Says how it was asked to bring pieces."""

    def __init__(self) -> None:
        self.ways: list[str] = []

    async def read(self, destination: memoryview, spans: Spans, **_: object) -> bytes:
        self.ways.append("as they are")
        return bytes(16 * len(spans.to))

    async def overwrite(self, *_: object) -> tuple[bytes, list[bytes]]:
        self.ways.append("delta")
        return bytes(16), [b""]

    async def unpack(self, *_: object) -> tuple[bytes, int]:
        self.ways.append("zstd")
        return bytes(16), 0

    async def gather(self, *_: object, **__: object) -> None:
        raise AssertionError("these are pieces")

    async def still_holds(self) -> bool:
        return True

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("encodings", "way"), [(True, "delta"), (False, "as they are")])
async def test_with_encodings_off_every_piece_comes_as_it_is(encodings: bool, way: str) -> None:  # noqa: FBT001
    said: asyncio.Queue[EffectOutcome] = asyncio.Queue()
    session = Encoding()
    transports: Any = Transports(session)
    given: Any = SimpleNamespace(bus=Offering(), programs=None, deltas=SimpleNamespace(applied=lambda *_: None))
    sources = SourceManager(
        "job", given.bus, transports, given.programs, said.put_nowait, deltas=given.deltas, encodings=encodings
    )
    share = Share(source=THEIRS, transport="ucxx", pieces=((0, 1),), nbytes=4, why="")
    effect = RequestLease(KEY, 7, share, 1, "root", base=BaseVersion(1, "before"))
    sources.open(effect, SourceId("here", 1, "engine", 0))
    async with asyncio.timeout(HEARD_S):
        assert isinstance(await said.get(), SourceOpened)
        table = pieces(layout_of([TensorEntry("w", "int8", 1, (4,), (4,), (0,))]))
        segment: Any = SimpleNamespace(view=memoryview(bytearray(256)))
        sources.post(ReadBatch(KEY, 7, 8, ((0, 1),)), segment, None, table, digests=True)
        assert isinstance(await said.get(), BatchDone)
    assert session.ways[0] == way
    await sources.stop()
