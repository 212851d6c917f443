"""Makes a read stall, crawl and fail, and prints what the hub says of each beside what was done to it.

    python -m tests.chaos.reads_told [stalled slow failed] [--mib 1024] [--hosts 2]

It is for eyes. The truth comes first: when the only source was stopped and woken, and what the call returned. Then what
`tensorhub status` said in the middle, what the reader was told (`last_read`), `tensorhub trace`, the lines of the
reading agent's log, and the metrics that changed. Each read has a hub of its own; the bytes of what was read are
compared.
"""

import argparse
import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from tests.chaos.content import MIB, Content

import tensorhub
from tensorhub import AsyncShard, TensorHubError
from tensorhub.local.hub import LocalHub

JOB: Final = "reads-told"
MODEL: Final = "policy"
VERSION: Final = 7
STOPPED_S: Final = 6.0
AWAKE_S: Final = 0.01
ASLEEP_S: Final = 0.4
PULSES: Final = 40
READ_S: Final = 60.0
FAILS_S: Final = 4.0
BEGIN_S: Final = 20.0
ROWS_BETWEEN: Final = 64
ROW_BEGIN: Final = 8
"""How many rows are looked at, and how many values of each."""

SPANS_S: Final = 3.0
"""How long the services take at most until a span that has ended stands in their files."""

ENVIRONMENT: Final = {
    # One thread and a narrow window, so that the middle of a read is long enough to be met.
    "TENSORHUB_COPY_THREADS": "1",
    "TENSORHUB_WINDOW_BYTES": "1MiB",
    "TENSORHUB_STALL_S": "2",
    # The log counts the source all the time, so that it is the read that must tell.
    "TENSORHUB_LOST_AFTER_S": "60",
    "TENSORHUB_METRICS": "0",
}

Trouble = Callable[["Hub", "asyncio.Task[int]"], Awaitable[None]]


class Hub:
    """A hub whose agent-0 holds the version that agent-1 reads."""

    def __init__(self, up: LocalHub, directory: Path, reader: AsyncShard) -> None:
        self._up, self._directory, self.reader = up, directory, reader
        self._began = time.monotonic()
        self.status = "nothing was asked"

    def truth(self, text: str) -> None:
        """Print what was done, and when."""
        _say(f"  truth {time.strftime('%H:%M:%S')} +{time.monotonic() - self._began:5.2f} s  {text}")

    def strike(self, number: int) -> None:
        """Send the source a signal."""
        os.kill(self._up.hub.agents[0].pid, number)

    async def begin(self, timeout_s: float) -> "asyncio.Task[int]":
        """Start the read, and return once bytes have come."""
        self._began = time.monotonic()
        self.truth("the read is called")
        reading = asyncio.create_task(self._replicate(timeout_s))
        async with asyncio.timeout(BEGIN_S):
            # Only the memory tells when its first bytes have come.
            while not self._share() and not reading.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
        return reading

    async def _replicate(self, timeout_s: float) -> int:
        try:
            version = await self.reader.replicate(VERSION, timeout_s=timeout_s)
        except TensorHubError as why:
            self.truth(f"the call raised {type(why).__name__}: {why}")
            raise
        self.truth(f"the call returned {version}")
        return version

    def _share(self) -> float:
        """Return how much of the largest tensor has come: no row of `tests.chaos.content` begins with zeros."""
        largest = max(self.reader.tensors.values(), key=lambda tensor: tensor.numel())
        rows = largest.reshape(largest.shape[0], -1)[::ROWS_BETWEEN, :ROW_BEGIN]
        return int((rows != 0).any(dim=1).sum()) / len(rows)

    def part(self) -> str:
        """Say how much of the destination is filled."""
        return f"{self._share():.0%} of the largest tensor's rows have come"

    async def command(self, *arguments: str) -> str:
        """Return what a command of users prints."""
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-c",
                "from tensorhub_launcher import main; main()",
                *arguments,
                "--job",
                JOB,
                "--dir",
                str(self._directory),
            ),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        return out.decode().rstrip()

    async def look(self) -> None:
        """Ask for the status now; it is printed with the rest."""
        self.truth(f"'tensorhub status' is asked; {self.part()}")
        self.status = await self.command("status")

    def log(self) -> Path:
        """Return the reading agent's log."""
        (found,) = self._directory.rglob("agent-1.log")
        return found

    def metrics(self) -> dict[str, str]:
        """Return the reading agent's metrics of reads."""
        url = re.findall(r"metrics at (http://\S+)", self.log().read_text())[-1]
        with urllib.request.urlopen(url, timeout=READ_S) as page:  # noqa: S310 (it is our agent's)
            lines = page.read().decode().splitlines()
        told = [line.rpartition(" ") for line in lines if line.startswith("tensorhub_agent_read")]
        return {name: value for name, _, value in told if "_bucket" not in name and "_created" not in name}


