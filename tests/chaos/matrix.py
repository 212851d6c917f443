"""Each process, killed or stopped for ten seconds, before, during and after the bytes, over each transport: a table.

    python -m tests.chaos.matrix [--transports local,ucxx] [--victims nats,planner] [--stop-s 10] [--json FILE] [--docs]

A trainer publishes again and again, and two readers on agents of their own fetch. In each cell one process is struck
at one moment: *before* the bytes (the trainer's `publish` has begun), *during* them (in a reader's memory some are of
the new version), or *after* them. Then a version begun after the blow, or the waking, must be published and read.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Final

from benchmarks import page
from tests.chaos.content import MIB
from tests.chaos.memory_marks import Marks
from tests.chaos.scenario import Scenario, Struck, arguments, conclude, trainer_and_readers, write_json
from tests.chaos.worker import TRAINER, Config
from tests.kit.waiting import kill
from tests.stopping import stop

HOSTS: Final = {"local": 1, "ucxx": 3}
AGENTS: Final = ("agent-0", "agent-1", "agent-2")
VICTIMS: Final = {
    "trainer worker": TRAINER,
    "trainer agent": "agent-0",
    "reader agent": "agent-2",
    "middle agent": "agent-1",
    "registry": "registry-0",
    "planner": "planner-0",
    "nats": "nats",
}
MOMENTS: Final = ("before", "during", "after")
BLOWS: Final = {"SIGKILL": kill, "SIGSTOP": stop}

MOMENT_S: Final = 30.0
"""The moment to strike at comes within this."""

FAULTS: Final = page.DOCS / "faults.md"


@dataclass(kw_only=True)
class Matrix(Scenario):
    transport: str
    victims: tuple[str, ...]
    stop_s: float
    cells: list[Struck] = field(default_factory=list)

    def workers(self) -> list[tuple[str, Config]]:
        return trainer_and_readers(self, AGENTS, think_s_max=0.1)

    async def script(self) -> None:
        for victim, blow, moment in product(self.victims, BLOWS, MOMENTS):
            told = self.telling(transport=self.transport, victim=victim, blow=blow, moment=moment)
            if not await self._wait_for(moment):
                self.findings.wrong(f"{self.transport}: the moment {moment!r} did not come within {MOMENT_S:g} s")
            at, meanwhile = await self.struck([VICTIMS[victim]], BLOWS[blow], self.stop_s)
            recovered = await self.progress(at, f"{self.transport}, {victim}, {blow}, {moment}")
            self.cells.append(told(recovered, meanwhile))
            print(self.cells[-1], flush=True)

    async def _wait_for(self, moment: str) -> bool:
        after = time.monotonic()
        marks = [Marks.of(self.directory, agent) for agent in AGENTS[1:]]
        came: Callable[[], bool] = {
            "before": lambda: self.fleet.members[TRAINER].is_calling("publish"),
            "during": lambda: any(each.are_mixed() for each in marks),
            "after": lambda: self.fleet.has_progressed(after),
        }[moment]
        while not came():
            if time.monotonic() > after + MOMENT_S:
                return False
            await asyncio.sleep(0)
        return True


def table_of(cells: Sequence[Struck]) -> str:
    found = {(cell.transport, cell.victim, cell.moment, cell.blow): cell for cell in cells}
    rows = []
    for transport, victim, moment in dict.fromkeys(key[:3] for key in found):
        killed, stopped = (found.get((transport, victim, moment, blow)) for blow in BLOWS)
        both = [cell for cell in (killed, stopped) if cell is not None]
        errors = sum((Counter(cell.errors) for cell in both), Counter[str]())
        rows.append(
            (
                transport,
                victim,
                moment,
                _recovered(killed),
                _recovered(stopped),
                "" if stopped is None else str(stopped.meanwhile),
                ", ".join(f"{count} {error}" for error, count in sorted(errors.items())),
                str(sum(cell.findings for cell in both)),
            )
        )
    head = ("over", "victim", "blow", "killed: s", "woken: s", "reads while stopped", "callers were told", "wrong")
    return page.table(head, rows)


def _recovered(cell: Struck | None) -> str:
    if cell is None:
        return ""
    return "never" if cell.recovered_s is None else f"{cell.recovered_s:.2f}"


async def main() -> int:
    args = arguments(
        __doc__, transports=",".join(HOSTS), victims=",".join(VICTIMS), stop_s=10.0, mib=64, json="", docs=False
    )
    cells: list[Struck] = []
    code = 0
    for transport in args.transports.split(","):
        matrix = Matrix(
            directory=Path(tempfile.mkdtemp(prefix="tensorhub-matrix-")),
            nbytes=args.mib * MIB,
            transport=transport,
            victims=tuple(args.victims.split(",")),
            stop_s=args.stop_s,
        )
        await matrix.play(agents=len(AGENTS), hosts=HOSTS[transport])
        print(f"{transport}: {matrix.findings.compared_in_all()}; {matrix.findings.slowest_calls()}")
        cells += matrix.cells
        code |= conclude(matrix.findings, matrix.directory)
    write_json(args.json, cells)
    if args.docs:
        page.write("matrix", table_of(cells), FAULTS)
    print(f"{len(cells)} cells")
    return code


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
