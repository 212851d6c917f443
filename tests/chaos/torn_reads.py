"""Hunts torn reads: a trainer overwrites as fast as `unpublish` lets it, while readers on both transports fetch.

    python -m tests.chaos.torn_reads --seconds 300 [--mib 64] [--no-drain]

Half the time the trainer gives its readers next to no time, so `unpublish` breaks reads in their middle, and overwrites
every byte at once. Every commit is compared byte for byte. With `--no-drain` the agents lack the drain: then readers
must meet torn pieces, and still commit none.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.chaos.content import MIB
from tests.chaos.scenario import Scenario, arguments, conclude, trainer_and_readers
from tests.chaos.worker import Config
from tests.kit.agents import TORN

READERS: Final = {"agent-2": "local", "agent-4": "local", "agent-1": "ucxx", "agent-3": "ucxx"}
"""Agent i is on host i mod 2, and the trainer on agent-0."""

THINK_S_MAX: Final = 0.05
"""A version stays for up to so long before it is taken back: from before the first lease to the last commit."""

HURRY_S: Final = 0.03
ONLY_DUE: Final = frozenset({"NotPublished", "VersionUnavailable"})


@dataclass(kw_only=True)
class Hunt(Scenario):
    """One hunt. Nothing is excused, but that a reader without the drain reports what it found torn."""

    seconds: float
    drains: bool = True
    commits: Counter[str] = field(default_factory=Counter)
    """By transport."""
    versions: int = 0
    torn: int = 0
    """Pieces that a reader has refused for their digest; counted without the drain alone."""

    reads_log = False

    def __post_init__(self) -> None:
        self.findings.excused = ONLY_DUE if self.drains else ONLY_DUE | {"IntegrityError"}
        self.must_begin = self.drains

    def workers(self) -> list[tuple[str, Config]]:
        return trainer_and_readers(self, ("agent-0", *READERS), think_s_max=THINK_S_MAX, hurry_s=HURRY_S)

    async def go(self) -> None:
        await self.play(agents=1 + len(READERS), hosts=2, agent="" if self.drains else "without-drain")
        for member in self.fleet.readers:
            self.commits[READERS[member.config.agent]] += member.commits
        self.versions = len(self.fleet.members["trainer"].published)
        self.torn = sum(self.hub.log(agent).count(TORN) for agent in ("agent-0", *READERS))
        for transport in sorted(set(READERS.values())):
            if not self.commits[transport] and self.drains:
                self.findings.wrong(f"no read over {transport} has committed anything: this shows nothing")
        if not self.drains and not self.torn:
            self.findings.wrong("without the drain no reader has met a torn piece: this shows nothing")

    async def script(self) -> None:
        await self.watched(asyncio.sleep(self.seconds))

    def table(self) -> str:
        commits = ", ".join(f"{count} over {transport}" for transport, count in sorted(self.commits.items()))
        how = "with the drain" if self.drains else "WITHOUT the drain"
        return (
            f"{self.seconds:.0f} s, {how}: {self.versions} versions, {self.commits.total()} commits ({commits})\n"
            f"torn pieces that readers refused: {self.torn if not self.drains else 'not counted'}\n"
            f"{self.findings.compared_in_all()}\ncalls: {dict(self.findings.calls)}\n{self.findings.slowest_calls()}"
        )


async def main() -> int:
    args = arguments(__doc__, seconds=300.0, mib=64, no_drain=False)
    directory = Path(tempfile.mkdtemp(prefix="tensorhub-torn-"))
    hunt = Hunt(directory=directory, nbytes=args.mib * MIB, seconds=args.seconds, drains=not args.no_drain)
    await hunt.go()
    print(hunt.table())
    return conclude(hunt.findings, directory)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
