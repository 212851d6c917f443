"""A worker in a booted machine: `worker.py publish VERSION`, `pull REPLICA`, or `pull REPLICA PID VERSION`.

It ends without a release, and prints a digest of what it holds, or the name of its error. With PID, that process is
stopped in the middle of the read of VERSION.
"""

import asyncio
import hashlib
import os
import signal
import sys
from contextlib import suppress
from typing import Final

import torch

from tensorhub import AsyncHub, AsyncShard, TensorHubError, connect_async
from tensorhub.specs import TensorSpec

MODEL: Final = "policy"
NBYTES: Final = 512 << 20
"""Long enough under way to be stopped there."""
READ_S: Final = 30.0


async def register(hub: AsyncHub, replica: str) -> AsyncShard:
    return await hub.register(MODEL, {"w": TensorSpec((NBYTES,), torch.uint8)}, replica=replica)


def digest_of(shard: AsyncShard) -> str:
    return hashlib.blake2b(shard.tensors["w"].numpy().data, digest_size=16).hexdigest()


async def publish(hub: AsyncHub, version: int) -> str:
    shard = await register(hub, "trainer")
    if shard.version is not None:
        await shard.unpublish()
    generator = torch.Generator().manual_seed(version)
    shard.tensors["w"].random_(0, 256, generator=generator)
    await shard.publish(version)
    return digest_of(shard)


async def pull(hub: AsyncHub, replica: str, *stopped: int) -> str:
    shard = await register(hub, replica)
    stopping = asyncio.create_task(stop_in_mid_read(hub, replica, *stopped)) if stopped else None
    try:
        await shard.replicate("latest", timeout_s=READ_S)
        return digest_of(shard)
    except TensorHubError as error:
        return type(error).__name__
    finally:
        if stopping is not None:
            stopping.cancel()
            with suppress(asyncio.CancelledError):
                await stopping


async def stop_in_mid_read(hub: AsyncHub, replica: str, pid: int, version: int) -> None:
    """Stop a process as soon as the log says that the read begins; it tells of earlier reads too."""
    async for event in hub.watch(MODEL, kinds=()):
        if (event.kind, event.replica, event.version) == ("round.started", replica, version):
            os.kill(pid, signal.SIGSTOP)
            say("STOPPED")
            return


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main() -> None:
    command, *arguments = sys.argv[1:]
    hub = await connect_async()
    if command == "publish":
        say(await publish(hub, int(arguments[0])))
    else:
        replica, *stopped = arguments
        say(await pull(hub, replica, *map(int, stopped)))
    # Without a release: the next worker finds the shard.
    os._exit(0)


asyncio.run(main())
