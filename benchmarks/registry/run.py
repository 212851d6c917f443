"""One registry in numbers: `python -m benchmarks.registry [--docs]`.

Commands a second with 1,000 agents in 100 jobs, how long an outcome takes and what memory that is; how long a restart
takes with a million entries of history, with and without a snapshot; and how long nobody answers when the leader is
killed. The registries are processes as in production, NATS is the embedded server, agents are lanes of this process.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import page
from benchmarks.registry.load import AGENTS_PER_JOB, ANSWER_S_MAX, LEASE_S, Fleet, Registry, nats, open_job, wait_status
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.errors import StreamFailure
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.jetstream.snapshot_store import SnapshotStore
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.codec import decode_event, encode
from tensorhub_common.protocol.log.commands import Command, Drained, Join, Ready, Register, Sender, Unpublish

JOBS: Final = 100
SECONDS: Final = 20.0
HISTORY: Final = 1_000_000
KILLS: Final = 20
LOG_BYTES_MAX: Final = 16 << 30
SNAPSHOT_S_MAX: Final = 20.0
UNDER_WAY_MAX: Final = 4_000
"""Of the history so many publications wait for their acknowledgement at once."""


async def throughput(bus: Bus, registry: Registry, seconds: float) -> dict[str, float]:
    """Let all agents of all jobs speak for a while."""
    fleets = [Fleet(bus, f"job-{number}") for number in range(JOBS)]
    for fleet in fleets:
        await open_job(bus, fleet.log.job)
    for fleet in fleets:
        await wait_status(bus, fleet.log.job)
    following = [asyncio.create_task(fleet.follow()) for fleet in fleets]
    lanes = [lane for fleet in fleets for lane in fleet.lanes.values()]
    try:
        await asyncio.gather(*(lane.begin() for lane in lanes))
        for lane in lanes:
            lane.latencies.clear()
        began = time.monotonic()
        await asyncio.gather(*(lane.live(began + seconds) for lane in lanes))
        took = time.monotonic() - began
        alone = lanes[0]
        times = sorted(each for lane in lanes for each in lane.latencies)
        alone.latencies.clear()
        await alone.live(time.monotonic() + 2.0)
        idle = sorted(alone.latencies)
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
    return {
        "commands_s": len(times) / took,
        "p50_ms": 1e3 * times[len(times) // 2],
        "p99_ms": 1e3 * times[int(0.99 * len(times))],
        "alone_p50_ms": 1e3 * idle[len(idle) // 2],
        "alone_p99_ms": 1e3 * idle[int(0.99 * len(idle))],
        "resident_mib": registry.resident_bytes / 2**20,
    }


async def write_history(bus: Bus, job: str, count: int) -> None:
    """Put commands into a job's log as fast as it takes them."""
    shard: dict[str, Any] = {"model": "policy", "replica": "trainer", "shard": 0}
    cycle: list[tuple[str, Any]] = [("ready", Ready), ("unpublish", Unpublish), ("drained", Drained)]
    room = asyncio.Semaphore(UNDER_WAY_MAX)

    async def put(command: Command) -> None:
        try:
            subject = subjects.command_subject(job, str(command.__struct_config__.tag), "agent-0")
            await bus.request(subject, encode(command), ANSWER_S_MAX)
        finally:
            room.release()

    def command_of(n: int) -> Command:
        by = Sender("agent-0", 1, n)
        if n == 1:
            return Join(by=by, host="host-0", site="site-0")
        if n == 2:  # noqa: PLR2004 (the second)
            return Register(by=by, **shard, shards=1, layout="b" * 64, nbytes=1 << 20)
        kind = cycle[n % 3][1]
        more: dict[str, Any] = {"version": None, "root": "a" * 32} if kind is Ready else {}
        made: Command = kind(by=by, **shard, **more)
        return made

    tasks: set[asyncio.Task[None]] = set()
    for n in range(1, count + 1):
        await room.acquire()
        task = asyncio.create_task(put(command_of(n)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


async def restart_s(bus: Bus, registry: Registry, job: str) -> float:
    """Kill the registry, start it anew, and wait until it answers for the job."""
    await registry.kill()
    began = time.monotonic()
    await registry.start()
    await wait_status(bus, job)
    return time.monotonic() - began


async def _wait_answered(log: JobLog, seq: int) -> None:
    """Return once the command at `seq` has its outcome."""
    while True:
        event = await log.last_event()
        if event is not None and decode_event(event.data).cmd >= seq:
            return
        await asyncio.sleep(0.2)


async def _wait_snapshot(bus: Bus, job: str, created: str) -> None:
    """Return once there is a snapshot, or after a while without one: a short history has none."""
    deadline = time.monotonic() + SNAPSHOT_S_MAX
    while await SnapshotStore(bus, job).index(created) is None:
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(0.1)


async def restarts(bus: Bus, registry: Registry, count: int) -> dict[str, float]:
    """Restart with an empty job, with so many commands and no snapshot, and with one."""
    await open_job(bus, "empty")
    empty = await restart_s(bus, registry, "empty")
    await registry.kill()
    await open_job(bus, "history")
    config = (await api.api(bus, f"STREAM.INFO.{subjects.log_stream('history')}"))["config"]
    # With its usual limit such a log would be trimmed by now.
    await api.api(bus, f"STREAM.UPDATE.{config['name']}", {**config, "max_bytes": LOG_BYTES_MAX})
    began = time.monotonic()
    await write_history(bus, "history", count)
    print(f"{count:,} commands were written in {time.monotonic() - began:.0f} s", file=sys.stderr)
    began = time.monotonic()
    await registry.start()
    await wait_status(bus, "history")
    last = await JobLog(bus, "history").last_command()
    assert last is not None
    await _wait_answered(JobLog(bus, "history"), last.seq)
    said = time.monotonic() - began
    extent = await JobLog(bus, "history").extent()
    await _wait_snapshot(bus, "history", extent.created)
    with_snapshot = statistics.median([await restart_s(bus, registry, "history") for _ in range(3)])
    await registry.kill()
    with contextlib.suppress(StreamFailure):
        # A short history has none.
        await api.api(bus, f"STREAM.DELETE.{subjects.snapshot_stream('history')}")
    without = await restart_s(bus, registry, "history")
    return {
        "empty_s": empty,
        "commands": count,
        "entries": extent.last,
        "said_s": said,
        "with_s": with_snapshot,
        "without_s": without,
    }


async def takeovers(bus: Bus, pair: list[Registry], job: str) -> list[float]:
    """Kill the leader over and over; how long until a command that was said right then has its outcome."""
    fleet = Fleet(bus, job)
    following = asyncio.create_task(fleet.follow())
    lane = fleet.lanes["agent-0"]
    took: list[float] = []
    try:
        await lane.begin()
        for _ in range(KILLS):
            leader = (await wait_status(bus, job)).registry
            killed = next(registry for registry in pair if registry.name == leader)
            await killed.kill()
            began = time.monotonic()
            await lane.say(Drained(by=lane.sender(), model="policy", replica=lane.name, shard=0))
            took.append(time.monotonic() - began)
            await killed.start()
            await asyncio.sleep(float(LEASE_S))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return took


class Found(msgspec.Struct):
    """A whole run."""

    rate: dict[str, float]
    restart: dict[str, float]
    takeover: list[float]


def words(found: Found) -> str:
    """Return the figures as a table."""
    rate, restart, took = found.rate, found.restart, sorted(found.takeover)
    count = f"{restart['commands']:,.0f}"
    rows = [
        ("commands a second, each lane waiting for its outcome", f"{rate['commands_s']:,.0f}"),
        ("from a command's append to its outcome, p50", f"{rate['p50_ms']:.0f} ms"),
        ("the same, p99", f"{rate['p99_ms']:.0f} ms"),
        ("the same with one lane alone, p50 / p99", f"{rate['alone_p50_ms']:.1f} / {rate['alone_p99_ms']:.1f} ms"),
        ("memory of the registry (resident)", f"{rate['resident_mib']:.0f} MiB"),
        ("restart until it answers, an empty job", f"{restart['empty_s']:.2f} s"),
        (
            f"the same, {count} commands ({restart['entries']:,.0f} entries), with a snapshot",
            f"{restart['with_s']:.2f} s",
        ),
        ("the same, without", f"{restart['without_s']:.1f} s"),
        (f"{count} commands at once that nobody had answered: all answered after", f"{restart['said_s']:.0f} s"),
        (
            f"leader killed, lease of {LEASE_S} s: next command answered, p50 of {len(took)}",
            f"{took[len(took) // 2]:.2f} s",
        ),
        ("the same, max", f"{took[-1]:.2f} s"),
    ]
    head = [f"| {AGENTS_PER_JOB * JOBS:,} agents, {JOBS} jobs, one registry | |", "|---|---|"]
    return "\n".join([*head, *(f"| {what} | {value} |" for what, value in rows)])


async def run(count: int, seconds: float) -> Found:
    """Measure all."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        async with nats(directory) as url, await connect(url, name="bench") as bus:
            registry, standby = Registry(url, 0, directory), Registry(url, 1, directory)
            try:
                await registry.start()
                rate = await throughput(bus, registry, seconds)
                print(rate, file=sys.stderr)
                await standby.start()
                await open_job(bus, "takeover")
                took = await takeovers(bus, [registry, standby], "takeover")
                print(took, file=sys.stderr)
                await standby.kill()
                await wait_status(bus, "takeover")
                restart = await restarts(bus, registry, count)
            finally:
                await registry.kill()
                await standby.kill()
    return Found(rate, restart, took)


def main() -> None:
    """Measure, print, and write the figures down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.registry", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commands", type=int, default=HISTORY, help="of history")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of load")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    options = parser.parse_args()
    found = asyncio.run(run(options.commands, options.seconds))
    print(words(found))
    if options.docs:
        page.write("registry", words(found))


if __name__ == "__main__":
    main()
