"""Kills real processes at random moments of a running job, and counts what became of everything.

    python -m tests.chaos.kills --kills 200 [--hosts 2] [--seed S] [--seconds-max 900]

A hub with four agents runs a trainer and two rollout replicas; victims are NATS, the registry, the planner, every agent
and every worker, now and then two at once, one after the other, or the whole hub. After each kill the work must go on
within a bound. At the end the whole log is read: each command has exactly one outcome, nothing acknowledged is missing,
every commit had equal bytes, every caller was answered within its bound, and neither memory nor a process is left
behind. Exit code 1 and the story of each finding otherwise.
"""

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final
from uuid import uuid4

from tests.chaos.content import MIB
from tests.chaos.fleet import Findings, Fleet
from tests.chaos.prober import Prober
from tests.chaos.verdict import LogVerdict
from tests.chaos.whole_log import read_whole_log
from tests.chaos.worker import Config
from tests.leftovers import memory_of

from tensorhub._control import hub_file
from tensorhub.local.hub import LocalHub
from tensorhub_common.bus.connection import Bus, connect

JOB: Final = "chaos"
AGENTS: Final = 4
SHARDS: Final = 2
PROGRESS_S: Final = 20.0
"""After a kill a version that was begun afterwards must have been published and read by everybody within this."""

FIRST_PROGRESS_S: Final = 60.0
CALM_S_MAX: Final = 0.4
PAIR: Final = 2
PAIR_SHARE: Final = 0.15
AGAIN_SHARE: Final = 0.15
AGAIN_S_MAX: Final = 1.0
ALL_SHARE: Final = 0.02
"""So often all processes of the hub are killed at once, as when a machine loses its power and none of its memory."""

GONE_S: Final = 5.0


@dataclass(slots=True)
class Kill:
    """One moment of violence. A victim may stand twice; recovery counts from the last blow."""

    victims: tuple[str, ...]
    recovery_s: float


