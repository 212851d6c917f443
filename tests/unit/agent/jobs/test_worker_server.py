"""The end of one worker's connection is that worker's to tell."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tensorhub_agent.jobs.worker_server import WorkerServer
from tensorhub_common.errors import MemoryExhausted
from tensorhub_common.protocol.handshake import OLDEST_PROTOCOL
from tensorhub_common.protocol.log.commands import PROTOCOL
from tensorhub_common.protocol.worker import Attach, AttachRefused
from tensorhub_common.runtime.framed_socket import connect
from tensorhub_common.runtime.release import release

FRAME_BYTES_MAX = 1 << 20
BOUND_S = 60.0


async def test_a_worker_that_is_not_let_in_hears_why_and_the_log_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However many workers try, and however often."""
    caplog.set_level("INFO")

    async def attach(*_: object) -> None:
        raise MemoryExhausted("the agent serves 100 jobs already")

    desk: Any = SimpleNamespace(attach=attach, gone=lambda _: None)
    server = WorkerServer(tmp_path / "agent.sock", desk)
    server.start()
    for _ in range(3):
        worker = await connect(tmp_path / "agent.sock", FRAME_BYTES_MAX, BOUND_S)
        attaching = Attach(protocol=OLDEST_PROTOCOL, newest=PROTOCOL, release=release(), job="run-7")
        async with asyncio.timeout(BOUND_S):
            await worker.send(msgspec.msgpack.encode(attaching))
            body = await worker.receive()
        assert msgspec.msgpack.decode(body, type=AttachRefused).message == "the agent serves 100 jobs already"
        worker.close()
    await server.stop()
    assert caplog.records == []
