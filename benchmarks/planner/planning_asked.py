"""How soon all ranks have their plans when they ask a planner over NATS, as agents do.

    python -m benchmarks.planner.planning_asked [--case equal] [--planners 1] [--docs]

The same layouts as `planning`, with everything that stands between an agent and a planner: the embedded
NATS, the job's log, the blob store, and planners as processes. This process plays the agents and writes their commands;
no bytes move. All readers want "latest" before the first version is published, which is how a job begins; from the
command by which the version is there on, all of them ask at once, each waits as long as an agent does, and asks again.

Everything shares the machine's cores: the agents, NATS and the planners.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import psutil

from benchmarks.page import write
from benchmarks.planner.planning import CASES, HOST_GPUS, prepare
from benchmarks.registry.load import nats, open_job
from tensorhub_agent.core.operations.read import REPLAN_S
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.errors import Busy, NoAnswer, NoResponder
from tensorhub_common.introspection.ping import ping
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log import codec
from tensorhub_common.protocol.log.commands import (
    Command,
    Drained,
    Filled,
    Granted,
    Join,
    Ready,
    Register,
    Sender,
    ShardCommand,
    Unpublish,
    Want,
)
from tensorhub_common.protocol.plans import PLAN_ASK_S, Plan, PlanAnswer, PlanRequest, ReadPriority, Refusal

JOB: Final = "planning"
MODEL: Final = "policy"
AT_ONCE: Final = 256
"""So many commands and blobs are under way at once."""
PATIENCE_S: Final = 120.0
AHEAD_S: Final = 20.0
"""A planner is given so long, at most, to be idle again before the first version is published."""
IDLE_PERCENT: Final = 5.0


class Asked(NamedTuple):
    """Seconds from the command that made the version available until each rank had its plan; questions asked."""

    seconds: list[float]
    questions: int


class Job:
    """All agents of a job."""

    def __init__(self, bus: Bus, sources: list[str], readers: list[str]) -> None:
        self.bus, self.sources, self.readers = bus, sources, readers
        self.log = JobLog(bus, JOB)
        self.last_seq = 0
        self._n = count(1)

    async def say(self, agent: str, command: Command) -> int:
        """Append an agent's command; return where it stands."""
        number = next(self._n)
        body = codec.encode(msgspec.structs.replace(command, by=Sender(agent, 1, number)))
        verb = str(command.__struct_config__.tag)
        seq = await self.log.append(subjects.command_subject(JOB, verb, agent), body, f"{agent}-{number}")
        self.last_seq = max(self.last_seq, seq)
        return seq

    async def register(self, name: str, layouts: list[str]) -> None:
        """Let each rank stand on an agent of its own, `HOST_GPUS` on a host."""

        async def one(rank: int, layout: str) -> None:
            agent = f"{name}-{rank}"
            await self.say(agent, Join(host=f"{name}-host-{rank // HOST_GPUS}", site="site"))
            shard: dict[str, Any] = {"model": MODEL, "replica": name, "shard": rank, "shards": len(layouts)}
            await self.say(agent, Register(**shard, layout=layout, nbytes=1 << 30))

        await all_of(one(rank, layout) for rank, layout in enumerate(layouts))

    async def each(self, name: str, ranks: int, *commands: type[ShardCommand], **fields: int | str) -> int:
        """Let each rank of a replica say the same; return where the first of that stands."""
        said: list[int] = []

        async def one(rank: int) -> None:
            for command in commands:
                at = await self.say(f"{name}-{rank}", command(model=MODEL, replica=name, shard=rank, **fields))  # type: ignore[arg-type]
                said.append(at)

        await all_of(one(rank) for rank in range(ranks))
        return min(said)

    async def ask(self, version: int) -> Asked:
        """Let all readers ask at once."""
        began = time.perf_counter()
        questions = 0

        async def one(rank: int) -> float:
            nonlocal questions
            turn = ReadPriority(self.last_seq, self.last_seq)
            demand = PlanRequest(
                model=MODEL, version=version, replica="rollout", shard=rank, agent=f"rollout-{rank}",
                root=None, at_seq=self.last_seq, turn=turn,
            )  # fmt: skip
            while True:
                questions += 1
                try:
                    body = await self.bus.request(
                        subjects.query_subject(JOB, "plan"), msgspec.json.encode(demand), PLAN_ASK_S
                    )
                except (NoAnswer, NoResponder, Busy):
                    await asyncio.sleep(REPLAN_S)
                    continue
                answer: PlanAnswer = msgspec.json.decode(body, type=Plan | Refusal)
                assert isinstance(answer, Plan), answer
                return time.perf_counter() - began

        async with asyncio.timeout(PATIENCE_S):
            return Asked(sorted(await asyncio.gather(*(one(rank) for rank in range(len(self.readers))))), questions)


