"""Takes a part of a hub away, or makes a read stall, and prints what every part of the hub reports of it.

    python -m tests.chaos.transcripts outages [nats-stopped nats-killed planner-stopped …] [--seconds 30] [--hosts 2]
    python -m tests.chaos.transcripts reads [stalled slow failed] [--mib 1024] [--hosts 2]

It is for eyes. `outages`: a trainer and an engine go on in this process while a part is away; the logs of every service
follow in full, from the moment before the outage until `AFTER_S` after it. `reader` is the log of this process; what
calls returned or raised is in it, marked `call`.

`reads`: the truth comes first: when the only source was stopped and woken, and what the call returned. Then what
`tensorhub status` printed in the middle, what the reader got (`last_read`), `tensorhub trace`, the lines of the reading
agent's log, and the metrics that changed. The bytes of what was read are compared.
"""

import argparse
import asyncio
import contextlib
import logging
import re
import shutil
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import torch
from tests.chaos.content import MIB, Content
from tests.chaos.memory_marks import first_bytes
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.waiting import kill

from tensorhub import AsyncShard, TensorHubError

JOB: Final = "transcripts"
OUTAGES: Final = ("nats-stopped", "nats-killed", "planner-stopped", "registry-stopped", "source-stopped")
PROCESSES: Final = {"nats": "nats", "planner": "planner-0", "registry": "registry-0", "source": "agent-0"}
BEFORE_S: Final = 2.0
AFTER_S: Final = 6.0
CALL_S: Final = 10.0
SLOW_S: Final = 2.0
PAUSE_S: Final = 0.5
LOOK_S: Final = 0.05

VERSION: Final = 7
STOPPED_S: Final = 6.0
AWAKE_S: Final = 0.01
ASLEEP_S: Final = 0.4
PULSES: Final = 40
READ_S: Final = 60.0
FAILS_S: Final = 4.0
ROWS_BETWEEN: Final = 64
ROW_BEGIN: Final = 8
"""How many rows are looked at, and how many values of each."""

SPANS_S: Final = 3.0
"""How long the services take at most until a span that has ended is in their files."""

ENVIRONMENT: Final = {
    # One thread and a narrow window, so that the middle of a read is long enough to be met.
    "TENSORHUB_COPY_THREADS": "1",
    "TENSORHUB_WINDOW_BYTES": "1MiB",
    "TENSORHUB_STALL_S": "2",
    # The log counts the source all the time, so it is the read that must report.
    "TENSORHUB_LOST_AFTER_S": "60",
    "TENSORHUB_METRICS": "0",
}

_calls: Final = logging.getLogger("call")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    of_outages = parts.add_parser("outages")
    of_outages.add_argument("names", nargs="*", metavar="OUTAGE", help=", ".join(OUTAGES))
    of_outages.add_argument("--seconds", type=float, default=30.0)
    of_outages.add_argument("--mib", type=int, default=16, help="large models are met in the middle of a read")
    of_reads = parts.add_parser("reads")
    of_reads.add_argument("names", nargs="*", metavar="READ", help=", ".join(READS))
    of_reads.add_argument("--mib", type=int, default=1024)
    for part, hosts in ((of_outages, 1), (of_reads, 2)):
        part.add_argument("--hosts", type=int, default=hosts, choices=(1, 2))
    chosen = parser.parse_args()
    known = OUTAGES if chosen.part == "outages" else tuple(READS)
    if unknown := set(chosen.names) - set(known):
        parser.error(f"there is no {', '.join(sorted(unknown))}: take some of {', '.join(known)}")
    for name in chosen.names or known:
        directory = Path(tempfile.mkdtemp(prefix="tensorhub-transcripts-"))
        try:
            if chosen.part == "outages":
                asyncio.run(outage(directory, name, chosen.seconds, chosen.hosts, chosen.mib))
            else:
                asyncio.run(read(directory, name, chosen.mib, chosen.hosts))
        finally:
            shutil.rmtree(directory)


