"""Each process, killed or stopped for ten seconds, before, during and after the bytes, over each transport: a table.

    python -m tests.chaos.matrix [--transports local,ucxx] [--victims nats,planner] [--stop-s 10] [--json FILE] [--docs]

A trainer publishes again and again, and two readers on agents of their own fetch; over ucxx they read from each other
as well. In each cell one process is struck at one moment: *before* the bytes (the trainer's `publish` has begun),
*during* them (in a reader's memory some bytes are of the new version, and some are not), or *after* them (both readers
hold the version). Then a version that is begun after the blow, or after the waking, must be published and read by both
within a bound. Nobody may hold a wrong byte, lose a version or be answered late, and the log must hold one whole
outcome for each command. Exit code 1 and the story of each finding otherwise.
"""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from benchmarks import page
from tests.chaos.content import MIB
from tests.chaos.fleet import LOOK_S, TRAINER, Findings, Fleet
from tests.chaos.memory_marks import Marks
from tests.chaos.two_holders import kill, wake
from tests.chaos.whole_log import read_whole_log
from tests.stopping import stop

from tensorhub._control import hub_file
from tensorhub.local.hub import LocalHub
from tensorhub_common.bus.connection import connect

JOB: Final = "matrix"
SEED: Final = 7
HOSTS: Final = {"local": 1, "ucxx": 3}
READERS: Final = ("reader-1", "reader-2")
AGENTS: Final = {TRAINER: "agent-0", "reader-1": "agent-1", "reader-2": "agent-2"}

VICTIMS: Final = {
    "trainer worker": TRAINER,
    "trainer agent": "agent-0",
    "reader agent": "agent-2",
    "middle agent": "agent-1",
    "registry": "registry",
    "planner": "planner",
    "nats": "nats",
}
MOMENTS: Final = ("before", "during", "after")
BLOWS: Final = ("SIGKILL", "SIGSTOP")

MOMENT_S: Final = 30.0
"""The moment to strike at comes within this."""

PROGRESS_S: Final = 25.0
"""After the blow, or the waking, a version that was begun afterwards has been published and read within this."""

FAULTS: Final = page.DOCS / "faults.md"

FIRST_S: Final = 60.0
THINK_S_MAX: Final = 0.1


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one blow. Times in s; `recovered_s` is None if nothing got on within the bound."""

    transport: str
    victim: str
    blow: str
    moment: str
    recovered_s: float | None
    """From the blow, or the waking, to a version begun afterwards that everybody has read."""
    meanwhile: int
    """How many reads were committed while the victim was stopped."""
    errors: dict[str, int]
    """What callers were told from the blow on, by error."""
    findings: int


@dataclass(slots=True)
class Matrix:
    """All cells of one transport, on one hub."""

    transport: str
    victims: tuple[str, ...]
    directory: Path
    nbytes: int
    stop_s: float
    findings: Findings = field(default_factory=Findings)
    cells: list[Cell] = field(default_factory=list)

    async def go(self) -> None:
        """Play each cell, and read the log at the end."""
        async with AsyncExitStack() as stack:
            up = LocalHub(self.directory, agents=3, hosts=HOSTS[self.transport], environment=dict(os.environ))
            await stack.enter_async_context(up)
            fleet = self._fleet()
            await fleet.start()
            stack.push_async_callback(fleet.end)
            if await fleet.progress(time.monotonic(), FIRST_S) is None:
                self.findings.wrong(f"nothing was published and read at the beginning:\n{fleet.story(0)}")
                return
            for victim, blow, moment in self._all():
                await self._play(fleet, victim, blow, moment)
            await fleet.end()
            async with await connect(up.hub.nats, name="matrix", credentials=up.hub.credentials) as bus:
                verdict = await read_whole_log(bus, JOB, self.directory / "logs" / "job.log")
            self.findings.wrongs += verdict.wrongs

    def _all(self) -> Iterator[tuple[str, str, str]]:
        for victim in self.victims:
            for blow in BLOWS:
                for moment in MOMENTS:
                    yield victim, blow, moment

    def _fleet(self) -> Fleet:
        fleet = Fleet(self.directory, self.findings)
        for name, agent in AGENTS.items():
            fleet.add_single(name, agent, job=JOB, seed=SEED, nbytes=self.nbytes, think_s_max=THINK_S_MAX)
        return fleet

    async def _play(self, fleet: Fleet, victim: str, blow: str, moment: str) -> None:
        before, errors = len(self.findings.wrongs), self.findings.calls.copy()
        if not await self._wait_for(fleet, moment):
            self.findings.wrong(f"{self.transport}: the moment {moment!r} did not come within {MOMENT_S:g} s")
        meanwhile = 0
        if blow == "SIGKILL":
            self._strike(fleet, victim, kill)
            at = time.monotonic()
        else:
            pid = self._strike(fleet, victim, stop)
            reads = fleet.reads()
            await self._watched(fleet, self.stop_s)
            meanwhile = fleet.reads() - reads
            self._wake(fleet, victim, pid)
            at = time.monotonic()
        recovered = await fleet.progress(at, PROGRESS_S)
        if recovered is None:
            self.findings.wrong(f"{self.transport}, {victim}, {blow}, {moment}: nothing got on\n{fleet.story(at)}")
        self.findings.wrongs += fleet.late_calls()
        told = self.findings.calls - errors
        cell = Cell(
            transport=self.transport,
            victim=victim,
            blow=blow,
            moment=moment,
            recovered_s=None if recovered is None else recovered - at,
            meanwhile=meanwhile,
            errors={outcome: count for (_, outcome), count in sorted(told.items()) if outcome != "done"},
            findings=len(self.findings.wrongs) - before,
        )
        self.cells.append(cell)
        print(line_of(cell), flush=True)

    async def _wait_for(self, fleet: Fleet, moment: str) -> bool:
        """Return at the moment to strike at; False if it did not come."""
        came: Callable[[], bool]
        if moment == "before":
            trainer = fleet.members[TRAINER]
            came = lambda: trainer.calls_under_way("publish")  # noqa: E731 (it is named by what it stands for)
        elif moment == "during":
            marks = [Marks.of(self.directory, AGENTS[name]) for name in READERS]
            came = lambda: any(each.are_mixed() for each in marks)  # noqa: E731
        else:
            after = time.monotonic()
            came = lambda: fleet.has_progressed(after)  # noqa: E731
        deadline = time.monotonic() + MOMENT_S
        while not came():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0)
        return True

    async def _watched(self, fleet: Fleet, seconds: float) -> None:
        """Let time pass, and look whether anybody waits for too long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
            self.findings.wrongs += fleet.late_calls()

    def _strike(self, fleet: Fleet, victim: str, blow: Callable[[int], None]) -> int:
        name = VICTIMS[victim]
        member = fleet.members.get(name)
        if member is None:
            pid = self._pid(name)
            blow(pid)
            return pid
        assert member.pid is not None
        pid = member.pid
        if blow is kill:
            member.kill()
        else:
            member.stop()
        return pid

    def _wake(self, fleet: Fleet, victim: str, pid: int) -> None:
        member = fleet.members.get(VICTIMS[victim])
        if member is not None:
            member.wake()
        else:
            wake(pid)

    def _pid(self, name: str) -> int:
        hub = hub_file.read(self.directory)
        assert hub.registry is not None
        assert hub.planner is not None
        pids = {"nats": hub.nats_pid, "registry": hub.registry.pid, "planner": hub.planner.pid}
        pids |= {agent.id: agent.pid for agent in hub.agents}
        return pids[name]


