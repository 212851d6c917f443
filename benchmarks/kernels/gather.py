"""How fast boxes that lie strided come, beside a read of as many bytes and beside plain memcpy, on both transports.

    python benchmarks/kernels/gather.py [--mib 256] [--rounds 7] [--transport local,ucxx]

The source is a process of its own; each unit is a box of 4 MiB, as a resharding read asks for. Each round runs every
contender once, and a ratio is that of two runs of one round, so that what else the machine does at the time falls on
both. Above 1 is faster than the `read` of the same round.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import numpy as np

from tensorhub_agent.app.main import SWITCH_S
from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.storage.segments import Segment, SegmentStore, segment_prefix
from tensorhub_agent.transports.base import LeaseAuthority, LeaseOpened, SourceSession, TicketRejected, Transport
from tensorhub_agent.transports.local.transport import LocalTransport
from tensorhub_agent.transports.ucxx.transport import UcxxTransport
from tensorhub_common.programs.regions import StridedCopies, StridedForm
from tensorhub_common.protocol.leases import LeaseGrant

MIB: Final = 1024 * 1024
UNIT_BYTES: Final = 4 * MIB
GIVE_UP_S: Final = 60.0

Contender = Callable[[], Awaitable[object]]


class OpenLeases:
    """A `LeaseAuthority` for which every ticket is good, on one segment."""

    def __init__(self, segment: Segment | None) -> None:
        """Reject every ticket without a segment."""
        self._segment = segment

    def redeem(self, ticket: str, _: str) -> LeaseOpened | TicketRejected:
        """Open a lease with the ticket's name."""
        return TicketRejected("no segment") if self._segment is None else LeaseOpened(ticket, self._segment)

    def renew(self, _: str) -> bool:
        """Take note of nothing."""
        return False

    def holds(self, _: str) -> bool:
        """Say that every lease holds."""
        return True

    def ended(self, lease: str, done: bool) -> None:  # noqa: FBT001 (as LeaseAuthority has it)
        """Take note of nothing."""


def transport(kind: str, folder: Path, agent: str, pool: CopyPool, leases: LeaseAuthority) -> Transport:
    """Return one end of a transport."""
    if kind == "ucxx":
        return UcxxTransport(address="127.0.0.1", agent=agent, pool=pool, leases=leases, fault=sys.exit)
    return LocalTransport(
        socket=folder / f"{agent}.peers",
        agent=agent,
        pool=pool,
        leases=leases,
    )


