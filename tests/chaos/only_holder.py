"""SIGKILLs the agent of a version's only holder in the middle of a transfer, and looks at what its reader gets.

A holder that stays away: the reader's call raises `VersionUnavailable` soon after the log has lost the holder's agent,
and what it holds is no version. A holder that comes back with its memory: the reader's call either raises the same
within the same bound, or returns the version, byte for byte; afterwards the version can be read either way.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tests.bounds import WAIT_S
from tests.chaos.content import Content
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.waiting import Missed

from tensorhub import AsyncShard, TensorHubError, VersionUnavailable

JOB: Final = "only-holder"
HOLDER: Final = "agent-0"
VERSION: Final = 7
ANSWER_S_MAX: Final = 3.0 + 3.0
"""While the log counts the holder the read goes on: for `TENSORHUB_LOST_AFTER_S`, and then it ends at once."""
BACK_S: Final = 20.0
READ_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the reader's call. `error` is None when it returned."""

    error: TensorHubError | None
    after_s: float
    version: int | None
    """What the reader claims to hold right after its call."""

    def wrong(self, *, comes_back: bool) -> str | None:
        """Describe what the reader should not have got, or None."""
        if self.error is None:
            return None if comes_back and self.version == VERSION else f"it returned, and holds {self.version}"
        if not isinstance(self.error, VersionUnavailable):
            return f"it raised {self.error!r}"
        if self.after_s > ANSWER_S_MAX:
            return f"it was answered after {self.after_s:.2f} s"
        return None if self.version is None else f"it claims to hold version {self.version}"


async def run(directory: Path, nbytes: int, *, comes_back: bool, hosts: int = 1) -> Outcome:
    """Bring up a hub, kill the only holder in mid-transfer, and return what the reader got. Raises `Missed`."""
    # One thread and a narrow window, so that the middle of the transfer is long enough to be met.
    narrow = {"TENSORHUB_COPY_THREADS": "1", "TENSORHUB_WINDOW_BYTES": "1MiB", "MORTAL": HOLDER}
    agent = "" if comes_back else "once"
    async with running_hub(directory, hosts=hosts, agent=agent, settings=narrow) as hub, AsyncExitStack() as stack:
        trainer_hub = await hub.connect(JOB, 0)
        # An agent that is gone keeps the shard.
        stack.push_async_callback(_leave, trainer_hub.close)
        content = Content(seed=7, shard=0, shards=1, nbytes=nbytes)
        trainer = await trainer_hub.register("policy", content.specs, replica="trainer")
        content.write(trainer.tensors, VERSION)
        await trainer.publish(VERSION)
        reader_hub = await stack.enter_async_context(await hub.connect(JOB, 1))
        reader = await reader_hub.register("policy", content.specs, replica="rollout")
        outcome = await _killed_in_mid_read(hub, reader)
        if outcome.error is None:
            assert content.wrong(reader.tensors, VERSION) is None, content.wrong(reader.tensors, VERSION)
            if not comes_back:
                # A dying process's memory stays until the kernel has taken it down, and its sockets longer.
                raise Missed("the rest came while the holder was dying: take more bytes")
        if comes_back:
            assert await reader.replicate(VERSION, timeout_s=BACK_S) == VERSION
            assert content.wrong(reader.tensors, VERSION) is None, content.wrong(reader.tensors, VERSION)
            await trainer_hub.close()
        return outcome


async def _killed_in_mid_read(hub: RunningHub, reader: AsyncShard) -> Outcome:
    # Some bytes after an eighth of what the read brings, and some of its end; they are zero before.
    embed = reader.tensors["embed"].reshape(-1).view(torch.uint8)
    begin, last = embed[len(embed) // 4 :][:64], reader.tensors["layers.7.weight"].view(torch.uint8)[-64:]
    reading = asyncio.create_task(reader.replicate(VERSION, timeout_s=READ_S))
    async with asyncio.timeout(WAIT_S):
        while not begin.any():
            assert not reading.done(), f"the read ended before it began: {reading}"
            await asyncio.sleep(0)
    hub.kill(HOLDER)
    at = time.monotonic()
    if last.any():
        await asyncio.gather(reading, return_exceptions=True)
        raise Missed("the read was over before the kill: take more bytes")
    error: TensorHubError | None = None
    try:
        await reading
    except TensorHubError as why:
        error = why
    return Outcome(error, time.monotonic() - at, reader.version)


async def _leave(close: object) -> None:
    try:
        await close(timeout_s=1.0)  # type: ignore[operator]
    except TensorHubError as why:
        print(f"the trainer's close raised: {why}")