async def all_of(work: Iterable[Awaitable[object]]) -> None:
    """Do it all, `AT_ONCE` at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def gated(each: Awaitable[object]) -> None:
        async with gate:
            await each

    await asyncio.gather(*map(gated, work))


@asynccontextmanager
async def planners(url: str, bus: Bus, number: int, directory: Path) -> AsyncIterator[list[psutil.Process]]:
    """Run planners until the end of the block."""
    processes = []
    for each in range(number):
        environ = {
            **os.environ,
            "TENSORHUB_NATS": url,
            "TENSORHUB_PLANNER_ID": f"planner-{each}",
            "TENSORHUB_LOG_LEVEL": "warning",
            "TENSORHUB_DIR": str(directory),
        }
        processes.append(await asyncio.create_subprocess_exec(sys.executable, "-m", "tensorhub_planner", env=environ))
    try:
        async with asyncio.timeout(PATIENCE_S):
            for each in range(number):
                while await ping(bus, f"planner-{each}", 0.5) is None:
                    pass
        yield [psutil.Process(process.pid) for process in processes]
    finally:
        for process in processes:
            process.kill()
            await process.wait()


async def idle(processes: list[psutil.Process]) -> None:
    """Wait until what the planners do ahead is done."""
    async with asyncio.timeout(AHEAD_S):
        while max([await asyncio.to_thread(process.cpu_percent, 0.3) for process in processes]) > IDLE_PERCENT:
            pass


async def run(case: str, number: int) -> dict[str, float]:
    """Measure a case with so many planners."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        prepare(CASES[case], directory)
        names: dict[str, list[str]] = json.loads((directory / "ranks.json").read_text())
        async with nats(directory) as url, await connect(url, name="bench") as bus:
            await open_job(bus, JOB)
            blobs = BlobStore(bus)

            async def put(digest: str) -> None:
                assert await blobs.put(JOB, (directory / digest).read_bytes()) == digest

            await all_of(put(digest) for digest in {*names["sources"], *names["readers"]})
            job = Job(bus, names["sources"], names["readers"])
            async with planners(url, bus, number, directory) as processes:
                return await _measured(job, processes)


async def _measured(job: Job, processes: list[psutil.Process]) -> dict[str, float]:
    sources, readers = len(job.sources), len(job.readers)
    began = _cpu_s(processes)
    await job.register("trainer", job.sources)
    await job.register("rollout", job.readers)
    number = await job.each("rollout", readers, Want, want="latest")
    await idle(processes)
    ahead = _cpu_s(processes)
    await job.each("trainer", sources, Ready, version=1, root="1" * 32)
    first = await job.ask(1)
    asked = _cpu_s(processes)
    await job.each("rollout", readers, Granted, round=number, attempt=1)
    await job.each("rollout", readers, Filled, round=number, version=1, root="1" * 32)
    await job.each("trainer", sources, Unpublish, Drained)
    await job.each("trainer", sources, Ready, version=2, root="2" * 32)
    await job.each("rollout", readers, Want, want=2)
    before = _cpu_s(processes)
    again = await job.ask(2)
    return {
        "ahead_cpu": ahead - began,
        "first_one": first.seconds[0],
        "first_median": statistics.median(first.seconds),
        "first_all": first.seconds[-1],
        "first_questions": first.questions,
        "first_cpu": asked - ahead,
        "again_one": again.seconds[0],
        "again_median": statistics.median(again.seconds),
        "again_all": again.seconds[-1],
        "again_questions": again.questions,
        "again_cpu": _cpu_s(processes) - before,
        "rss_mib": max(process.memory_info().rss for process in processes) / 2**20,
    }


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(float(times.user + times.system) for times in (process.cpu_times() for process in processes))


def table(case: str, number: int, at: dict[str, float]) -> str:
    """Write the figures as a table of Markdown."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    rows = [
        f"| {CASES[case].title}, {number} planners | soonest | median | all | questions | planners' processor time |",
        "|---|--:|--:|--:|--:|--:|",
        f"| while readers wait for the first version | | | | | {at['ahead_cpu']:.2f} s |",
    ]
    for step, title in (("first", "the first version"), ("again", "the second version")):
        rows.append(
            f"| {title} | {at[step + '_one']:.2f} s | {at[step + '_median']:.2f} s | **{at[step + '_all']:.2f} s** | "
            f"{at[step + '_questions']:,.0f} | {at[step + '_cpu']:.2f} s |"
        )
    cores = len(os.sched_getaffinity(0))
    return "\n".join([*rows, "", f"Load {load} on {cores} cores; a planner takes {at['rss_mib']:,.0f} MiB."])


def main() -> None:
    """Measure, print, and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES], default="equal")
    parser.add_argument("--planners", type=int, default=1)
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    text = table(options.case, options.planners, asyncio.run(run(options.case, options.planners)))
    print(text)
    if options.docs:
        write("planning-asked", text)


if __name__ == "__main__":
    main()
