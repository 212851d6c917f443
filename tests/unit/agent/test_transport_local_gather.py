"""The local transport brings boxes that lie strided at either end, and keeps to what a read keeps to."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.unit.agent.box_samples import Gate, check_gathering, rows, widen
from tests.unit.agent.local_hub import MIB, Hub, local_hub

from tensorhub_agent.compute import conversion
from tensorhub_agent.compute.conversion import CastUnknown
from tensorhub_agent.primitives.forms import InvalidForm
from tensorhub_agent.transports.base import TransportLost
from tensorhub_agent.transports.local.session import MappedSession
from tensorhub_common.programs.regions import StridedCopies, StridedForm

STRIDED = rows(2048, 4096, 5000, 6000)


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    async with local_hub(tmp_path) as hub:
        yield hub


def test_random_boxes_are_numpys_and_nothing_else_is_touched(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        hub = runner.run(stack.enter_async_context(local_hub(tmp_path)))
        segment = hub.published(MIB)
        session = runner.run(hub.open("L1", segment))
        check_gathering(runner, session, segment.view)
        runner.run(session.close())
        runner.run(stack.aclose())


async def test_what_was_taken_is_told_at_the_end(hub: Hub) -> None:
    session = await hub.open("L1", hub.published(16 * MIB))
    await session.gather(memoryview(bytearray(16 * MIB)), StridedCopies([0], [0], [STRIDED]), digests=False)
    await session.close()
    await hub.book.until("done", "L1")
    assert hub.source.served_bytes == STRIDED.nbytes


async def test_a_box_beyond_the_segment_is_lost_and_a_bad_form_is_the_callers(hub: Hub) -> None:
    segment = hub.published(MIB)
    session = await hub.open("L1", segment)
    destination = bytearray(64 * MIB)
    with pytest.raises(TransportLost, match="not what was asked for"):
        await session.gather(memoryview(destination), StridedCopies([0], [0], [rows(2, 4, 8, 9 * MIB)]), digests=True)
    with pytest.raises(InvalidForm, match="negative stride"):
        await session.gather(memoryview(destination), StridedCopies([0], [0], [rows(2, 4, 8, -8)]), digests=True)
    assert destination == bytes(64 * MIB)
    await session.close()


async def test_a_cast_that_is_not_there_is_refused_and_one_that_is_is_done_here(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = hub.published(MIB)
    session = await hub.open("L1", segment)
    memory = bytearray(4000)
    boxes = StridedCopies([0], [2], [StridedForm((100, 10), (40, 4), (30, 2), 2, 4, "u2>u4")])
    with pytest.raises(CastUnknown, match="not in this version"):
        await session.gather(memoryview(memory), boxes, digests=True)
    monkeypatch.setitem(conversion.CONVERTERS, "u2>u4", widen)
    await session.gather(memoryview(memory), boxes, digests=True)
    expected = np.ndarray((100, 10), "<u2", segment.view, 2, (30, 2)).astype("<u4")
    assert memory == expected.tobytes()
    await session.close()


async def test_close_comes_back_when_nobody_writes_any_more(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    session = await hub.open("L1", hub.published(16 * MIB))
    memory = memoryview(bytearray(STRIDED.span_bytes))
    gathering = asyncio.create_task(session.gather(memory, StridedCopies([0], [0], [STRIDED]), digests=True))
    await gate.until_entered()
    closing = asyncio.create_task(session.close())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done()
    assert not gathering.done()
    gate.open.set()
    await closing
    assert gate.inside == 0
    left = bytes(memory)
    with pytest.raises(TransportLost, match="closed"):
        await gathering
    assert memory == left
    with pytest.raises(TransportLost, match="closed"):
        await session.gather(memory, StridedCopies([0], [0], [STRIDED]), digests=True)


async def test_a_cancelled_caller_is_kept_until_nobody_writes_any_more(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    session = await hub.open("L1", hub.published(16 * MIB))
    memory = memoryview(bytearray(STRIDED.span_bytes))
    gathering = asyncio.create_task(session.gather(memory, StridedCopies([0], [0], [STRIDED]), digests=True))
    await gate.until_entered()
    gathering.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not gathering.done()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert gate.inside == 0
    await session.close()


async def test_a_segment_that_is_lent_is_not_copied_from(hub: Hub) -> None:
    with pytest.raises(TransportLost, match="to be mapped"):
        await MappedSession.gather(
            object.__new__(MappedSession), memoryview(b""), StridedCopies([], [], []), digests=True
        )
