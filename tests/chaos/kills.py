"""Kills real processes at random moments of a running job, and counts what became of everything.

    python -m tests.chaos.kills --kills 200 [--hosts 2] [--seed S] [--seconds-max 900]

Victims are NATS, the registry, the planner, agents and workers: one, two at once, two in a row, or the whole hub.
After each kill the work must go on within a bound. At the end neither memory nor a process is left behind.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from tests.chaos.content import MIB
from tests.chaos.scenario import Scenario, arguments, conclude
from tests.chaos.worker import Config
from tests.kit import fork_server
from tests.kit.waiting import is_alive, kill
from tests.leftovers import nothing_left

AGENTS: Final = 4
SHARDS: Final = 2
CALM_S_MAX: Final = 0.4
PAIR: Final = 2
PAIR_SHARE: Final = 0.15
AGAIN_SHARE: Final = 0.15
AGAIN_S_MAX: Final = 1.0
ALL_SHARE: Final = 0.02
"""So often all processes of the hub are killed at once, as when a machine loses its power and none of its memory."""


@dataclass(slots=True)
class Kill:
    """One kill. A victim may be there twice; recovery counts from the last blow."""

    victims: tuple[str, ...]
    recovery_s: float


@dataclass(kw_only=True)
class Run(Scenario):
    kills: int
    seconds_max: float
    hosts: int = 1
    """Agent i pretends to be on host i mod hosts; between two of them bytes go over ucxx."""
    verbose: bool = False
    done: list[Kill] = field(default_factory=list)
    took_s: float = 0.0
    chance: random.Random = field(init=False)

    progress_s = 20.0

    def workers(self) -> Iterator[tuple[str, Config]]:
        for name, replica, indexes, agent in (
            ("trainer", "trainer", (0, 1), "agent-0"),
            ("rollout-a", "rollout-a", (0, 1), "agent-1"),
            ("rollout-b0", "rollout-b", (0,), "agent-2"),
            ("rollout-b1", "rollout-b", (1,), "agent-3"),
        ):
            yield name, self.config(replica, agent, indexes=indexes, shards=SHARDS)

    async def go(self) -> None:
        began = time.monotonic()
        await self.play(agents=AGENTS, hosts=self.hosts, TENSORHUB_LOG_FORMAT="console")
        self.took_s = time.monotonic() - began

    async def script(self) -> None:
        began, self.chance = time.monotonic(), random.Random(self.seed)
        for number in range(1, self.kills + 1):
            await asyncio.sleep(self.chance.uniform(0, CALM_S_MAX))
            if time.monotonic() - began > self.seconds_max:
                self.findings.wrong(f"only {number - 1} of {self.kills} kills in {self.seconds_max:g} s")
                return
            victims = await self._kill_some()
            at = time.monotonic()
            recovered = await self.progress(at, f"kill {number} ({' and '.join(victims)})")
            if recovered is None:
                return
            self.done.append(Kill(victims, recovered))
            if self.verbose:
                named = " + ".join(victims) if len(victims) <= PAIR else "the whole hub"
                print(f"kill {number:3} at {at:9.2f}: {named:26} recovered in {recovered:5.2f} s", flush=True)

    async def _kill_some(self) -> tuple[str, ...]:
        """Kill one; now and then two at once, a second one while the first comes back, or the whole hub."""
        how = self.chance.random()
        if how < ALL_SHARE:
            return self._kill(sorted(self.hub.file.pids))
        victims = self._choose(PAIR if how < PAIR_SHARE else 1)
        if PAIR_SHARE <= how < PAIR_SHARE + AGAIN_SHARE:
            await asyncio.sleep(self.chance.uniform(0, AGAIN_S_MAX))
            victims += self._choose(1)
        return victims

    def _choose(self, count: int) -> tuple[str, ...]:
        alive = sorted(name for name, pid in self.pids().items() if is_alive(pid))
        return self._kill(self.chance.sample(alive, count))

    def _kill(self, victims: list[str]) -> tuple[str, ...]:
        for victim in victims:
            self.strike(victim, kill)
        return tuple(victims)

    def table(self) -> str:
        findings = self.findings
        several = sum(len(each.victims) > 1 for each in self.done)
        where = "one host" if self.hosts == 1 else f"{self.hosts} hosts"
        total = f"{len(self.done)} kills, {several} of several victims, on {where} in {self.took_s:.0f} s"
        lines = [f"seed {self.seed}: {total}", "", f"{'victim':12} {'kills':>6} {'recovery p50':>13} {'max':>8}"]
        for victim in sorted({name for each in self.done for name in each.victims}):
            times = [each.recovery_s for each in self.done if victim in each.victims]
            lines.append(f"{victim:12} {len(times):6} {median(times):11.2f} s {max(times):6.2f} s")
        lines += [
            "",
            f"calls: {dict(findings.calls)}; {findings.slowest_calls()}",
            f"compared: {dict(findings.compared)}; {findings.compared_in_all()}",
            f"workers back: {findings.attached_again}, to {findings.found_unchanged} shards as they left them",
            f"log: {self.log.last} entries, {len(self.log.commands)} commands, {len(self.log.groups)} whole outcomes,",
            f"     {len(self.log.roots)} versions, {self.probes} commands acknowledged to the prober",
        ]
        return "\n".join(lines)


async def main() -> int:
    seed = random.randrange(1_000_000)
    args = arguments(__doc__, kills=200, hosts=1, seed=seed, seconds_max=1800.0, mib=32, keep=False)
    run = Run(
        directory=Path(tempfile.mkdtemp(prefix="tensorhub-chaos-")),
        nbytes=args.mib * MIB,
        seed=args.seed,
        kills=args.kills,
        seconds_max=args.seconds_max,
        hosts=args.hosts,
        verbose=True,
    )
    with nothing_left(run.directory), closing(fork_server):
        await run.go()
    print(run.table())
    return conclude(run.findings, run.directory, keep=args.keep)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
