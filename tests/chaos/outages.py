"""Takes a part of a hub away under a trainer and a reader that go on, and prints the log of every service in full.

    python -m tests.chaos.outages [nats-stopped nats-killed planner-stopped registry-stopped source-stopped]
        [--seconds 30] [--hosts 2] [--mib 16]

It is for eyes: what each process says of the outage, and of its end. The logs are those of one hub that is up for one
outage, from the moment before the outage until `AFTER_S` after it. `reader` is the log of this process, where a trainer
and an engine use the SDK. What their calls returned or raised stands there too, marked `call`.
"""

import argparse
import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import torch
from tests.stopping import stop

import tensorhub
from tensorhub import TensorHubError
from tensorhub.local.hub import LocalHub

JOB: Final = "outages"
OUTAGES: Final = ("nats-stopped", "nats-killed", "planner-stopped", "registry-stopped", "source-stopped")
BEFORE_S: Final = 2.0
AFTER_S: Final = 6.0
MIB: Final = 1 << 20
CALL_S: Final = 10.0
PAUSE_S: Final = 0.5
LOOK_S: Final = 0.05

_calls: Final = logging.getLogger("call")


def main() -> None:
    """Run the outages that are named, one hub after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outages", nargs="*", metavar="OUTAGE", help=", ".join(OUTAGES))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    parser.add_argument("--mib", type=int, default=16, help="of the model: large ones are met in the middle of a read")
    arguments = parser.parse_args()
    if unknown := set(arguments.outages) - set(OUTAGES):
        parser.error(f"there is no outage {', '.join(sorted(unknown))}: take some of {', '.join(OUTAGES)}")
    for outage in arguments.outages or OUTAGES:
        directory = Path(tempfile.mkdtemp(prefix="tensorhub-outages-"))
        try:
            asyncio.run(run(directory, outage, arguments.seconds, arguments.hosts, arguments.mib))
        finally:
            shutil.rmtree(directory)


async def run(directory: Path, outage: str, seconds: float, hosts: int, mib: int) -> None:
    """Bring a hub up, take a part of it away for a while, and print what was logged."""
    own = directory / "reader.log"
    handler = logging.FileHandler(own)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    _calls.setLevel(logging.INFO)
    try:
        async with LocalHub(directory / "hub", agents=2, hosts=hosts) as up, _working(up, mib):
            await asyncio.sleep(BEFORE_S)
            logs = [*sorted((directory / "hub").rglob("*.log")), own]
            sizes = {path: path.stat().st_size for path in logs}
            began = time.strftime("%H:%M:%S")
            await _away(up, outage, seconds)
            ended = time.strftime("%H:%M:%S")
            await asyncio.sleep(AFTER_S)
            _say(f"##### {outage}: from {began} to {ended}")
            for path in logs:
                said = path.read_bytes()[sizes[path] :].decode(errors="replace")
                _say(f"--- {path.stem} ({len(said.splitlines())} lines)\n{said.rstrip()}")
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


@asynccontextmanager
async def _working(up: LocalHub, mib: int) -> AsyncIterator[None]:
    """Publish all the time on one agent, and read all the time on the other."""
    first, second = up.hub.agents
    nats = up.hub.nats
    async with (
        await tensorhub.connect_async(JOB, agent=first.socket, nats=nats) as trainer_hub,
        await tensorhub.connect_async(JOB, agent=second.socket, nats=nats) as reader_hub,
    ):
        weights = {"w": torch.zeros(mib * MIB // 4)}
        trainer = await trainer_hub.register("policy", weights, replica="trainer")
        reader = await reader_hub.register("policy", weights, replica="rollout")
        ending = asyncio.Event()
        works = [asyncio.create_task(_publish(trainer, ending)), asyncio.create_task(_read(reader, ending))]
        try:
            yield
        finally:
            ending.set()
            await asyncio.gather(*works)


async def _publish(trainer: tensorhub.AsyncShard, ending: asyncio.Event) -> None:
    while not ending.is_set():
        await _told("publish", trainer.publish(timeout_s=CALL_S))
        await asyncio.sleep(PAUSE_S)
        await _told("unpublish", trainer.unpublish(timeout_s=CALL_S))


async def _read(reader: tensorhub.AsyncShard, ending: asyncio.Event) -> None:
    while not ending.is_set():
        await _told("update", reader.update(wait_s=1, timeout_s=CALL_S))
        await asyncio.sleep(PAUSE_S / 2)


async def _told(what: str, call: object) -> None:
    began = time.monotonic()
    try:
        found = await call  # type: ignore[misc]
    except TensorHubError as why:
        _calls.info("%s raised after %.1f s: %s: %s", what, time.monotonic() - began, type(why).__name__, why)
        await asyncio.sleep(PAUSE_S)
    else:
        if (took_s := time.monotonic() - began) > 2:
            _calls.info("%s returned %r after %.1f s", what, found, took_s)


async def _away(up: LocalHub, outage: str, seconds: float) -> None:
    part, how = outage.rsplit("-", 1)
    if how == "killed":
        await _keep_killing(up, seconds)
        return
    pid = {
        "nats": up.hub.nats_pid,
        "planner": up.hub.planner.pid,
        "registry": up.hub.registry.pid,
        "source": up.hub.agents[0].pid,
    }[part]
    stop(pid)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


async def _keep_killing(up: LocalHub, seconds: float) -> None:
    """Kill NATS each time that `up` has started it again."""
    until = time.monotonic() + seconds
    killed = 0
    while time.monotonic() < until:
        if (pid := up.hub.nats_pid) != killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed = pid
        await asyncio.sleep(LOOK_S)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
