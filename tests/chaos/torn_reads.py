"""Hunts torn reads: a trainer overwrites as fast as `unpublish` lets it, while readers on both transports fetch.

    python -m tests.chaos.torn_reads --seconds 300 [--mib 64] [--no-drain]

The trainer stands on agent-0, two readers are on its host and two on another one. Half the time it gives its readers
next to no time, so many of its `unpublish` calls break reads in their middle, and overwrites every byte at once. Every
commit is compared with what its version must be, byte for byte. With `--no-drain` the agents lack the drain (a flag of
this script, not of the agent): then readers must meet torn pieces, and still commit none. Exit code 1 and the story of
each finding otherwise.
"""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import uuid4

from tests.chaos.agent_without_drain import TORN
from tests.chaos.content import MIB
from tests.chaos.fleet import Findings, Fleet
from tests.chaos.worker import Config

from tensorhub.local.hub import LocalHub, ServiceCommands

JOB: Final = "torn"
HOSTS: Final = 2
READERS: Final = {"agent-2": "local", "agent-4": "local", "agent-1": "ucxx", "agent-3": "ucxx"}
"""Agent i stands on host i mod 2, and the trainer on agent-0."""

FIRST_S: Final = 60.0
LOOK_S: Final = 0.5
THINK_S_MAX: Final = 0.05
"""A version stands for up to so long before it is taken back: from before the first lease to the last commit."""

HURRY_S: Final = 0.03


@dataclass(slots=True)
class Hunt:
    """One hunt. What was found stands in `findings.wrongs` afterwards."""

    seconds: float
    nbytes: int
    directory: Path
    drains: bool = True
    findings: Findings = field(init=False)
    commits: Counter[str] = field(default_factory=Counter)
    """By transport."""
    versions: int = 0
    torn: int = 0
    """Pieces that a reader has refused for their digest; counted without the drain alone."""

    def __post_init__(self) -> None:
        """Nothing is excused, but that a reader says so of what it found torn."""
        excused = frozenset({"NotPublished", "VersionUnavailable"})
        self.findings = Findings(excused=excused if self.drains else excused | {"IntegrityError"})

    async def go(self) -> None:
        """Let them run for that long."""
        commands = ServiceCommands()
        if not self.drains:
            commands = ServiceCommands(agent=(sys.executable, "-m", "tests.chaos.agent_without_drain"))
        async with LocalHub(
            self.directory, agents=1 + len(READERS), hosts=HOSTS, commands=commands, environment=dict(os.environ)
        ):
            fleet = self._fleet()
            try:
                await fleet.start()
                await self._watch(fleet)
            finally:
                await fleet.end()
        for agent, transport in READERS.items():
            self.commits[transport] += fleet.members[agent].commits
        self.versions = len(fleet.members["trainer"].published)
        logs = (self.directory / "logs").glob("agent-*.log")
        self.torn = sum(log.read_text(errors="replace").count(TORN) for log in logs)
        self._judge()

    def _fleet(self) -> Fleet:
        fleet = Fleet(self.directory, self.findings)
        for name, agent in [("trainer", "agent-0"), *((agent, agent) for agent in READERS)]:
            fleet.add(
                name,
                Config(
                    job=JOB,
                    seed=7,
                    role="trainer" if name == "trainer" else "rollout",
                    replica=name,
                    indexes=(0,),
                    shards=1,
                    nbytes=self.nbytes,
                    agent=agent,
                    think_s_max=THINK_S_MAX,
                    hurry_s=HURRY_S,
                ),
            )
        return fleet

    async def _watch(self, fleet: Fleet) -> None:
        if await fleet.progress(time.monotonic(), FIRST_S) is None and self.drains:
            self.findings.wrong(f"nothing was published and read by all at the beginning:\n{fleet.story(0)}")
            return
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
            late = fleet.late_calls()
            if late:
                self.findings.wrongs += late
                return

    def _judge(self) -> None:
        for transport in sorted(set(READERS.values())):
            if not self.commits[transport] and self.drains:
                self.findings.wrong(f"no read over {transport} has committed anything: this shows nothing")
        if not self.drains and not self.torn:
            self.findings.wrong("without the drain no reader has met a torn piece: this shows nothing")

    def table(self) -> str:
        """Say what happened, for people."""
        found = self.findings
        commits = ", ".join(f"{count} over {transport}" for transport, count in sorted(self.commits.items()))
        calls = ", ".join(
            f"{call} {outcome} {count}"
            for (call, outcome), count in sorted(found.calls.items())
            if call in ("publish", "unpublish", "update")
        )
        slowest = ", ".join(f"{call} {took_s:.2f} s" for call, took_s in sorted(found.slowest_s.items()))
        how = "with the drain" if self.drains else "WITHOUT the drain"
        return (
            f"{self.seconds:.0f} s, {how}: {self.versions} versions,"
            f" {sum(self.commits.values())} commits ({commits})\n"
            f"torn pieces that readers refused: {self.torn if not self.drains else 'not counted'}\n"
            f"compared: {sum(found.compared.values())} times, {found.nbytes / 1e9:.1f} GB, {found.unequal} unequal\n"
            f"calls: {calls}\nslowest: {slowest}"
        )


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--no-drain", action="store_true")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix=f"tensorhub-torn-{str(uuid4())[:4]}"))
    hunt = Hunt(args.seconds, args.mib * MIB, directory, drains=not args.no_drain)
    await hunt.go()
    print(hunt.table())
    if hunt.findings.wrongs:
        print(f"\n{len(hunt.findings.wrongs)} FINDINGS (the logs are in {directory}/logs):")
        for wrong in hunt.findings.wrongs[:50]:
            print(f"- {wrong}")
        return 1
    print("\nno finding")
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
