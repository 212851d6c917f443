"""Does a far site take each byte once?

`python -m benchmarks.network.wan [--mib 256] [--mbit 200] [--rtt-ms 50] [--docs]`.

A trainer, NATS, registry and planner stand in one site, and so many replicas, each with an agent on a host of its own,
in another one, behind a thin and long line (benchmarks/sites.py). All wait for a version when it is published. It is
read in several ways: *shared*, as it is by default; *star*, where each replica pulls all of it over TCP from the
trainer by itself; *killed*, like shared, but an agent in the middle of its part is killed when half of the version has
crossed; *unlike* and *unlike-killed*, where the trainer has two shards, each with some rows of every tensor and an
agent of its own, and the replicas are whole; and *delta*, where all hold a version in which one value of a hundred is
another one. Shown are the time until the last (surviving) replica has it, and what went over the line, to the bytes of
the model. Needs root, `ip` and `ss`.
"""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

from tests.partition.namespaces import enter

from benchmarks import page
from benchmarks.fleet import JOB, Process
from benchmarks.llama import shapes
from benchmarks.network.sites import AGENT, FAR, NEAR, NEAR_AGENTS, PREFIX, Sites, address
from tensorhub._control.hub_file import AgentEntry
from tensorhub.local import nats_server
from tensorhub.local.hub import LocalHub, ServiceCommands

MODEL: Final = "wan"
MIB: Final = 1 << 20
WAYS: Final = ("shared", "star", "killed", "unlike", "unlike-killed", "delta")
UNLIKE: Final = 2
"""Where the trainer is cut otherwise than the replicas, into so many shards."""

CHANGED: Final = 0.01
"""The part of the values that is another one in a delta."""

JOIN_S: Final = 3.0
"""All readers have joined their rounds within this, over the line."""

LOOK_S: Final = 0.05
CROSSER_SHARE_MIN: Final = 0.01
"""Who has taken less than this part of the model over the line does not cross."""

SPARE_TIMES: Final = 3
"""A read may take so many times as long as its bytes need on the line, if each replica takes all of them."""


@dataclass(frozen=True, slots=True)
class Took:
    """One version, and how it came to the far site."""

    way: str
    seconds: float
    payload: float
    """What TCP carried from near to far, to the model's bytes."""
    interface: float
    """What the near site's interface sent, to the model's bytes."""
    crossed: tuple[float, ...]
    """What each surviving replica counts of what it took from the trainer, to the model's bytes."""
    wasted: float
    """What survivors asked for and did not count, to the model's bytes."""
    dropped: int
    """Frames that found the line's queue full."""
    left: tuple[str, ...] = ()
    """Which sources survivors have left before the end, and why."""
    lost: float = 0.0
    """What the killed agent had taken over the line and nobody has of it, to the model's bytes."""


