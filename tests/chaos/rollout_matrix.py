"""Each process of a job of rollouts, killed or stopped for ten seconds, at each moment of a response: a table.

    python -m tests.chaos.rollout_matrix [--victims nats,trainer] [--blows SIGKILL] [--moments during] [--stop-s 10]
                                         [--json FILE] [--docs]
    python -m tests.chaos.rollout_matrix --first-token 50

In each cell a trainer in a process of its own submits groups, and one process is struck at one moment: *before* a token
is made (the submission is under way), *during* generation, or *after* it (all responses have ended and were received,
and a half of them is not done). Every response must come, token for token, and none that is done may come again.

`--first-token N` kills a runner N times instead, and measures how long after it others make the next tokens of its
responses.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import numpy as np
from benchmarks import page
from tests.bounds import WAIT_S
from tests.chaos.fleet import Findings
from tests.chaos.rollout_kills import RemoteTrainer, RolloutJob, rollout_job
from tests.chaos.rollout_verdict import SEED, Verdict
from tests.chaos.scenario import arguments, conclude, write_json
from tests.kit import fork_server
from tests.kit.engine_records import Records, delays
from tests.kit.waiting import kill, until, wake
from tests.leftovers import nothing_left
from tests.stopping import stop

import tensorhub
from tensorhub_common.protocol.rollout.payloads import request_seed

VICTIMS: Final = ("leading manager", "standby", "runner", "agent", "nats", "registry", "trainer")
MOMENTS: Final = ("before", "during", "after")
BLOWS: Final[dict[str, Callable[[int], None]]] = {"SIGKILL": kill, "SIGSTOP": stop}

RUNNERS: Final = 3
GROUPS: Final = 8
GROUP_SIZE: Final = 4
TOKENS_MAX: Final = 150
STEP_S: Final = 0.01
NAMES: Final = {"runner": "runner-1", "agent": "agent-1", "nats": "nats", "registry": "registry-0"}
"""Those that are struck; the trainer is at agent-0."""

DURING_TOKENS: Final = 300
"""A blow during generation comes after so many tokens, of thousands."""

RUNNING_MIN: Final = 4
"""A runner that is killed for its first tokens elsewhere makes those of so many requests."""
BUSY_GROUPS: Final = 8
"""So many groups are open all the time meanwhile."""

PAGE: Final = page.DOCS / "rollouts" / "measured.md"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    victim: str
    moment: str
    blow: str
    tokens_again_s: float | None
    """From the blow to the next token of a request, the median over requests: of those alone that ran where the victim
    is, if it is a runner or an agent. None: no token was made after the blow."""
    all_here_s: float
    """From the blow until every response was received and done."""
    again: int
    """Tokens that were made twice."""
    delivered: int
    findings: int

    def __str__(self) -> str:
        again = "" if self.tokens_again_s is None else f"next tokens after {self.tokens_again_s:5.2f} s, "
        found = f"  {self.findings} FINDINGS" if self.findings else ""
        where = f"{self.victim:16} {self.blow:7} {self.moment:6}"
        return f"{where} {again}all in {self.all_here_s:5.2f} s, {self.again} of {self.delivered} tokens twice{found}"


@dataclass
class Matrix:
    directory: Path
    victims: Sequence[str]
    blows: Sequence[str]
    moments: Sequence[str]
    stop_s: float
    findings: Findings = field(default_factory=Findings)
    cells: list[Cell] = field(default_factory=list)
    job: RolloutJob = field(init=False)
    watcher: tensorhub.AsyncRollouts = field(init=False)
    """Asks for the status, and submits nothing."""

    async def play(self) -> None:
        async with rollout_job(
            self.directory, runners=RUNNERS, agents=RUNNERS, tokens_max=TOKENS_MAX, step_s=STEP_S
        ) as self.job:
            self.watcher = await self.job.attach(name="watcher")
            for number, (victim, blow, moment) in enumerate(product(self.victims, self.blows, self.moments)):
                await self.job.until_serving(self.watcher, RUNNERS)
                self.cells.append(await CellRun(self, str(number), victim, blow, moment).go())
                print(self.cells[-1], flush=True)

    async def name_of(self, victim: str) -> str:
        """Return the process that is meant."""
        if victim in NAMES:
            return NAMES[victim]
        leader = await self.job.leader(self.watcher)
        (standby,) = {"rollout-0", "rollout-1"} - {leader}
        return leader if victim == "leading manager" else standby


class CellRun:
    """One cell, with a consumer of its own."""

    def __init__(self, matrix: Matrix, name: str, victim: str, blow: str, moment: str) -> None:
        self._matrix, self._job = matrix, matrix.job
        self._victim, self._blow, self._moment = victim, blow, moment
        self._verdict = self._job.verdict = Verdict(TOKENS_MAX)
        self._trainer = RemoteTrainer(self._job, name=f"cell-{name}", group_size=GROUP_SIZE)
        self._groups = [f"{name}.{index}" for index in range(GROUPS)]
        seeds = [request_seed(SEED, group, index) for group in self._groups for index in range(GROUP_SIZE)]
        self._seeds = np.array(seeds, np.uint64)
        self._has_submitted, self._is_received, self._was_struck = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def go(self) -> Cell:
        async with AsyncExitStack() as stack:
            await self._trainer.start()
            stack.push_async_callback(self._trainer.close)
            working = asyncio.create_task(self._work())
            await self._wait_for_moment(working)
            # Once it was started again it is another process.
            pid = self._job.hub.pid(NAMES["runner"]) if self._victim in {"runner", "agent"} else None
            at = await self._strike(stack)
            if (self._victim, self._blow) == ("trainer", "SIGKILL"):
                await _ended(working)
                await self._trainer.replace()
                await self._trainer.submit(self._groups)
                await self._trainer.take_all()
            else:
                await working
            all_here_s = time.monotonic() - at
            # Nothing is left for the next one.
            await self._trainer.attach()
            assert await self._trainer.take() is None
        return self._judged(at, pid, all_here_s)

    async def _work(self) -> None:
        """Submit, take and acknowledge; where the blow comes after generation, a half of it after the blow."""
        await self._trainer.submit(self._groups)
        self._has_submitted.set()
        if self._moment == "after":
            await self._trainer.take(len(self._seeds) // 2)
            await self._trainer.done()
            while self._verdict.missing:
                await self._trainer.take()
            self._is_received.set()
            await self._was_struck.wait()
            await self._trainer.done()
        await self._trainer.take_all()

    async def _wait_for_moment(self, working: asyncio.Task[None]) -> None:
        """Wait until the process is to be struck. Before generation the order to submit is on its way."""

        def has_tokens() -> bool:
            if working.done():
                working.result()
            return len(self._made()) >= DURING_TOKENS

        match self._moment:
            case "before":
                await asyncio.sleep(0)
            case "during":
                await until(has_tokens, "tokens are made")
            case "after":
                await asyncio.wait(
                    {asyncio.create_task(self._is_received.wait()), working}, return_when="FIRST_COMPLETED"
                )
                assert self._is_received.is_set(), working.exception()

    async def _strike(self, stack: AsyncExitStack) -> float:
        """Strike, and have what was stopped wake after a while; return when it was struck."""
        hub = self._job.hub
        name = "" if self._victim == "trainer" else await self._matrix.name_of(self._victim)
        pid = hub.pid(name) if name else self._trainer.pid
        at = time.monotonic()
        BLOWS[self._blow](pid)
        self._was_struck.set()
        if self._blow == "SIGSTOP":
            waking = asyncio.create_task(_wake_after(pid, self._matrix.stop_s))
            stack.push_async_callback(asyncio.gather, waking)
        elif name and name != NAMES["nats"]:
            # The next cell finds the hub whole.
            stack.push_async_callback(hub.until_back, name, pid)
        return at

    def _made(self) -> Records:
        """Return what engines made of this cell's requests, and began."""
        records = self._job.records()
        return records[np.isin(records["seed"], self._seeds)]

    def _judged(self, at: float, pid: int | None, all_here_s: float) -> Cell:
        records, verdict = self._made(), self._verdict
        made = verdict.check_records(records)
        verdict.wrongs += [f"{key} never came" for key in verdict.missing]
        name = f"{self._victim}, {self._blow}, {self._moment}"
        for wrong in verdict.wrongs:
            self._matrix.findings.wrong(f"{name}: {wrong}")
        is_met = pid is not None and np.any((records["pid"] == pid) & (records["at"] <= at))
        next_s = delays(records, at, pid if is_met else None)
        return Cell(
            victim=self._victim,
            moment=self._moment,
            blow=self._blow,
            tokens_again_s=median(next_s) if next_s else None,
            all_here_s=all_here_s,
            again=made.again,
            delivered=made.delivered,
            findings=len(verdict.wrongs),
        )


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _wake_after(pid: int, seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    finally:
        wake(pid)


# ---------------------------------------------------------------------------------------------------- first token


@dataclass
class FirstTokens:
    """Runners killed without a notice, one after the other, while they make tokens."""

    directory: Path
    kills: int
    findings: Findings = field(default_factory=Findings)
    medians_s: list[float] = field(default_factory=list)
    """Of each kill, over the requests that ran there."""
    all_s: list[float] = field(default_factory=list)
    """Of each request."""

    async def play(self) -> None:
        async with rollout_job(self.directory, runners=RUNNERS, agents=RUNNERS, step_s=STEP_S) as job:
            rollouts = await job.attach()
            taking = asyncio.create_task(self._keep_busy(job, rollouts))
            try:
                for number in range(self.kills):
                    name = f"runner-{number % RUNNERS}"
                    await job.until_serving(rollouts, RUNNERS)
                    await job.until_tokens_at(rollouts, name, RUNNING_MIN)
                    pid, at = job.hub.pid(name), time.monotonic()
                    job.hub.kill(name)
                    await job.hub.until_back(name, pid)
                    found = delays(job.records(), at, pid, elsewhere=True)
                    self.medians_s.append(median(found))
                    self.all_s += found
                    print(f"{name}: {len(found)} requests, next tokens after {median(found):.2f} s", flush=True)
                    if taking.done():
                        taking.result()
            finally:
                self._is_over = True
                await taking
            job.verdict.check_records(job.records())
            self.findings.wrongs += job.wrongs + [f"{key} never came" for key in job.missing]

    _is_over: bool = False

    async def _keep_busy(self, job: RolloutJob, rollouts: tensorhub.AsyncRollouts) -> None:
        """Submit as much as comes, until it is over; then take the rest."""
        await job.submit(rollouts, BUSY_GROUPS)
        async for batch in rollouts.batches(GROUP_SIZE, wait_s=WAIT_S):
            groups = len({each.group for each in batch.responses})
            await job.take(batch)
            if not self._is_over:
                await job.submit(rollouts, groups)

    def __str__(self) -> str:
        each = np.array(self.all_s)
        p50, p90 = np.quantile(self.medians_s, (0.5, 0.9))
        return (
            f"{len(self.medians_s)} kills, {len(each)} requests: next token elsewhere after p50 {p50:.2f} s, "
            f"p90 {p90:.2f} s (of each kill's median); over all requests p50 {np.quantile(each, 0.5):.2f} s, "
            f"p99 {np.quantile(each, 0.99):.2f} s, max {each.max():.2f} s"
        )


# ---------------------------------------------------------------------------------------------------- the table


def table_of(cells: Sequence[Cell]) -> str:
    found = {(cell.victim, cell.moment, cell.blow): cell for cell in cells}
    rows = []
    for victim, moment in dict.fromkeys(key[:2] for key in found):
        of_blows = [found.get((victim, moment, blow)) for blow in BLOWS]
        times = [text for cell in of_blows for text in _times_of(cell)]
        both = [cell for cell in of_blows if cell is not None]
        again = sum(cell.again for cell in both) / max(1, sum(cell.delivered for cell in both))
        rows.append((victim, moment, *times, f"{again:.1%}", str(sum(cell.findings for cell in both))))
    head = ("victim", "blow", "killed: next token, s", "all done, s", "stopped: next token, s", "all done, s")
    return page.table((*head, "made twice", "wrong"), rows)


def _times_of(cell: Cell | None) -> tuple[str, str]:
    if cell is None:
        return "", ""
    return "" if cell.tokens_again_s is None else f"{cell.tokens_again_s:.2f}", f"{cell.all_here_s:.2f}"


async def main() -> int:
    args = arguments(
        __doc__,
        victims=",".join(VICTIMS),
        blows=",".join(BLOWS),
        moments=",".join(MOMENTS),
        stop_s=10.0,
        first_token=0,
        json="",
        docs=False,
        keep=False,
    )
    directory = Path(tempfile.mkdtemp(prefix="tensorhub-rollout-matrix-"))
    if args.first_token:
        first_tokens = FirstTokens(directory, args.first_token)
        with nothing_left(directory), closing(fork_server):
            await first_tokens.play()
        print(first_tokens)
        if args.docs:
            page.write("first-token", str(first_tokens), PAGE)
        return conclude(first_tokens.findings, directory, keep=args.keep)
    matrix = Matrix(directory, args.victims.split(","), args.blows.split(","), args.moments.split(","), args.stop_s)
    with nothing_left(directory), closing(fork_server):
        await matrix.play()
    print(table_of(matrix.cells))
    write_json(args.json, matrix.cells)
    if args.docs:
        page.write("rollout-matrix", table_of(matrix.cells), PAGE)
    print(f"{len(matrix.cells)} cells")
    return conclude(matrix.findings, directory, keep=args.keep)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
