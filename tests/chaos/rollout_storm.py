"""Many kills in one job of rollouts, which publishes and trains meanwhile: what came, twice, lost, stale, and how long.

    python -m tests.chaos.rollout_storm [--kills 200] [--every-s 1.0] [--seed 1] [--json FILE] [--docs]

Runners, managers, an agent and NATS are killed at random moments. Engines draw each response's length anew for each
attempt (`tests.chaos.rollout_lengths`), so that failures which favour short responses show in the distribution.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from benchmarks import page
from tests.bounds import WAIT_S
from tests.chaos.fleet import Findings
from tests.chaos.rollout_kills import RolloutJob, rollout_job
from tests.chaos.rollout_lengths import LengthVerdict, against_geometric
from tests.chaos.rollout_matrix import PAGE
from tests.chaos.rollout_verdict import Made, Verdict
from tests.chaos.scenario import arguments, conclude, write_json
from tests.kit import fork_server
from tests.leftovers import nothing_left

import tensorhub

RUNNERS: Final = 4
AGENTS: Final = 2
VICTIMS: Final = {
    **{f"runner-{number}": 20 for number in range(RUNNERS)},
    "rollout-0": 8,
    "rollout-1": 8,
    # The trainer's own agent lives: what becomes of a trainer without one is told elsewhere.
    "agent-1": 3,
    "nats": 1,
}
"""How often each is killed, relative to the others."""

LENGTH_MEAN: Final = 60.0
TOKENS_MAX: Final = 400
STEP_S: Final = 0.01
GROUP_SIZE: Final = 4
BUSY_GROUPS: Final = 24
"""How many groups are open all the time."""
STALENESS: Final = 2
PUBLISH_S: Final = 3.0


class StormReport(msgspec.Struct, frozen=True, kw_only=True):
    kills: dict[str, int]
    seconds: float
    versions: int
    submitted: int
    delivered: int
    twice: int
    lost: int
    stale: int
    tokens: int
    made_again: int
    """Tokens that engines made and that were not delivered."""
    share_again: float
    attempts: dict[int, int]
    """How many responses have tokens of one attempt, of two, and so on."""
    lengths: str

    def __str__(self) -> str:
        killed = ", ".join(f"{name} {count}" for name, count in self.kills.items())
        attempts = ", ".join(f"{count} of {number}" for number, count in self.attempts.items())
        return (
            f"{sum(self.kills.values())} kills in {self.seconds:.0f} s ({killed}), {self.versions} versions\n"
            f"submitted {self.submitted}, delivered {self.delivered}, twice {self.twice}, lost {self.lost}, stale "
            f"{self.stale}\n"
            f"{self.tokens} tokens came, {self.made_again} more were made: {self.share_again:.2%}; responses by "
            f"attempts: {attempts}\n{self.lengths}"
        )


@dataclass
class Storm:
    directory: Path
    kills: int
    every_s: float
    seed: int
    findings: Findings = field(default_factory=Findings)
    killed: Counter[str] = field(default_factory=Counter)
    newest_at_submit: dict[str, int] = field(default_factory=dict)
    _is_over: bool = False

    async def play(self) -> StormReport:
        async with rollout_job(
            self.directory,
            runners=RUNNERS,
            agents=AGENTS,
            tokens_max=TOKENS_MAX,
            step_s=STEP_S,
            FAKE_LENGTH_MEAN=str(LENGTH_MEAN),
        ) as job:
            job.group_size = GROUP_SIZE
            rollouts = await job.attach(staleness=STALENESS)
            await job.until_serving(rollouts, 1)
            began = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._train(job, rollouts))
                tasks.create_task(self._publish(job))
                await self._kill(job)
                self._is_over = True
            return self._report(job, job.verdict, time.monotonic() - began)

    async def _kill(self, job: RolloutJob) -> None:
        chance = random.Random(self.seed)
        names, weights = list(VICTIMS), list(VICTIMS.values())
        for number in range(1, self.kills + 1):
            (name,) = chance.choices(names, weights)
            pid = job.hub.kill(name)
            self.killed[name] += 1
            # The next blow may come while this one is not over.
            await asyncio.sleep(chance.expovariate(1 / self.every_s))
            if name != "nats":
                await job.hub.until_back(name, pid)
            if number % 10 == 0:
                print(f"kill {number}: {len(job.received)} responses came", flush=True)

    async def _train(self, job: RolloutJob, rollouts: tensorhub.AsyncRollouts) -> None:
        """Keep `BUSY_GROUPS` open until it is over, then take the rest."""
        await self._submit(job, rollouts, BUSY_GROUPS)
        async for batch in rollouts.batches(4 * GROUP_SIZE, wait_s=WAIT_S):
            groups = len({each.group for each in batch.responses})
            await job.take(batch)
            if not self._is_over:
                await self._submit(job, rollouts, groups)

    async def _submit(self, job: RolloutJob, rollouts: tensorhub.AsyncRollouts, groups: int) -> None:
        newest = job.version
        for group in await job.submit(rollouts, groups):
            self.newest_at_submit[group] = newest

    async def _publish(self, job: RolloutJob) -> None:
        while not self._is_over:
            await asyncio.sleep(PUBLISH_S)
            try:
                # `job.version` is raised first: what is published only afterwards would be called stale wrongly.
                before = job.version
                await job.publish()
            except tensorhub.TensorHubError as why:
                job.version = before
                print(f"not published: {why}", flush=True)

    def _report(self, job: RolloutJob, verdict: Verdict, seconds: float) -> StormReport:
        made: Made = verdict.check_records(job.records())
        stale = verdict.check_staleness(self.newest_at_submit, STALENESS)
        lengths: LengthVerdict = against_geometric(
            [len(each.tokens) for each in verdict.received.values()], LENGTH_MEAN, TOKENS_MAX
        )
        for wrong in (*verdict.wrongs, *(f"{key} never came" for key in verdict.missing)):
            self.findings.wrong(wrong)
        if not lengths.holds:
            self.findings.wrong(f"lengths are not those of an undisturbed engine: {lengths}")
        return StormReport(
            kills=dict(sorted(self.killed.items())),
            seconds=seconds,
            versions=job.version,
            submitted=sum(verdict.submitted.values()),
            delivered=len(verdict.received),
            twice=sum("twice" in each or "came again" in each for each in verdict.wrongs),
            lost=len(verdict.missing),
            stale=stale,
            tokens=made.delivered,
            made_again=made.made - made.delivered,
            share_again=made.share_again,
            attempts=dict(sorted(verdict.attempts().items())),
            lengths=str(lengths),
        )


async def main() -> int:
    args = arguments(__doc__, kills=200, every_s=1.0, seed=1, json="", docs=False, keep=False)
    directory = Path(tempfile.mkdtemp(prefix="tensorhub-rollout-storm-"))
    storm = Storm(directory, args.kills, args.every_s, args.seed)
    with nothing_left(directory), closing(fork_server):
        report = await storm.play()
    print(report)
    write_json(args.json, [report])
    if args.docs:
        page.write("rollout-storm", "\n\n".join(str(report).splitlines()), PAGE)
    return conclude(storm.findings, directory, keep=args.keep)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
