"""Sends commands from outside all the time, and remembers which were acknowledged: none of them may get lost.

Each is a request to publish a model that no replica has, so it changes nothing, and its only outcome is a refusal.
"""

import asyncio
import contextlib
from typing import Final
from uuid import uuid4

from tensorhub_common.bus.connection import Bus
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import Publish
from tensorhub_common.protocol.subjects import command_subject

EVERY_S: Final = 0.05
APPEND_S: Final = 30.0
STOP_S: Final = 40.0


class Prober:
    """Sends from its beginning to `stop`; to be made in a running loop."""

    def __init__(self, bus: Bus, job: str) -> None:
        self.acknowledged: dict[str, int] = {}
        self.wrongs: list[str] = []
        self._joblog = JobLog(bus, job)
        self._ending = asyncio.Event()
        self._task = asyncio.create_task(self._send())

    async def stop(self) -> None:
        self._ending.set()
        async with asyncio.timeout(STOP_S):
            await self._task

    async def _send(self) -> None:
        body = encode(Publish(model="none", replica="none"))
        subject = command_subject(self._joblog.job, "publish")
        while not self._ending.is_set():
            msg_id = str(uuid4())
            try:
                self.acknowledged[msg_id] = await self._joblog.append(subject, body, msg_id, timeout_s=APPEND_S)
            except TensorHubError as why:
                if self.acknowledged:
                    self.wrongs.append(f"the log did not take a command within {APPEND_S:g} s: {why}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._ending.wait()
