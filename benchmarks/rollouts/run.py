"""Measures one manager: `python -m benchmarks.rollouts --instances 64 --responses 10000`."""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

import tensorhub
from benchmarks.processor import used_s
from benchmarks.rollouts.instances import JOB, MODEL
from tensorhub.local.hub import LocalHub, LocalRollouts


@dataclass
class Measured:
    """One run. Shares are of one core, latencies of a frame, from sending it to its answer, in ms."""

    instances: int
    responses: int
    flush_ms: float
    tokens_per_s: float
    manager_share: float
    nats_share: float
    tokens_per_core_s: float
    frame_p50_ms: float
    frame_p99_ms: float
    manager_mib: float
    delivered_s: float
    again_s: float | None
    """From a SIGKILL of the manager until all responses made new tokens again; None: it was not killed."""
    resent_tokens: int
    """Tokens that instances sent twice for it."""
    disk_mib: float
    """What NATS has on the disk once all is done."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--responses", type=int, default=10_000, help="open at once")
    parser.add_argument("--tokens-per-s", type=float, default=50.0, help="of each response")
    parser.add_argument("--tokens", type=int, default=1000, help="of each response")
    parser.add_argument("--flush-ms", type=float, default=50.0)
    parser.add_argument("--processes", type=int, default=2, help="that the instances are in")
    parser.add_argument("--measure-s", type=float, default=6.0, help="so long is measured")
    parser.add_argument("--kill", action="store_true", help="kill the manager after the measurement")
    options = parser.parse_args()
    found = asyncio.run(_measured(options))
    sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")


async def _measured(options: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        hub = LocalHub(Path(folder), 1, rollouts=LocalRollouts())
        async with hub:
            os.environ["TENSORHUB_DIR"] = folder
            async with await tensorhub.connect_async(JOB) as trainer:
                return await _run(hub, trainer, options, Path(folder))


async def _run(hub: LocalHub, trainer: tensorhub.AsyncHub, options: argparse.Namespace, folder: Path) -> Measured:
    share = options.instances // options.processes
    key = Path(hub.hub.credentials).with_name("admin.nk")
    instances = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.rollouts.instances",
            hub.hub.nats,
            str(key),
            str(share),
            str(number * share),
            str(options.tokens_per_s),
            str(options.flush_ms / 1000),
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 26,
        )
        for number in range(options.processes)
    ]
    try:
        await _published(trainer)
        sampling = tensorhub.Sampling(max_tokens=options.tokens)
        rollouts = await trainer.rollouts(MODEL, group_size=10, sampling=sampling, staleness=100)
        began = time.monotonic()
        await rollouts.submit([tensorhub.Prompt([1, number + 2]) for number in range(options.responses // 10)])
        delivering = asyncio.create_task(_take_all(rollouts))
        while (executing := await _executing(rollouts)) < 0.95 * options.responses:
            sys.stderr.write(f"{time.monotonic() - began:.1f} s: {executing} of {options.responses} execute\n")
            await asyncio.sleep(0.5)
        assert hub.hub.rollout is not None
        pid, nats_pid = hub.hub.rollout.pid, hub.hub.nats_pid
        reports = [asyncio.create_task(_reported(each.stdout)) for each in instances if each.stdout is not None]
        await asyncio.sleep(1.5)
        before = (time.monotonic(), used_s([pid]), used_s([nats_pid]), sum(_tokens(each) for each in REPORTS))
        REPORTS_LATENCIES.clear()
        await asyncio.sleep(options.measure_s)
        seconds = time.monotonic() - before[0]
        manager_s, nats_s = used_s([pid]) - before[1], used_s([nats_pid]) - before[2]
        tokens = sum(_tokens(each) for each in REPORTS) - before[3]
        memory = psutil.Process(pid).memory_info().rss
        latencies = sorted(REPORTS_LATENCIES)
        again_s = await _killed(rollouts, pid) if options.kill else None
        count = await delivering
        sent = sum(each["sent"] for each in REPORTS)
        assert count == options.responses, f"{count} responses came, and not {options.responses}"
        for report in reports:
            report.cancel()
        return Measured(
            options.instances,
            options.responses,
            options.flush_ms,
            round(tokens / seconds),
            round(manager_s / seconds, 3),
            round(nats_s / seconds, 3),
            round(tokens / manager_s),
            round(1000 * statistics.median(latencies), 2),
            round(1000 * latencies[int(0.99 * len(latencies))], 2),
            round(memory / 2**20, 1),
            round(time.monotonic() - began, 2),
            again_s,
            sent - options.responses * options.tokens,
            round(
                sum(each.stat().st_blocks * 512 for each in (folder / "nats").rglob("*") if each.is_file()) / 2**20, 1
            ),
        )
    finally:
        for each in instances:
            each.kill()
        await asyncio.gather(*(each.wait() for each in instances))


REPORTS: list[dict[str, int]] = []
REPORTS_LATENCIES: list[float] = []


def _tokens(report: dict[str, int]) -> int:
    return report["tokens"]


async def _reported(lines: asyncio.StreamReader) -> None:
    latest = {"tokens": 0, "sent": 0}
    REPORTS.append(latest)
    while line := await lines.readline():
        said = json.loads(line)
        latest["tokens"], latest["sent"] = said["tokens"], said["sent"]
        REPORTS_LATENCIES.extend(said["latencies_s"])


async def _killed(rollouts: tensorhub.AsyncRollouts, pid: int) -> float:
    """Kill the manager and return after how many seconds the next one hears new tokens of all that is open."""
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    while True:
        status = await rollouts.status(timeout_s=120)
        open_ = sum(each.open for each in status.consumers)
        if sum(each.executing for each in status.instances) >= open_:
            return round(time.monotonic() - began, 2)
        sys.stderr.write(f"{time.monotonic() - began:.1f} s after the kill: {open_} open\n")
        await asyncio.sleep(0.2)


async def _executing(rollouts: tensorhub.AsyncRollouts) -> int:
    return sum(each.executing for each in (await rollouts.status(timeout_s=60)).instances)


async def _published(trainer: tensorhub.AsyncHub) -> None:
    import torch  # noqa: PLC0415 (only here)

    shard = await trainer.register(MODEL, {"w": torch.ones(4)}, replica="trainer")
    await shard.publish(1)


async def _take_all(rollouts: tensorhub.AsyncRollouts) -> int:
    count = 0
    async for batch in rollouts.batches(1, wait_s=600):
        count += len(batch.responses)
        await batch.done()
    return count
