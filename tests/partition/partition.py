"""Cuts the network between two hosts in the middle of transfers, heals it, and looks at what every worker got.

    python -m tests.partition.partition [--seeds 3] [--seed S] [--mib 64]

Here are NATS, the registry, the planner, a trainer and a rollout replica with an agent each; there, in another network
namespace, an agent and a rollout replica. Cut is the link for bytes alone, or both links, for so short that no agent is
taken for lost, or for so long that the far one is. Shown for each cut: every byte of every commit is right, every call
is answered within its bound, the near replica goes on while the far one is away, and after the healing all go on.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Final
from unittest import mock

from tests.chaos.content import MIB
from tests.chaos.scenario import Scenario, conclude
from tests.chaos.worker import TRAINER, Config
from tests.kit import fork_server
from tests.partition.namespaces import LINKS, Net, enter, why_not

from tensorhub.local import nats_server

NEAR: Final = "rollout-near"
FAR: Final = "rollout-far"
LINKS_CUT: Final = (("bytes",), ("bytes", "messages"))
CUT_S: Final = (2.0, 15.0)
"""Shorter and longer than the silence after which an agent is lost."""

CALM_S_MAX: Final = 1.0
GOES_ON_S: Final = 10.0
"""A cut longer than this must see the near replica read on: no bound that a far reader can hold it up by is longer."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut and what was seen: how many versions each replica read meanwhile, and how long all took to go on."""

    links: tuple[str, ...]
    seconds: float
    near: int
    far: int
    recovery_s: float


@dataclass(kw_only=True)
class Run(Scenario):
    """All cuts with one seed, in one hub. Call `go` in a process that may stay in the namespace."""

    net: Net
    cut_s: tuple[float, ...]
    done: list[Cut] = field(default_factory=list)

    progress_s = 30.0

    def workers(self) -> Iterator[tuple[str, Config]]:
        there = self.net.names[1]
        for name, agent, netns in ((TRAINER, "agent-0", ""), (NEAR, "agent-2", ""), (FAR, "agent-1", there)):
            yield name, self.config(name, agent, netns=netns)

    async def go(self) -> None:
        """Do all of it."""
        here, there = self.net.names
        enter(here)
        with mock.patch.object(nats_server, "LISTEN", LINKS["messages"].address(0)):
            await self.play(agents=3, hosts=2, agent="two-namespaces", FAR_NAMESPACE=there)

    async def script(self) -> None:
        """Cut, wait, heal, and wait for progress."""
        chance, cuts = random.Random(self.seed), list(product(LINKS_CUT, self.cut_s))
        for links, seconds in chance.sample(cuts, len(cuts)):
            await asyncio.sleep(chance.uniform(0, CALM_S_MAX))
            cut = f"{' and '.join(links)} cut for {seconds:g} s"
            readers = [self.fleet.members[name] for name in (NEAR, FAR)]
            before = [reader.commits for reader in readers]
            self.net.cut(links)
            try:
                await self.watched(asyncio.sleep(seconds))
            finally:
                self.net.heal(links)
            near, far = (reader.commits - count for reader, count in zip(readers, before, strict=True))
            recovered = await self.progress(time.monotonic(), cut)
            if recovered is None:
                return
            if seconds > GOES_ON_S and not near:
                self.findings.wrong(f"{cut}: the near replica read nothing meanwhile")
            self.done.append(Cut(links, seconds, near, far, recovered))

    def table(self) -> str:
        """Summarise the run."""
        head = f"  {'cut':18} {'for':>6} {'near read':>10} {'far read':>9} {'all on after':>13}"
        lines = [f"seed {self.seed}:", head]
        for cut in self.done:
            what = f"  {' + '.join(cut.links):18} {cut.seconds:4.0f} s"
            lines.append(f"{what} {cut.near:10} {cut.far:9} {cut.recovery_s:11.2f} s")
        return "\n".join([*lines, f"  {self.findings.compared_in_all()}", f"  {self.findings.slowest_calls()}"])


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
    code = 0
    for seed in range(first, first + args.seeds):
        directory = Path(tempfile.mkdtemp(prefix="tensorhub-partition-"))
        with Net() as net:
            run = Run(directory=directory, nbytes=args.mib * MIB, seed=seed, net=net, cut_s=tuple(args.seconds))
            asyncio.run(run.go())
            # It stays in the namespace that this process was in when it began.
            fork_server.close()
        print(f"{run.table()}\n  logs: {directory}/logs", flush=True)
        code |= conclude(run.findings, directory, keep=args.keep)
    return code


if __name__ == "__main__":
    sys.exit(main())