def line_of(cell: Cell) -> str:
    """Say what became of a blow, in one line."""
    recovered = "NOTHING GOT ON" if cell.recovered_s is None else f"recovered in {cell.recovered_s:5.2f} s"
    meanwhile = f", {cell.meanwhile} reads meanwhile" if cell.blow == "SIGSTOP" else ""
    errors = ", ".join(f"{error} {count}" for error, count in cell.errors.items()) or "no error told"
    found = f"  {cell.findings} FINDINGS" if cell.findings else ""
    where = f"{cell.transport:5} {cell.victim:14} {cell.blow} {cell.moment:6}"
    return f"{where} {recovered}{meanwhile}; {errors}{found}"


def table_of(cells: Sequence[Cell]) -> str:
    """Return a table for docs/design/faults.md: a row for each victim and moment, over each transport."""
    found = {(cell.transport, cell.victim, cell.moment, cell.blow): cell for cell in cells}
    rows = []
    for transport, victim, moment in dict.fromkeys(key[:3] for key in found):
        killed, stopped = (found.get((transport, victim, moment, blow)) for blow in BLOWS)
        both = [cell for cell in (killed, stopped) if cell is not None]
        told = sum((Counter(cell.errors) for cell in both), Counter[str]())
        rows.append(
            (
                transport,
                victim,
                moment,
                _recovered(killed),
                _recovered(stopped),
                "" if stopped is None else str(stopped.meanwhile),
                ", ".join(f"{count} {error}" for error, count in sorted(told.items())),
                str(sum(cell.findings for cell in both)),
            )
        )
    head = ("over", "victim", "blow", "killed: s", "woken: s", "reads while stopped", "callers were told", "wrong")
    return page.table(head, rows)


def _recovered(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return "never" if cell.recovered_s is None else f"{cell.recovered_s:.2f}"


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default=",".join(HOSTS))
    parser.add_argument("--victims", default=",".join(VICTIMS), help="separated by commas")
    parser.add_argument("--stop-s", type=float, default=10.0)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true", help="write the table into docs/design/faults.md")
    args = parser.parse_args()
    cells: list[Cell] = []
    wrongs: list[str] = []
    for transport in args.transports.split(","):
        directory = Path(tempfile.mkdtemp(prefix="tensorhub-matrix-"))
        matrix = Matrix(transport, tuple(args.victims.split(",")), directory, args.mib * MIB, args.stop_s)
        await matrix.go()
        found = matrix.findings
        print(f"{transport}: {found.compared_in_all()}; {found.slowest_calls()}")
        cells += matrix.cells
        wrongs += found.wrongs
        if found.wrongs:
            print(f"the logs are in {directory}/logs")
        else:
            shutil.rmtree(directory)
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(cells), indent=1) + b"\n")
    if args.docs:
        page.write("matrix", table_of(cells), FAULTS)
    for wrong in wrongs[:50]:
        print(f"- {wrong}")
    print(f"{len(cells)} cells, " + (f"{len(wrongs)} FINDINGS" if wrongs else "no finding"))
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
