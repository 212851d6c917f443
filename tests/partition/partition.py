"""Cuts the network between two hosts in the middle of transfers, heals it, and looks at what everybody got.

    python -m tests.partition.partition [--seeds 3] [--seed S] [--mib 64]

Here are NATS, the registry, the planner, a trainer and a rollout replica with an agent each; there, in another network
namespace, an agent and a rollout replica. Cut is the link for bytes alone, or both links, for so short that nobody is
taken for lost, or for so long that the far agent is. Shown for each cut: every byte of every commit is right, every
call is answered within its bound, the near replica goes on while the far one is away, and after the healing all go on.
"""

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from unittest import mock

from tests.chaos.content import MIB
from tests.chaos.fleet import TRAINER, Findings, Fleet
from tests.partition.namespaces import LINKS, Net, enter, why_not

from tensorhub.local import nats_server
from tensorhub.local.hub import LocalHub, ServiceCommands

JOB: Final = "partition"
NEAR: Final = "rollout-near"
FAR: Final = "rollout-far"
LINKS_CUT: Final = (("bytes",), ("bytes", "messages"))
CUT_S: Final = (2.0, 15.0)
"""Shorter and longer than the silence after which an agent is lost."""

CUTS: Final = tuple((links, seconds) for links in LINKS_CUT for seconds in CUT_S)
Cuts = tuple[tuple[tuple[str, ...], float], ...]

CALM_S_MAX: Final = 1.0
FIRST_PROGRESS_S: Final = 60.0
PROGRESS_S: Final = 30.0
"""After the healing a version begun afterwards must have been read by everybody within this."""

GOES_ON_S: Final = 10.0
"""A cut longer than this must see the near replica read on: no bound that a far reader can hold it up by is longer."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut and what was seen."""

    links: tuple[str, ...]
    seconds: float
    near: int
    """So many versions the near replica read during the cut,"""
    far: int
    """... and so many the far one."""
    recovery_s: float
    """From the healing to a version that everybody has read."""


@dataclass(slots=True)
class Run:
    """All cuts with one seed, in one hub. Call `go` in a process that may stay in the namespace."""

    seed: int
    nbytes: int
    directory: Path
    cuts: Cuts = CUTS
    findings: Findings = field(default_factory=Findings)
    done: list[Cut] = field(default_factory=list)

    async def go(self, net: Net) -> None:
        """Do all of it. What was found stands in `findings.wrongs` afterwards."""
        here, there = net.names
        enter(here)
        commands = ServiceCommands(agent=(sys.executable, "-m", "tests.partition.agent_there"))
        environment = {**os.environ, "PARTITION_THERE": there}
        with mock.patch.object(nats_server, "LISTEN", LINKS["messages"].address(0)):
            async with LocalHub(self.directory, agents=3, hosts=2, commands=commands, environment=environment):
                fleet = self._fleet(there)
                try:
                    await fleet.start()
                    await self._cut_all(net, fleet)
                finally:
                    await fleet.end()

    def _fleet(self, there: str) -> Fleet:
        fleet = Fleet(self.directory, self.findings)
        for name, agent, netns in ((TRAINER, "agent-0", ""), (NEAR, "agent-2", ""), (FAR, "agent-1", there)):
            fleet.add_single(name, agent, job=JOB, seed=self.seed, nbytes=self.nbytes, netns=netns)
        return fleet

    async def _cut_all(self, net: Net, fleet: Fleet) -> None:
        chance = random.Random(self.seed)
        if await fleet.progress(time.monotonic(), FIRST_PROGRESS_S) is None:
            self.findings.wrong(f"nothing was published and read before the first cut:\n{fleet.story(0)}")
            return
        for links, seconds in chance.sample(self.cuts, len(self.cuts)):
            await asyncio.sleep(chance.uniform(0, CALM_S_MAX))
            if not await self._cut(net, fleet, links, seconds):
                return

    async def _cut(self, net: Net, fleet: Fleet, links: tuple[str, ...], seconds: float) -> bool:
        """Cut, wait, heal, and wait for progress; tell whether the run can go on."""
        said = f"{' and '.join(links)} cut for {seconds:g} s"
        read = {name: fleet.members[name].commits for name in (NEAR, FAR)}
        net.cut(links)
        try:
            if not await self._watch(fleet, asyncio.create_task(asyncio.sleep(seconds)), said):
                return False
        finally:
            net.heal(links)
        at = time.monotonic()
        near, far = (fleet.members[name].commits - read[name] for name in (NEAR, FAR))
        waiting = asyncio.create_task(fleet.progress(at, PROGRESS_S))
        if not await self._watch(fleet, waiting, said):
            return False
        if waiting.result() is None:
            self.findings.wrong(f"{said}: no progress within {PROGRESS_S:g} s of the healing\n{fleet.story(at)}")
            return False
        if seconds > GOES_ON_S and not near:
            self.findings.wrong(f"{said}: the near replica read nothing meanwhile")
        self.done.append(Cut(links, seconds, near, far, time.monotonic() - at))
        return True

    async def _watch(self, fleet: Fleet, waiting: "asyncio.Task[object]", said: str) -> bool:
        """Wait, and tell whether every call is answered in time meanwhile."""
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=1.0)
            if late := fleet.late_calls():
                self.findings.wrongs += [f"{said}: {each}" for each in late]
                waiting.cancel()
                return False
        return True

    def table(self) -> str:
        """Say what happened, for people."""
        findings = self.findings
        head = f"  {'cut':18} {'for':>6} {'near read':>10} {'far read':>9} {'all on after':>13}"
        lines = [f"seed {self.seed}:", head]
        for cut in self.done:
            what = f"  {' + '.join(cut.links):18} {cut.seconds:4.0f} s"
            lines.append(f"{what} {cut.near:10} {cut.far:9} {cut.recovery_s:11.2f} s")
        lines += [f"  {findings.compared_in_all()}", f"  {findings.slowest_calls()}"]
        return "\n".join(lines)


def play(seed: int, nbytes: int, directory: Path, cuts: Cuts) -> Run:
    """Make the namespaces, run, and remove them. For a process of its own, which stays in a namespace."""
    run = Run(seed, nbytes, directory, cuts)
    with Net() as net:
        asyncio.run(run.go(net))
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=None, help="the first one")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--keep", action="store_true", help="keep the hubs' directories with their logs")
    parser.add_argument("--seconds", type=float, nargs="+", default=CUT_S)
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no partition can be played: {reason}")
    first = random.randrange(1_000_000) if args.seed is None else args.seed
    cuts = tuple((links, seconds) for links in LINKS_CUT for seconds in args.seconds)
    wrongs = 0
    for seed in range(first, first + args.seeds):
        directory = Path(tempfile.mkdtemp(prefix="tensorhub-partition-"))
        run = play(seed, args.mib * MIB, directory, cuts)
        print(f"{run.table()}\n  logs: {directory}/logs", flush=True)
        for message, count in run.findings.messages.most_common(20):
            print(f"    {count:4} × {message}")
        for wrong in run.findings.wrongs:
            print(f"  - {wrong}")
        wrongs += len(run.findings.wrongs)
        if not run.findings.wrongs and not args.keep:
            with contextlib.suppress(OSError):
                shutil.rmtree(directory)
    print(f"\n{wrongs} findings" if wrongs else "\nno finding")
    return bool(wrongs)


if __name__ == "__main__":
    sys.exit(main())
