"""The ucxx transport with a source in a process of its own, which is stopped, woken and killed."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path

import pytest
from tests.kit.fakes import GIVE_UP_S, Lost
from tests.stopping import stop
from tests.unit.agent.boxes import rows
from tests.unit.agent.transports.hubs import MIB, Hub, cut

from tensorhub_agent.transports.base import TransportLost
from tensorhub_agent.transports.ucxx import transport
from tensorhub_agent.transports.ucxx.session import UcxxSession
from tensorhub_common.programs.regions import StridedCopies

SOURCE_PROGRAM = Path(__file__).parent / "source_program.py"
CLOSE_S_MAX = 60.0
"""A close by force takes milliseconds; one that flushes waits for the other side."""


class Source:
    """A process that serves one segment, and can be stopped and killed."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: str) -> None:
        self.process, self.endpoint = process, endpoint

    def signal(self, number: signal.Signals) -> None:
        stop(self.process.pid) if number == signal.SIGSTOP else self.process.send_signal(number)


@contextlib.asynccontextmanager
async def source_process(folder: Path, nbytes: int) -> AsyncIterator[Source]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SOURCE_PROGRAM), str(folder), str(nbytes)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(GIVE_UP_S * 3):
            line = ""
            while not line.startswith("ready "):
                line = (await process.stdout.readline()).decode().strip()
        yield Source(process, line.removeprefix("ready "))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def whole(session: UcxxSession, memory: memoryview) -> Coroutine[None, None, object]:
    return session.read(memory, cut(len(memory), len(memory)), digests=True)


async def close_without(source: Source, session: UcxxSession) -> None:
    """Close while the source is stopped, with a bound: cancelled, a close waits on, so the source is killed for it."""
    closing = asyncio.create_task(session.close())
    _, waiting = await asyncio.wait({closing}, timeout=CLOSE_S_MAX)
    if waiting:
        source.signal(signal.SIGKILL)
        await asyncio.wait(waiting, timeout=GIVE_UP_S)
    assert not waiting, f"close has waited {CLOSE_S_MAX:g} s for a source that is stopped"


FORMS = {
    "in one piece": rows(1, 256 * MIB, 1, 1),
    "packed here": rows(50_000, 4096, 4096, 5000),
    "packed there": rows(50_000, 4096, 4100, 4096),
    "packed nowhere": rows(50_000, 4096, 4100, 5000),
}


@pytest.mark.parametrize(
    "how",
    [
        "read",
        *(pytest.param(form, marks=pytest.mark.long) for form in ("packed here", "packed there", "packed nowhere")),
    ],
)
async def test_close_ends_what_a_stopped_source_has_under_way_and_it_stays_ended(
    ucxx: Hub, tmp_path: Path, how: str
) -> None:
    """Late bytes: whatever the source still had to send when it was stopped must not arrive once close has returned.

    Neither in the destination, nor in bounce memory that others use by then.
    """
    form = FORMS.get(how, FORMS["in one piece"])
    async with source_process(tmp_path, form.origin_span_bytes) as source:
        session = await ucxx.show_ticket(endpoint=source.endpoint)
        memory = memoryview(bytearray(form.span_bytes))
        gathers = session.gather(memory, StridedCopies([0], [0], [form]), digests=True) if how != "read" else None
        read = asyncio.create_task(gathers or whole(session, memory))
        async with asyncio.timeout(GIVE_UP_S):
            while memory[0] == 0:  # noqa: ASYNC110 (bytes that come tell nobody)
                await asyncio.sleep(0)
        source.signal(signal.SIGSTOP)
        await close_without(source, session)
        assert memory[-1] == 0, "all had come before the source was stopped, so the test shows nothing: use more bytes"
        left = bytes(memory)
        with pytest.raises(TransportLost):
            await read
        assert ucxx.reader.links == 0
        assert memory == left, "something was written after close had come back"
        slots = [bytes(slot) for slot in ucxx.reader._slots._free]
        memory[:] = bytes(len(memory))
        source.signal(signal.SIGCONT)
        # Once it serves again, it has done whatever it was stopped in.
        again = await ucxx.show_ticket(endpoint=source.endpoint)
        other = memoryview(bytearray(MIB))
        await whole(again, other)
        await again.close()
        assert other[0] != 0
        assert memory == bytes(len(memory))
        assert [bytes(slot) for slot in ucxx.reader._slots._free] == slots


async def test_a_killed_source_is_noticed(ucxx: Hub, tmp_path: Path) -> None:
    async with source_process(tmp_path, 64 * MIB) as source:
        lost = Lost()
        session = await ucxx.show_ticket(lost, endpoint=source.endpoint)
        memory = memoryview(bytearray(64 * MIB))
        read = asyncio.create_task(whole(session, memory))
        source.signal(signal.SIGKILL)
        await lost.wait()
        await session.close()
        with contextlib.suppress(TransportLost):
            await read
        assert ucxx.reader.links == 0


async def test_a_stopped_source_lets_nobody_in_within_the_bound(
    ucxx: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "OPEN_S", 0.2)
    async with source_process(tmp_path, MIB) as source:
        source.signal(signal.SIGSTOP)
        with pytest.raises(TransportLost, match="did not let us in"):
            await ucxx.show_ticket(endpoint=source.endpoint)
        assert ucxx.reader.links == 0