async def serve(kind: str, folder: Path, nbytes: int) -> None:
    """Be the source: one segment of random bytes, for whoever comes."""
    store = SegmentStore(folder, segment_prefix("bench", "source"), 1 << 62)
    segment = store.create(nbytes)
    np.frombuffer(segment.view, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, segment.nbytes, np.uint8)
    serving = transport(kind, folder, "source", CopyPool(), OpenLeases(segment))
    await serving.start()
    print("ready", serving.endpoint, flush=True)
    # Whoever started us holds the other end, and is gone when it closes.
    await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def source(kind: str, folder: Path, nbytes: int) -> AsyncIterator[str]:
    """Run the source; yields its endpoint."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        "--serve",
        f"{kind}:{folder}:{nbytes}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(GIVE_UP_S):
            while not (line := (await process.stdout.readline()).decode()).startswith("ready "):
                if not line:
                    sys.exit("the source did not start")
        yield line.split()[1]
    finally:
        process.kill()
        await process.wait()


def boxes(form: StridedForm, count: int) -> StridedCopies:
    """Return so many boxes of a form, one behind another at both ends."""
    return StridedCopies(
        [number * form.span_bytes for number in range(count)],
        [number * form.origin_span_bytes for number in range(count)],
        [form] * count,
    )


def forms() -> dict[str, StridedForm]:
    """Return what is compared: boxes of one size, cut in rows of other lengths, at both ends or at one."""

    def rows(nbytes: int, to_stride: int, origin_stride: int) -> StridedForm:
        return StridedForm((UNIT_BYTES // nbytes, nbytes // 2), (to_stride, 2), (origin_stride, 2), 2, 2)

    return {
        "one piece": rows(UNIT_BYTES, UNIT_BYTES, UNIT_BYTES),
        "4 KiB rows, packed here": rows(4096, 4096, 8192),
        "4 KiB rows, packed there": rows(4096, 8192, 4096),
        "4 KiB rows, packed nowhere": rows(4096, 8192, 8192),
        "256 B rows, packed nowhere": rows(256, 512, 512),
        "2 B elements, packed nowhere": rows(2, 4, 4),
    }


def contenders(session: SourceSession, memory: memoryview, nbytes: int, *, digests: bool) -> dict[str, Contender]:
    """Return what is compared, by name: memcpy, `read`, and gathers of as many bytes."""
    other = np.empty(nbytes, np.uint8)
    other[:] = 1
    here = np.frombuffer(memory, np.uint8)[:nbytes]
    starts = range(0, nbytes, UNIT_BYTES)
    spans = Spans(starts, starts, [UNIT_BYTES] * len(starts))

    async def memcpy() -> None:
        np.copyto(here, other)

    def gather(form: StridedForm) -> Contender:
        regions = boxes(form, nbytes // UNIT_BYTES)
        return lambda: session.gather(memory, regions, digests=digests)

    return {
        "memcpy, 1 thread": memcpy,
        "read": lambda: session.read(memory, spans, digests=digests),
        **{name: gather(form) for name, form in forms().items()},
    }


async def measure(kind: str, options: argparse.Namespace) -> None:
    """Run the rounds on one transport and print its table."""
    nbytes = options.mib * MIB // UNIT_BYTES * UNIT_BYTES
    with tempfile.TemporaryDirectory(dir=options.shm_dir) as name:
        folder = Path(name)
        pool = CopyPool()
        reading = transport(kind, folder, "reader", pool, OpenLeases(None))
        await reading.start()
        async with source(kind, folder, 2 * nbytes + UNIT_BYTES) as endpoint:
            grant = LeaseGrant(lease="l", ticket="t", ticket_s=GIVE_UP_S, endpoint=endpoint, pieces=0, digests=b"")
            session = await reading.open(grant, reader="reader", on_lost=sys.exit)
            memory = memoryview(bytearray(2 * nbytes + UNIT_BYTES))
            np.frombuffer(memory, np.uint8)[:] = 1
            for digests in (True, False):
                took = await rounds(contenders(session, memory, nbytes, digests=digests), options.rounds)
                print(f"\n{kind}, digests {'on' if digests else 'off'}, {nbytes // MIB} MiB in boxes of 4 MiB")
                print_table(took, nbytes)
            await session.close()
        await reading.stop()
        pool.close()


async def rounds(running: dict[str, Contender], count: int) -> dict[str, list[float]]:
    """Return the seconds that each contender took in each round, after one round that doesn't count."""
    took: dict[str, list[float]] = {name: [] for name in running}
    for number in range(count + 1):
        for name, contender in running.items():
            begin = time.perf_counter()
            await contender()
            if number:
                took[name].append(time.perf_counter() - begin)
    return took


def print_table(took: dict[str, list[float]], nbytes: int) -> None:
    """Print the medians, and those of the ratios to the `read` of the same round."""
    for name, times in took.items():
        ratios = [one / other for one, other in zip(took["read"], times, strict=True)]
        middle = statistics.median(times)
        print(
            f"{name:30} {middle * 1000:8.1f} ms {nbytes / middle / 1e9:6.2f} GB/s   "
            f"{statistics.median(ratios):5.2f} × read  ({min(ratios):.2f} - {max(ratios):.2f})"
        )


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transport", default="local,ucxx")
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))  # noqa: S108 (where segments stand)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    if options.serve:
        kind, folder, nbytes = options.serve.split(":")
        asyncio.run(serve(kind, Path(folder), int(nbytes)))
        return
    print(
        f"cores {len(os.sched_getaffinity(0))}, load {os.getloadavg()[0]:.2f}, switch interval {SWITCH_S * 1000:g} ms"
    )
    for kind in options.transport.split(","):
        asyncio.run(measure(kind, options))


if __name__ == "__main__":
    main()