async def stalled(hub: Hub, reading: "asyncio.Task[int]") -> None:
    """The source stands still for a while in the middle, and goes on."""
    hub.strike(signal.SIGSTOP)
    hub.truth(f"the source is stopped; {hub.part()}")
    await asyncio.sleep(STOPPED_S / 2)
    await hub.look()
    await asyncio.sleep(STOPPED_S / 2)
    hub.strike(signal.SIGCONT)
    hub.truth(f"the source is woken; {hub.part()}")
    await asyncio.wait({reading})


async def slow(hub: Hub, reading: "asyncio.Task[int]") -> None:
    """The source sleeps most of the time, and each time for less than what counts as standing still."""
    asleep_s = 0.0
    async with asyncio.TaskGroup() as tasks:
        for pulse in range(PULSES):
            if reading.done():
                break
            if pulse == PULSES // 2:
                tasks.create_task(hub.look())
            hub.strike(signal.SIGSTOP)
            asleep_s += ASLEEP_S
            await asyncio.sleep(ASLEEP_S)
            hub.strike(signal.SIGCONT)
            await asyncio.sleep(AWAKE_S)
    hub.truth(f"the source slept {asleep_s:.1f} s or more, {ASLEEP_S:.1f} s at a time; {hub.part()}")
    await asyncio.wait({reading})


async def failed(hub: Hub, reading: "asyncio.Task[int]") -> None:
    """The only source stands still until the call's time is over."""
    hub.strike(signal.SIGSTOP)
    hub.truth(f"the source is stopped; {hub.part()}")
    await asyncio.sleep(FAILS_S / 2)
    await hub.look()
    await asyncio.wait({reading})


READS: Final[dict[str, tuple[Trouble, float]]] = {
    "stalled": (stalled, READ_S),
    "slow": (slow, READ_S),
    "failed": (failed, FAILS_S),
}


async def run(directory: Path, kind: str, mib: int, hosts: int) -> None:
    """Bring a hub up, read once with this trouble, and print what all of them say."""
    trouble, timeout_s = READS[kind]
    content = Content(seed=7, shard=0, shards=1, nbytes=mib * MIB)
    async with LocalHub(directory, agents=2, hosts=hosts, environment={**os.environ, **ENVIRONMENT}) as up:
        holder, other = up.hub.agents
        async with (
            await tensorhub.connect_async(JOB, agent=holder.socket, nats=up.hub.nats) as source,
            await tensorhub.connect_async(JOB, agent=other.socket, nats=up.hub.nats) as sink,
        ):
            trainer = await source.register(MODEL, content.specs, replica="trainer")
            content.write(trainer.tensors, VERSION)
            await trainer.publish(VERSION)
            hub = Hub(up, directory, await sink.register(MODEL, content.specs, replica="rollout"))
            size, before = hub.log().stat().st_size, hub.metrics()
            _say(f"##### a {kind} read of {mib} MiB over {hosts} host(s)")
            reading = await hub.begin(timeout_s)
            try:
                await trouble(hub, reading)
            finally:
                hub.strike(signal.SIGCONT)
            try:
                version = await reading
                hub.truth(f"bytes: {content.wrong(hub.reader.tensors, version) or 'equal'}")
            except TensorHubError:
                hub.truth(hub.part())
            await asyncio.sleep(SPANS_S)
            _say(f"--- tensorhub status, in the middle\n{hub.status}")
            _say(f"--- last_read\n{hub.reader.last_read}")
            transfers = await hub.command("trace")
            _say(f"--- tensorhub trace\n{transfers}")
            _say(f"--- tensorhub trace --version {VERSION}\n{await hub.command('trace', '--version', str(VERSION))}")
            _say(f"--- agent-1.log\n{hub.log().read_bytes()[size:].decode().rstrip()}")
            changed = {name: value for name, value in hub.metrics().items() if value != before.get(name, "0.0")}
            _say("--- metrics of agent-1 that changed")
            for name, value in changed.items():
                _say(f"{name}  {before.get(name, 'absent')} -> {value}")


def main() -> None:
    """Make the reads that are named, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reads", nargs="*", metavar="READ", help=", ".join(READS))
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--hosts", type=int, default=2, choices=(1, 2))
    arguments = parser.parse_args()
    if unknown := set(arguments.reads) - set(READS):
        parser.error(f"there is no read {', '.join(sorted(unknown))}: take some of {', '.join(READS)}")
    for kind in arguments.reads or READS:
        directory = Path(tempfile.mkdtemp(prefix="tensorhub-reads-told-"))
        try:
            asyncio.run(run(directory, kind, arguments.mib, arguments.hosts))
        finally:
            shutil.rmtree(directory)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