class Far:
    """The trainer and the far replicas of one hub."""

    def __init__(self, sites: Sites, agents: Sequence[AgentEntry], shards: int, mib: int, bound_s: float) -> None:
        """Start nobody yet; the first agents are the trainer's shards'. Each call of a replica may take `bound_s`."""
        self._sites, self._agents, self._bound_s = sites, agents, bound_s
        self._near = {agent.id: number for number, agent in enumerate(agents[:shards])}
        self.whole = mib * MIB
        self._shapes = shapes(mib)
        self.trainer: list[Process] = []
        self.readers: dict[str, Process] = {}

    async def register(self, nats: str) -> None:
        """Start the processes, each in its site, and register them."""
        for agent in self._agents:
            shard = self._near.get(agent.id)
            site = FAR if shard is None else NEAR
            process = await Process.start(os.environ, ("ip", "netns", "exec", self._sites.name(site)))
            if shard is None:
                self.readers[agent.id] = process
            else:
                self.trainer.append(process)
            await process.ask(
                "register",
                socket=agent.socket,
                nats=nats,
                job=JOB,
                model=MODEL,
                replica=agent.id if shard is None else "trainer",
                shapes=self._shapes,
                fill=shard is not None,
                shard=shard or 0,
                shards=1 if shard is None else len(self._near),
            )

    async def train(self, do: str, **arguments: Any) -> list[Any]:  # noqa: ANN401 (a worker's arguments)
        """Have all shards of the trainer do something."""
        return await asyncio.gather(*(each.ask(do, **arguments) for each in self.trainer))

    async def run(self, way: str) -> Took:
        """Publish to waiting readers; measure until the last one has it, and compare all bytes."""
        await self.train("change", part=CHANGED if way == "delta" else 1.0)
        wait = {"wait_s": self._bound_s, "timeout_s": self._bound_s, "answer_s": 2 * self._bound_s}
        updates = {name: asyncio.create_task(each.ask("update", **wait)) for name, each in self.readers.items()}
        await asyncio.sleep(JOIN_S)
        before, held = self._sites.counters(), self._taken()
        published = await self.train("publish")
        taken = 0
        if way.endswith("killed"):
            victim, taken = await self._kill(before["tcp_payload"], held)
            updates.pop(victim).cancel()
            await self.readers.pop(victim).kill()
        reads = await asyncio.gather(*updates.values())
        after = self._sites.counters()
        await self._check_equal(reads, published[0]["version"])
        return self._took(
            way,
            min(each["begin"] for each in published),
            reads,
            {name: after[name] - before[name] for name in after},
            taken,
        )

    def _took(self, way: str, begin: float, reads: Sequence[Any], sent: dict[str, int], taken: int) -> Took:
        whole = self.whole
        sources = [[s for s in read["report"]["sources"] if s["agent"] in self._near] for read in reads]
        crossed = [sum(source["nbytes"] for source in each) / whole for each in sources]
        return Took(
            way=way,
            seconds=max(read["end"] for read in reads) - begin,
            payload=sent["tcp_payload"] / whole,
            interface=sent["interface"] / whole,
            crossed=tuple(crossed),
            wasted=sum(source["wasted_bytes"] for each in sources for source in each) / whole,
            dropped=sent["dropped"],
            left=tuple(
                f"number {number} left {source['agent']}, {source['wasted_bytes'] / whole:.3f} wasted: {source['lost']}"
                for number, read in enumerate(reads)
                for source in read["report"]["sources"]
                if source["lost"]
            ),
            lost=taken / whole - (1 - sum(crossed)) if taken else 0.0,
        )

    async def _kill(self, before: int, held: Mapping[int, int]) -> tuple[str, int]:
        """Kill the agent that is nearest to the middle of its part, when half has crossed; return what it has taken."""
        while self._sites.counters()["tcp_payload"] - before < self.whole / 2:  # noqa: ASYNC110 (only looking tells)
            await asyncio.sleep(LOOK_S)
        taken = {pid: nbytes - held.get(pid, 0) for pid, nbytes in self._taken().items()}
        crossers = [agent for agent in self._agents if taken.get(agent.pid, 0) > self.whole * CROSSER_SHARE_MIN]
        middle = self.whole / len(crossers) / 2
        victim = min(crossers, key=lambda agent: abs(taken[agent.pid] - middle))
        os.kill(victim.pid, signal.SIGKILL)
        return victim.id, taken[victim.pid]

    def _taken(self) -> dict[int, int]:
        """Return what each process of the far site has received from the trainer's agents, by its id."""
        trainer = {agent.pid for agent in self._agents if agent.id in self._near}
        ports = {port for port, pid, _ in self._sockets(NEAR) if pid in trainer}
        taken: dict[int, int] = {}
        for _, pid, nbytes in self._sockets(FAR, ports):
            taken[pid] = taken.get(pid, 0) + nbytes
        return taken

    def _sockets(self, site: str, peers: set[int] | None = None) -> list[tuple[int, int, int]]:
        """Return the local port, process and received bytes of each connection between the sites."""
        number = 0 if site == NEAR else 1
        command = ("ip", "netns", "exec", self._sites.name(site), "ss", "-tnpiOH", "dst", address(1 - number))
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout
        found = []
        for line in text.splitlines():
            ends = re.findall(r"[\d.]+:(\d+)", line)
            pid, received = re.search(r"pid=(\d+)", line), re.search(r"bytes_received:(\d+)", line)
            if pid is not None and (peers is None or int(ends[1]) in peers):
                found.append((int(ends[0]), int(pid[1]), int(received[1]) if received else 0))
        return found

    async def _check_equal(self, reads: Sequence[Any], version: int) -> None:
        if {read["version"] for read in reads} != {version}:
            raise RuntimeError(f"not everybody has read version {version}")
        shards = len(self.trainer)
        digests = [(await each.ask("digest", shards=shards))["digests"] for each in self.readers.values()]
        right = [each["digests"][0] for each in await self.train("digest")]
        if any(each != right for each in digests):
            raise RuntimeError(f"the copies differ from the trainer's bytes: {right}, {digests}")

    async def end(self) -> None:
        """Let all processes end."""
        for process in (*self.trainer, *self.readers.values()):
            await process.end()


