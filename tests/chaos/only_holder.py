"""SIGKILLs the agent of a version's only holder in the middle of a transfer, and looks at what its reader gets.

    python -m tests.chaos.only_holder [--mib 1024] [--comes-back] [--hosts 2]

A holder that stays away: the reader's call raises `VersionUnavailable` soon after the log has lost the holder's agent,
and what it holds is no version. A holder that comes back with its memory: the reader's call either raises the same
within the same bound, or returns the version, byte for byte; afterwards the version can be read either way.
"""

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tests.chaos.content import MIB, Content

import tensorhub
from tensorhub import AsyncShard, TensorHubError, VersionUnavailable
from tensorhub.local.hub import LocalHub, ServiceCommands

JOB: Final = "only-holder"
MORTAL: Final = "agent-0"
VERSION: Final = 7
ANSWER_S_MAX: Final = 3.0 + 3.0
"""While the log counts the holder the read goes on: for `TENSORHUB_LOST_AFTER_S`, and then it ends at once."""
BEGIN_S: Final = 20.0
BACK_S: Final = 20.0
READ_S: Final = 60.0


class TooLate(Exception):
    """The kill did not meet the middle of the transfer, so the run shows nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the reader's call. `error` is None when it returned."""

    error: TensorHubError | None
    after_s: float
    share: float
    """How much of the version stood in the destination at the kill."""
    version: int | None
    """What the reader said to hold right after its call."""

    def wrong(self, *, comes_back: bool) -> str | None:
        """Say what the reader should not have got, or None."""
        if self.error is None:
            return None if comes_back and self.version == VERSION else f"it returned, and holds {self.version}"
        if not isinstance(self.error, VersionUnavailable):
            return f"it raised {self.error!r}"
        if self.after_s > ANSWER_S_MAX:
            return f"it was answered after {self.after_s:.2f} s"
        return None if self.version is None else f"it says that it holds version {self.version}"


async def run(directory: Path, nbytes: int, *, comes_back: bool, hosts: int = 1) -> Outcome:
    """Bring up a hub, kill the only holder in mid-transfer, and return what the reader got. Raises `TooLate`."""
    commands = ServiceCommands()
    if not comes_back:
        commands = ServiceCommands(agent=(sys.executable, "-m", "tests.chaos.agent_once"))
    # One thread and a narrow window, so that the middle of the transfer is long enough to be met.
    environment = {
        **os.environ,
        "CHAOS_MORTAL": MORTAL,
        "TENSORHUB_COPY_THREADS": "1",
        "TENSORHUB_WINDOW_BYTES": "1MiB",
    }
    async with LocalHub(directory, agents=2, hosts=hosts, commands=commands, environment=environment) as up:
        holder, other = up.hub.agents
        trainer_hub = await tensorhub.connect_async(JOB, agent=holder.socket)
        try:
            outcome = await _read(trainer_hub, holder.pid, other.socket, nbytes, comes_back=comes_back)
            if comes_back:
                await trainer_hub.close()
        finally:
            await _leave(trainer_hub)
    return outcome


async def _read(trainer_hub: tensorhub.AsyncHub, pid: int, socket: str, nbytes: int, *, comes_back: bool) -> Outcome:
    content = Content(seed=7, shard=0, shards=1, nbytes=nbytes)
    trainer = await trainer_hub.register("policy", content.specs, replica="trainer")
    content.write(trainer.tensors, VERSION)
    await trainer.publish(VERSION)
    async with await tensorhub.connect_async(JOB, agent=socket) as hub:
        reader = await hub.register("policy", content.specs, replica="rollout")
        outcome = await _killed_in_mid_read(reader, pid)
        if outcome.error is None:
            assert content.wrong(reader.tensors, VERSION) is None, content.wrong(reader.tensors, VERSION)
            if not comes_back:
                # A dying process's memory stands until the kernel has taken it down, and its sockets longer.
                raise TooLate("the rest came while the holder was dying: take more bytes")
        if comes_back:
            assert await reader.replicate(VERSION, timeout_s=BACK_S) == VERSION
            assert content.wrong(reader.tensors, VERSION) is None, content.wrong(reader.tensors, VERSION)
    return outcome


async def _killed_in_mid_read(reader: AsyncShard, pid: int) -> Outcome:
    begin, last = _ends(reader)
    reading = asyncio.create_task(reader.replicate(VERSION, timeout_s=READ_S))
    deadline = time.monotonic() + BEGIN_S
    while not begin.any():
        assert not reading.done(), f"the read ended before it began: {reading}"
        assert time.monotonic() < deadline, "the read does not get on"
        await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    at = time.monotonic()
    share = _share(reader)
    if last.any():
        await asyncio.gather(reading, return_exceptions=True)
        raise TooLate("the read was over before the kill: take more bytes")
    error: TensorHubError | None = None
    try:
        await reading
    except TensorHubError as why:
        error = why
    return Outcome(error, time.monotonic() - at, share, reader.version)


def _ends(reader: AsyncShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return some bytes after an eighth of what a read brings and some of its end; they are zero before."""
    embed = reader.tensors["embed"].reshape(-1).view(torch.uint8)
    layers = reader.tensors["layers.7.weight"].view(torch.uint8)
    return embed[len(embed) // 4 :][:64], layers[-64:]


def _share(reader: AsyncShard) -> float:
    """Estimate how much has come, by looking at every 256th KiB."""
    marks = [
        bool(part.any())
        for tensor in reader.tensors.values()
        if tensor.numel()
        for part in tensor.reshape(-1).view(torch.uint8)[:: 64 * 1024].split(4)
    ]
    return sum(marks) / len(marks)


async def _leave(hub: tensorhub.AsyncHub) -> None:
    """Close a hub whose agent may be gone: it keeps the shard then."""
    try:
        await hub.close(timeout_s=1.0)
    except TensorHubError as why:
        print(f"the trainer's close said: {why}")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--comes-back", action="store_true")
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="tensorhub-chaos-"))
    try:
        outcome = await run(directory, args.mib * MIB, comes_back=args.comes_back, hosts=args.hosts)
    except TooLate as why:
        print(f"nothing was shown, for {why}")
        return 1
    print(f"{outcome.share:.0%} had come at the kill; answered after {outcome.after_s:.2f} s: {outcome.error!r}")
    wrong = outcome.wrong(comes_back=args.comes_back)
    if wrong is not None:
        print(f"WRONG: {wrong} (the logs are in {directory}/logs)")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
