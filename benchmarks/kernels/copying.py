"""How fast the agent's copy pool brings 1 GiB from one populated segment to another, beside plain memcpy.

    python benchmarks/kernels/copying.py [--mib 1024] [--rounds 9] [--threads 0] [--busy]

Each round runs every contender once, and a ratio is that of two runs of one round, so that what else the machine does
at the time falls on both. A ratio above 1 is faster than one memcpy of one thread. The medians are printed with the
settings that they were taken with; GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x80000 shows glibc's part in
them, `--busy` what a computing event loop costs, and `--switch-ms` what helps against that.
"""

import argparse
import asyncio
import ctypes
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from tensorhub_agent.compute.pool import PART_BYTES, CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.storage.segments import Segment, SegmentStore, segment_prefix
from tensorhub_common.layout.layout import (
    Layout,
    PieceTable,
    TensorEntry,
    layout_of,
    payload_bytes,
    pieces,
    segment_bytes,
)

LAYERS: Final = 32
MIB: Final = 1024 * 1024

Contender = Callable[[], Awaitable[None]]

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


def llama_like(mib: int) -> Layout:
    """Return the 291 tensors of a Llama of 32 layers, its width and vocabulary chosen so that they take about `mib`."""
    elements = mib * MIB // 2
    hidden = max(16, int((elements / 450) ** 0.5) // 16 * 16)
    inner = hidden * 43 // 16
    layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    vocabulary = max(1, (elements - LAYERS * layer - hidden) // (2 * hidden))
    shapes = {"model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,), "lm_head": (vocabulary, hidden)}
    for number in range(LAYERS):
        of = f"model.layers.{number}."
        shapes |= {of + f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {of + f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes[of + "mlp.down_proj"] = (hidden, inner)
        shapes |= {of + f"{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    return layout_of(
        TensorEntry(f"{name}.weight", "bfloat16", 2, shape, shape, (0,) * len(shape)) for name, shape in shapes.items()
    )


def contenders(
    source: Segment, copy: Segment, table: PieceTable, pool: CopyPool, two: ThreadPoolExecutor
) -> dict[str, Contender]:
    """Return what is compared, by name; the first is the measure."""
    nbytes = source.nbytes
    origin = np.frombuffer(source.view, dtype=np.uint8).ctypes.data
    to = np.frombuffer(copy.view, dtype=np.uint8).ctypes.data
    spans = Spans.of(table)

    async def one_thread() -> None:
        _memcpy(to, origin, nbytes)

    async def two_threads() -> None:
        half = nbytes // 2
        first = two.submit(_memcpy, to, origin, half)
        second = two.submit(_memcpy, to + half, origin + half, nbytes - half)
        first.result(), second.result()

    async def hash_one_thread() -> None:
        xxhash.xxh3_128_digest(copy.view)

    async def digests_on() -> None:
        await pool.copy_and_digest(copy.view, source.view, spans).result()

    async def digests_off() -> None:
        await pool.copy_and_digest(copy.view, source.view, spans, digests=False).result()

    async def digest_only() -> None:
        await pool.digest(copy.view, spans).result()

    return {
        "memcpy, 1 thread": one_thread,
        "memcpy, 2 threads": two_threads,
        "xxh3_128, 1 thread": hash_one_thread,
        "copy pool, digests on": digests_on,
        "copy pool, digests off": digests_off,
        "copy pool, hash only": digest_only,
    }


async def measure(options: argparse.Namespace) -> None:
    """Run the rounds and print the table."""
    layout = llama_like(options.mib)
    table = pieces(layout)
    store = SegmentStore(options.shm_dir, segment_prefix("bench", f"copying{os.getpid()}"), 1 << 62)
    source, copy = (store.create(segment_bytes(layout)) for _ in range(2))
    pool = CopyPool(options.threads)
    stop = threading.Event()
    try:
        np.frombuffer(source.view, dtype=np.uint8)[:] = np.random.default_rng(1).integers(
            0, 256, source.nbytes, np.uint8
        )
        print_settings(layout, table, pool, options)
        if options.busy:
            threading.Thread(target=spin, args=(stop,), daemon=True).start()
        with ThreadPoolExecutor(2) as two:
            print_table(await rounds(contenders(source, copy, table, pool, two), options.rounds), payload_bytes(layout))
        assert source.view == copy.view
    finally:
        stop.set()
        pool.close()
        store.remove(source)
        store.remove(copy)


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


def spin(stop: threading.Event) -> None:
    """Compute in Python without a pause, as an event loop under load does."""
    while not stop.is_set():
        sum(range(100))


def print_settings(layout: Layout, table: PieceTable, pool: CopyPool, options: argparse.Namespace) -> None:
    """Say what a figure means nothing without."""
    huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    facts = {
        "layout": f"{len(layout.tensors)} tensors, {payload_bytes(layout) / MIB:.0f} MiB, {len(table)} pieces",
        "segments": f"{options.shm_dir}, reserved and populated, both mapped shared",
        "huge pages for them": huge.read_text().strip() if huge.exists() else "unknown",
        "digests": "xxh3_128 of each piece, taken in the destination",
        "copy pool": f"{pool.threads} threads, parts of {PART_BYTES // 1024} KiB",
        "cores": f"{len(os.sched_getaffinity(0))}, load {os.getloadavg()[0]:.2f}",
        "python": f"{platform.python_version()}, switch interval {options.switch_ms:g} ms, GIL busy: {options.busy}",
        "libc": f"{'-'.join(platform.libc_ver())}, GLIBC_TUNABLES={os.environ.get('GLIBC_TUNABLES', '')}",
    }
    for what, fact in facts.items():
        print(f"{what:20} {fact}")
    print()


def print_table(took: dict[str, list[float]], nbytes: int) -> None:
    """Print the medians, and those of the ratios to the first contender of the same round."""
    base = next(iter(took.values()))
    for name, times in took.items():
        ratios = [one / other for one, other in zip(base, times, strict=True)]
        middle = statistics.median(times)
        print(
            f"{name:24} {middle * 1000:8.1f} ms {nbytes / middle / 1e9:6.1f} GB/s   "
            f"{statistics.median(ratios):5.2f} × memcpy  ({min(ratios):.2f} – {max(ratios):.2f})"
        )


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="threads of the copy pool; 0: as the agent does")
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))  # noqa: S108 (where segments stand)
    parser.add_argument(
        "--busy", action="store_true", help="let another thread of the process compute in Python all the time"
    )
    parser.add_argument("--switch-ms", type=float, default=sys.getswitchinterval() * 1000)
    options = parser.parse_args()
    sys.setswitchinterval(options.switch_ms / 1000)
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