@dataclass(slots=True)
class Run:
    """One run of the script."""

    kills: int
    seed: int
    nbytes: int
    directory: Path
    seconds_max: float
    hosts: int = 1
    """Agent i pretends to be on host i mod hosts; between two of them bytes go over ucxx."""
    progress_s: float = PROGRESS_S
    verbose: bool = False
    findings: Findings = field(default_factory=Findings)
    done: list[Kill] = field(default_factory=list)
    log: LogVerdict = field(default_factory=LogVerdict)
    probes: int = 0
    took_s: float = 0.0

    async def go(self) -> None:
        """Do all of it. What was found stands in `findings.wrongs` afterwards."""
        began = time.monotonic()
        environment = {**os.environ, "TENSORHUB_LOG_FORMAT": "console"}
        async with LocalHub(self.directory, agents=AGENTS, hosts=self.hosts, environment=environment) as up:
            url, key = up.hub.nats, up.hub.credentials
            async with await connect(url, name="chaos", credentials=key) as bus, Prober(bus, JOB) as prober:
                fleet = self._fleet()
                try:
                    await fleet.start()
                    await self._kill_all(fleet, began)
                finally:
                    await fleet.end()
                await prober.stop()
                self.probes = len(prober.acknowledged)
                await self._read_log(bus, prober)
        self._look_for_leftovers()
        self.took_s = time.monotonic() - began

    def _fleet(self) -> Fleet:
        fleet = Fleet(self.directory, self.findings)
        for name, replica, indexes, agent in (
            ("trainer", "trainer", (0, 1), "agent-0"),
            ("rollout-a", "rollout-a", (0, 1), "agent-1"),
            ("rollout-b0", "rollout-b", (0,), "agent-2"),
            ("rollout-b1", "rollout-b", (1,), "agent-3"),
        ):
            role = "trainer" if name == "trainer" else "rollout"
            fleet.add(
                name,
                Config(
                    job=JOB,
                    seed=self.seed,
                    role=role,
                    replica=replica,
                    indexes=indexes,
                    shards=SHARDS,
                    nbytes=self.nbytes,
                    agent=agent,
                ),
            )
        return fleet

    # Killing.

    async def _kill_all(self, fleet: Fleet, began: float) -> None:
        chance = random.Random(self.seed)
        if await fleet.progress(time.monotonic(), FIRST_PROGRESS_S) is None:
            self.findings.wrong(f"nothing was published and read before the first kill:\n{fleet.story(0)}")
            return
        for number in range(self.kills):
            await asyncio.sleep(chance.uniform(0, CALM_S_MAX))
            if time.monotonic() - began > self.seconds_max:
                self.findings.wrong(f"only {number} of {self.kills} kills in {self.seconds_max:g} s")
                return
            victims = await self._kill_some(chance, fleet)
            at = time.monotonic()
            recovered = await self._progress(fleet, at)
            if recovered is None:
                names = " and ".join(victims)
                self.findings.wrong(
                    f"kill {number + 1} ({names}): no progress within {self.progress_s:g} s\n{fleet.story(at)}"
                )
                return
            self.done.append(Kill(victims, recovered - at))
            if self.verbose:
                named = " + ".join(victims) if len(victims) <= PAIR else "the whole hub"
                said = f"kill {number + 1:3} at {at:9.2f}: {named:26}"
                print(f"{said} recovered in {recovered - at:5.2f} s", flush=True)

    async def _progress(self, fleet: Fleet, at: float) -> float | None:
        """Wait for progress, and look meanwhile whether anybody waits for too long."""
        waiting = asyncio.create_task(fleet.progress(at, self.progress_s))
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=1.0)
            late = fleet.late_calls()
            if late:
                self.findings.wrongs += late
                waiting.cancel()
                return None
        return waiting.result()

    def _pids(self, fleet: Fleet) -> dict[str, int]:
        """Everybody who can be killed now."""
        hub = hub_file.read(self.directory)
        pids = {"nats": hub.nats_pid, "registry": hub.registry.pid, "planner": hub.planner.pid}
        pids |= {agent.id: agent.pid for agent in hub.agents}
        pids |= {name: member.pid for name, member in fleet.members.items() if member.pid is not None}
        return {name: pid for name, pid in pids.items() if _is_alive(pid)}

    async def _kill_some(self, chance: random.Random, fleet: Fleet) -> tuple[str, ...]:
        """Kill one; now and then two at once, a second one while the first comes back, or the whole hub."""
        how = chance.random()
        if how < ALL_SHARE:
            victims = tuple(sorted(set(self._pids(fleet)) - set(fleet.members)))
            for victim in victims:
                self._kill(victim, fleet)
            return victims
        victims = self._choose(chance, fleet, PAIR if how < PAIR_SHARE else 1)
        if PAIR_SHARE <= how < PAIR_SHARE + AGAIN_SHARE:
            await asyncio.sleep(chance.uniform(0, AGAIN_S_MAX))
            victims += self._choose(chance, fleet, 1)
        return victims

    def _choose(self, chance: random.Random, fleet: Fleet, count: int) -> tuple[str, ...]:
        victims = tuple(chance.sample(sorted(self._pids(fleet)), count))
        for victim in victims:
            self._kill(victim, fleet)
        return victims

    def _kill(self, victim: str, fleet: Fleet) -> None:
        if victim in fleet.members:
            fleet.members[victim].kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids(fleet)[victim], signal.SIGKILL)

    # Counting.

    async def _read_log(self, bus: Bus, prober: Prober) -> None:
        self.log = await read_whole_log(bus, JOB, self.directory / "logs" / "job.log")
        self.findings.wrongs += self.log.wrongs + self.log.lost(prober.acknowledged) + prober.wrongs

    def _look_for_leftovers(self) -> None:
        segments = [path.name for path in memory_of(self.directory)]
        if segments:
            self.findings.wrong(f"{len(segments)} files are left in shared memory: {segments[:5]}")
        deadline = time.monotonic() + GONE_S
        while strays := list(_processes_of(self.directory)):
            if time.monotonic() > deadline:
                self.findings.wrong(f"processes are left: {strays}")
                return
            time.sleep(0.05)

    # Telling.

    def table(self) -> str:
        """Say what happened, for people."""
        findings = self.findings
        several = sum(len(kill.victims) > 1 for kill in self.done)
        where = "one host" if self.hosts == 1 else f"{self.hosts} hosts"
        said = f"{len(self.done)} kills, {several} of several victims, on {where} in {self.took_s:.0f} s"
        lines = [f"seed {self.seed}: {said}", ""]
        lines.append(f"{'victim':12} {'kills':>6} {'recovery p50':>13} {'max':>8}")
        for victim in sorted({name for kill in self.done for name in kill.victims}):
            times = [kill.recovery_s for kill in self.done if victim in kill.victims]
            lines.append(f"{victim:12} {len(times):6} {median(times):11.2f} s {max(times):6.2f} s")
        lines += ["", f"{'call':12} {'slowest':>9}  outcomes"]
        for call in sorted({call for call, _ in findings.calls}):
            outcomes = sorted(((n, out) for (c, out), n in findings.calls.items() if c == call), reverse=True)
            said = ", ".join(f"{out} {n}" for n, out in outcomes)
            lines.append(f"{call:12} {findings.slowest_s[call]:7.2f} s  {said}")
        compared = ", ".join(f"{moment} {n}" for moment, n in sorted(findings.compared.items()))
        lines += [
            "",
            f"compared: {compared}; {findings.nbytes / 1e9:.1f} GB, {findings.unequal} unequal",
            f"workers back: {findings.attached_again}, to {findings.found_unchanged} shards as they left them",
            f"log: {self.log.last} entries, {len(self.log.commands)} commands, {len(self.log.groups)} whole outcomes,",
            f"     {len(self.log.roots)} versions, {self.probes} commands acknowledged to the prober",
        ]
        return "\n".join(lines)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


def _processes_of(directory: Path) -> Iterator[str]:
    """Name the living processes that were started for this directory."""
    mark = str(directory.absolute()).encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes() and _is_alive(int(entry.name)):
                yield f"{entry.name} {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()[:100]}"


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--hosts", type=int, default=1, help="that the agents pretend to be on")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds-max", type=float, default=1800.0)
    parser.add_argument("--mib", type=int, default=32, help="of each shard")
    parser.add_argument("--keep", action="store_true", help="keep the hub's directory with its logs")
    args = parser.parse_args()
    seed = int(uuid4()) % 1_000_000 if args.seed is None else args.seed
    directory = Path(tempfile.mkdtemp(prefix="tensorhub-chaos-"))
    run = Run(args.kills, seed, args.mib * MIB, directory, args.seconds_max, args.hosts, verbose=True)
    await run.go()
    print(run.table())
    for message, count in run.findings.messages.most_common(40):
        print(f"  {count:4} × {message}")
    if run.findings.wrongs:
        print(f"\n{len(run.findings.wrongs)} FINDINGS (the logs are in {directory}/logs):")
        for wrong in run.findings.wrongs[:50]:
            print(f"- {wrong}")
        return 1
    print("\nno finding")
    if not args.keep:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