async def measure(ways: Sequence[str], sites: Sites, mib: int, replicas: int, bound_s: float, times: int) -> list[Took]:
    """Run these ways, which need one setting of the planner and the agents, in one hub."""
    pipelining, deltas = "off" if "star" in ways else "on", "1" if "delta" in ways else "0"
    environment = {
        **os.environ,
        "TENSORHUB_PIPELINING": pipelining,
        "TENSORHUB_DELTAS": deltas,
        PREFIX: sites.prefix,
        NEAR_AGENTS: str(shards := UNLIKE if ways[0].startswith("unlike") else 1),
    }
    found: list[Took] = []
    with (
        tempfile.TemporaryDirectory(prefix="tensorhub-wan-") as folder,
        mock.patch.object(nats_server, "LISTEN", address(0)),
    ):
        agents = shards + replicas
        up = LocalHub(
            Path(folder), agents=agents, hosts=agents, commands=ServiceCommands(agent=AGENT), environment=environment
        )
        async with up:
            far = Far(sites, up.hub.agents, shards, mib, bound_s)
            try:
                await far.register(up.hub.nats)
                if "delta" in ways:
                    await far.run("shared")
                    await far.train("unpublish")
                for number in range(times * len(ways)):
                    found.append(await far.run(ways[number // times]))
                    print(found[-1], file=sys.stderr, flush=True)
                    await far.train("unpublish")
            finally:
                await far.end()
    return found


def words(found: Sequence[Took], options: argparse.Namespace) -> str:
    """Return the table."""
    alone = options.mib * MIB * 8 / (options.mbit * 1e6)
    head = (
        f"{options.mib} MiB, digests on, to {options.replicas} replicas behind {options.mbit:g} Mbit/s and "
        f"{options.rtt_ms:g} ms, on which the bytes alone take {alone:.1f} s once."
    )
    columns = ("way", "time", "to the bytes alone", "TCP payload", "interface", "crossings per replica", "lost")
    rows = [
        (
            took.way,
            f"{took.seconds:.1f} s",
            f"{took.seconds / alone:.2f}",
            f"{took.payload:.4f}",
            f"{took.interface:.4f}",
            f"{min(took.crossed):.2f} to {max(took.crossed):.2f}",
            f"{took.lost:.3f}",
        )
        for took in found
    ]
    return f"{head}\n\n{page.table(columns, rows)}"


def main() -> None:
    """Read the options, measure, and say what came out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network.wan", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--mib", type=int, default=256, help="size of the model")
    parser.add_argument("--mbit", type=float, default=200, help="what the line carries in each direction")
    parser.add_argument("--rtt-ms", type=float, default=50)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    options = parser.parse_args()
    bound_s = 60 + SPARE_TIMES * options.replicas * options.mib * MIB * 8 / (options.mbit * 1e6)
    found: list[Took] = []
    with Sites(options.mbit, options.rtt_ms) as sites:
        enter(sites.name(NEAR))
        for ways in (["shared", "killed"], ["unlike", "unlike-killed"], ["star"], ["delta"]):
            chosen = [way for way in ways if way in options.ways]
            if chosen:
                found += asyncio.run(measure(chosen, sites, options.mib, options.replicas, bound_s, options.times))
    found.sort(key=lambda took: WAYS.index(took.way))
    text = words(found, options)
    print(text)
    if options.docs:
        page.write("wan", text)


if __name__ == "__main__":
    main()