def _print(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------------------------------------------------- outages


async def outage(directory: Path, name: str, seconds: float, hosts: int, mib: int) -> None:
    own = directory / "reader.log"
    handler = logging.FileHandler(own)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    _calls.setLevel(logging.INFO)
    try:
        async with running_hub(directory / "hub", hosts=hosts) as hub, _working(hub, mib):
            await asyncio.sleep(BEFORE_S)
            logs = [*sorted((directory / "hub").rglob("*.log")), own]
            sizes = {path: path.stat().st_size for path in logs}
            began = time.strftime("%H:%M:%S")
            await _away(hub, name, seconds)
            ended = time.strftime("%H:%M:%S")
            await asyncio.sleep(AFTER_S)
            _print(f"##### {name}: from {began} to {ended}")
            for path in logs:
                text = path.read_bytes()[sizes[path] :].decode(errors="replace")
                _print(f"--- {path.stem} ({len(text.splitlines())} lines)\n{text.rstrip()}")
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


@asynccontextmanager
async def _working(hub: RunningHub, mib: int) -> AsyncIterator[None]:
    async with hub.connected(JOB) as (trainer_hub, reader_hub):
        weights = {"w": torch.zeros(mib * MIB // 4)}
        trainer = await trainer_hub.register("policy", weights, replica="trainer")
        reader = await reader_hub.register("policy", weights, replica="rollout")
        ending = asyncio.Event()

        async def publish() -> None:
            while not ending.is_set():
                await _logged("publish", trainer.publish(timeout_s=CALL_S))
                await asyncio.sleep(PAUSE_S)
                await _logged("unpublish", trainer.unpublish(timeout_s=CALL_S))

        async def follow() -> None:
            while not ending.is_set():
                await _logged("update", reader.update(wait_s=1, timeout_s=CALL_S))
                await asyncio.sleep(PAUSE_S / 2)

        works = [asyncio.create_task(publish()), asyncio.create_task(follow())]
        try:
            yield
        finally:
            ending.set()
            await asyncio.gather(*works)


async def _logged(what: str, call: Awaitable[object]) -> None:
    began = time.monotonic()
    try:
        found = await call
    except TensorHubError as why:
        _calls.info("%s raised after %.1f s: %s: %s", what, time.monotonic() - began, type(why).__name__, why)
        await asyncio.sleep(PAUSE_S)
    else:
        if (took_s := time.monotonic() - began) > SLOW_S:
            _calls.info("%s returned %r after %.1f s", what, found, took_s)


async def _away(hub: RunningHub, name: str, seconds: float) -> None:
    part, how = name.rsplit("-", 1)
    if how == "stopped":
        with hub.stopped(PROCESSES[part]):
            await asyncio.sleep(seconds)
        return
    until, killed = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        if (pid := hub.pid(PROCESSES[part])) != killed:
            kill(pid)
            killed = pid
        await asyncio.sleep(LOOK_S)


# ------------------------------------------------------------------------------------------------------------ reads


class Reading:
    """A read of a version that agent-0 holds and agent-1 reads."""

    def __init__(self, hub: RunningHub, reader: AsyncShard) -> None:
        self.hub, self.reader = hub, reader
        self.status = "nothing was asked"
        self.task: asyncio.Task[int]
        self._began = time.monotonic()

    def truth(self, text: str) -> None:
        _print(f"  truth {time.strftime('%H:%M:%S')} +{time.monotonic() - self._began:5.2f} s  {text}")

    async def begin(self, timeout_s: float) -> None:
        self._began = time.monotonic()
        self.truth("the read is called")
        self.task = asyncio.create_task(self._replicate(timeout_s))
        await first_bytes([self.reader], self.task)

    async def _replicate(self, timeout_s: float) -> int:
        try:
            version = await self.reader.replicate(VERSION, timeout_s=timeout_s)
        except TensorHubError as why:
            self.truth(f"the call raised {type(why).__name__}: {why}")
            raise
        self.truth(f"the call returned {version}")
        return version

    def part(self) -> str:
        """Describe how much of the destination is filled: no row of `tests.chaos.content` begins with zeros."""
        largest = max(self.reader.tensors.values(), key=lambda tensor: tensor.numel())
        rows = largest.reshape(largest.shape[0], -1)[::ROWS_BETWEEN, :ROW_BEGIN]
        share = int((rows != 0).any(dim=1).sum()) / len(rows)
        return f"{share:.0%} of the largest tensor's rows have come"

    async def command(self, *arguments: str) -> str:
        _, out, err = await self.hub.command(*arguments, "--job", JOB)
        return (out + err).rstrip()

    async def look(self) -> None:
        self.truth(f"'tensorhub status' is asked; {self.part()}")
        self.status = await self.command("status")

    def metrics(self) -> dict[str, str]:
        url = re.findall(r"metrics at (http://\S+)", self.hub.log("agent-1"))[-1]
        with urllib.request.urlopen(url, timeout=READ_S) as page:  # noqa: S310 (it is our agent's)
            lines = page.read().decode().splitlines()
        samples = [line.rpartition(" ") for line in lines if line.startswith("tensorhub_agent_read")]
        return {name: value for name, _, value in samples if "_bucket" not in name and "_created" not in name}


async def stalled(reading: Reading) -> None:
    """The source is stopped for a while in the middle, and goes on."""
    with reading.hub.stopped("agent-0"):
        reading.truth(f"the source is stopped; {reading.part()}")
        await asyncio.sleep(STOPPED_S / 2)
        await reading.look()
        await asyncio.sleep(STOPPED_S / 2)
    reading.truth(f"the source is woken; {reading.part()}")
    await asyncio.wait({reading.task})


async def slow(reading: Reading) -> None:
    """The source sleeps most of the time, and each time for less than what counts as a stall."""
    asleep_s = 0.0
    async with asyncio.TaskGroup() as tasks:
        for pulse in range(PULSES):
            if reading.task.done():
                break
            if pulse == PULSES // 2:
                tasks.create_task(reading.look())
            with reading.hub.stopped("agent-0"):
                asleep_s += ASLEEP_S
                await asyncio.sleep(ASLEEP_S)
            await asyncio.sleep(AWAKE_S)
    reading.truth(f"the source slept {asleep_s:.1f} s or more, {ASLEEP_S:.1f} s at a time; {reading.part()}")
    await asyncio.wait({reading.task})


async def failed(reading: Reading) -> None:
    """The only source is stopped until the call's time is over."""
    with reading.hub.stopped("agent-0"):
        reading.truth(f"the source is stopped; {reading.part()}")
        await asyncio.sleep(FAILS_S / 2)
        await reading.look()
        await asyncio.wait({reading.task})


READS: Final[dict[str, tuple[Callable[[Reading], Awaitable[Any]], float]]] = {
    "stalled": (stalled, READ_S),
    "slow": (slow, READ_S),
    "failed": (failed, FAILS_S),
}


async def read(directory: Path, kind: str, mib: int, hosts: int) -> None:
    """Bring a hub up, read once with this trouble, and print what all of its parts report."""
    trouble, timeout_s = READS[kind]
    content = Content(seed=7, shard=0, shards=1, nbytes=mib * MIB)
    async with running_hub(directory, hosts=hosts, settings=ENVIRONMENT) as hub, hub.connected(JOB) as (source, sink):
        trainer = await source.register("policy", content.specs, replica="trainer")
        content.write(trainer.tensors, VERSION)
        await trainer.publish(VERSION)
        reading = Reading(hub, await sink.register("policy", content.specs, replica="rollout"))
        logged, before = len(hub.log("agent-1")), reading.metrics()
        _print(f"##### a {kind} read of {mib} MiB over {hosts} host(s)")
        await reading.begin(timeout_s)
        await trouble(reading)
        with contextlib.suppress(TensorHubError):
            reading.truth(f"bytes: {content.wrong(reading.reader.tensors, await reading.task) or 'equal'}")
        reading.truth(reading.part())
        await asyncio.sleep(SPANS_S)
        _print(f"--- tensorhub status, in the middle\n{reading.status}")
        _print(f"--- last_read\n{reading.reader.last_read}")
        for arguments in (("trace",), ("trace", "--version", str(VERSION))):
            _print(f"--- tensorhub {' '.join(arguments)}\n{await reading.command(*arguments)}")
        _print(f"--- agent-1.log\n{hub.log('agent-1')[logged:].rstrip()}")
        _print("--- metrics of agent-1 that changed")
        for name, value in reading.metrics().items():
            if value != before.get(name, "0.0"):
                _print(f"{name}  {before.get(name, 'absent')} -> {value}")


if __name__ == "__main__":
    main()
