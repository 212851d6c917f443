"""How fast patches are made and applied, beside memcpy and xxh3 of the same run, and how many bytes they have.

    python benchmarks/kernels/encodings.py [--mib 256] [--rounds 5] [--threads 1]

The memory is bfloat16 of a normal distribution, as weights are, in pieces of 4 MiB. Rates are bytes of pieces in a
second, the median of the rounds; every round runs every contender once, so what else the machine does falls on all.
`compress` and `decompress` are what is left to the host of a delta whose pieces are in a GPU's memory.
"""

import argparse
import ctypes
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from tensorhub_agent.devices.changes import Changes, changes_between
from tensorhub_agent.encodings.compression import pack, unpack
from tensorhub_agent.encodings.patch import apply, changes_in, make, written

MIB: Final = 1024 * 1024
PIECE_BYTES: Final = 4 * MIB
RUN: Final = 1024
"""So many values follow one another where changes are clustered."""

Values = npt.NDArray[np.uint16]

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


@dataclass(frozen=True)
class Pattern:
    """What changes from one version to the next."""

    name: str
    share: float
    is_clustered: bool = False
    is_step: bool = False
    """A changed value is the next one, as a small step of an optimizer makes it; else it is any other."""

    def changed(self, old: Values, chance: np.random.Generator) -> Values:
        """Return the next version."""
        if self.is_clustered:
            which = np.repeat(chance.random(len(old) // RUN) < self.share, RUN)
        else:
            which = chance.random(len(old)) < self.share
        new = old.copy()
        new[which] = old[which] + 1 if self.is_step else bf16(chance, len(old))[which]
        return new


PATTERNS: Final = (
    Pattern("none changed", 0.0),
    Pattern("0.1 % anywhere", 0.001),
    Pattern("1 % anywhere", 0.01),
    Pattern("1 % by one step", 0.01, is_step=True),
    Pattern("1 % in runs", 0.01, is_clustered=True),
    Pattern("5 % anywhere", 0.05),
    Pattern("20 % anywhere", 0.2),
    Pattern("50 % anywhere", 0.5),
    Pattern("all changed", 1.0),
)


def bf16(chance: np.random.Generator, count: int) -> Values:
    """Return the upper halves of small normal float32 values, as bfloat16 has them."""
    return (chance.standard_normal(count, dtype=np.float32) * 0.02).view(np.uint16)[1::2].copy()


class Bench:
    """One pattern's memory, and the contenders."""

    def __init__(self, pattern: Pattern, nbytes: int, threads: ThreadPoolExecutor) -> None:
        """Make both versions."""
        chance = np.random.default_rng(1)
        self.old = bf16(chance, nbytes // 2)
        self.new = pattern.changed(self.old, chance)
        self.target = self.old.copy()
        self.pieces = [(at, min(PIECE_BYTES, nbytes - at)) for at in range(0, nbytes, PIECE_BYTES)]
        self.patches: list[bytes | None] = [None] * len(self.pieces)
        self.changes: list[Changes | None] = [None] * len(self.pieces)
        self._threads = threads

    def each(self, work: Callable[[int, int, int], object]) -> None:
        """Do something for each piece, on all threads."""
        numbered = [(number, at, size) for number, (at, size) in enumerate(self.pieces)]
        list(self._threads.map(lambda one: work(*one), numbered))

    def view(self, values: Values, at: int, size: int) -> memoryview:
        """Return a piece of a version."""
        return values.view(np.uint8).data[at : at + size]

    def copy(self, _: int, at: int, size: int) -> None:
        """Copy a piece."""
        _memcpy(self.target.ctypes.data + at, self.new.ctypes.data + at, size)

    def hash(self, _: int, at: int, size: int) -> None:
        """Hash a piece."""
        xxhash.xxh3_128_digest(self.view(self.new, at, size))

    def make(self, number: int, at: int, size: int) -> None:
        """Make a piece's patch."""
        self.patches[number] = make(self.view(self.old, at, size), self.view(self.new, at, size), 2)

    def apply(self, number: int, at: int, size: int) -> None:
        """Apply a piece's patch to the old version."""
        patch = self.patches[number]
        if patch is not None:
            apply(patch, self.view(self.target, at, size), 2)

    def compare(self, number: int, at: int, size: int) -> None:
        """Find what changed of a piece, as a GPU does."""
        some = slice(at // 2, (at + size) // 2)
        self.changes[number] = changes_between(self.old[some], self.new[some])

    def compress(self, number: int, _: int, size: int) -> None:
        """Make a piece's patch of what changed."""
        self.patches[number] = written(self.changes[number], 2, size)

    def decompress(self, number: int, _: int, size: int) -> None:
        """Read a piece's patch as what changed."""
        changes_in(self.patches[number] or b"", 2, size // 2)

    def pack(self, number: int, at: int, size: int) -> None:
        """Pack a piece."""
        self.patches[number] = pack(self.view(self.new, at, size), 2)

    def unpack(self, number: int, at: int, size: int) -> None:
        """Unpack it."""
        packed = self.patches[number]
        if packed:
            unpack(packed, self.view(self.target, at, size), 2)


def rate(bench: Bench, work: Callable[[int, int, int], object]) -> float:
    """Return GB/s."""
    began = time.perf_counter()
    bench.each(work)
    return bench.new.nbytes / (time.perf_counter() - began) / 1e9


def row(pattern: Pattern, nbytes: int, rounds: int, threads: ThreadPoolExecutor) -> str:
    """Measure one pattern."""
    bench = Bench(pattern, nbytes, threads)
    contenders = ("memcpy", "xxh3", "make", "apply", "compress", "decompress")
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    bench.each(bench.compare)
    for _ in range(rounds):
        figures["memcpy"].append(rate(bench, bench.copy))
        figures["xxh3"].append(rate(bench, bench.hash))
        figures["make"].append(rate(bench, bench.make))
        bench.target[:] = bench.old
        figures["apply"].append(rate(bench, bench.apply))
        if None not in bench.patches:
            assert np.array_equal(bench.target, bench.new), "a patched version is not the new one"
        figures["compress"].append(rate(bench, bench.compress))
        figures["decompress"].append(rate(bench, bench.decompress))
    size = sum(
        len(patch) if patch is not None else size for patch, (_, size) in zip(bench.patches, bench.pieces, strict=True)
    )
    memcpy, xxh3, *others = (statistics.median(each) for each in figures.values())
    told = " | ".join(f"{each:.1f} ({each / memcpy:.2f})" for each in others)
    return f"| {pattern.name} | {100 * size / nbytes:.2f} % | {memcpy:.1f} | {xxh3:.1f} | {told} |"


def packing(nbytes: int, rounds: int, threads: ThreadPoolExecutor) -> str:
    """Measure packing, of which it matters only what the values are like."""
    bench = Bench(PATTERNS[0], nbytes, threads)
    figures: dict[str, list[float]] = {name: [] for name in ("memcpy", "pack", "unpack")}
    for _ in range(rounds):
        figures["memcpy"].append(rate(bench, bench.copy))
        figures["pack"].append(rate(bench, bench.pack))
        bench.target[:] = 0
        figures["unpack"].append(rate(bench, bench.unpack))
        assert np.array_equal(bench.target, bench.new), "an unpacked version is not the one that was packed"
    size = sum(len(packed or b"") for packed in bench.patches)
    memcpy, packed, unpacked = (statistics.median(each) for each in figures.values())
    return (
        f"packed: {100 * size / nbytes:.1f} %, memcpy {memcpy:.1f} GB/s, pack {packed:.2f} ({packed / memcpy:.2f}), "
        f"unpack {unpacked:.2f} ({unpacked / memcpy:.2f})"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print(
        f"{options.mib} MiB bfloat16, {options.threads} threads of {len(os.sched_getaffinity(0))} cores, "
        f"numpy {np.__version__}, Python {platform.python_version()}, "
        f"in GB/s, GLIBC_TUNABLES={os.environ.get('GLIBC_TUNABLES', '')!r}"
    )
    contenders = ("make", "apply", "compress", "decompress")
    print("| what changed | patches | memcpy | xxh3 |", *(f"{each} (× memcpy) |" for each in contenders))
    print("|---" * (4 + len(contenders)) + "|")
    with ThreadPoolExecutor(options.threads) as threads:
        for pattern in PATTERNS:
            print(row(pattern, options.mib * MIB, options.rounds, threads))
            sys.stdout.flush()
        print(packing(options.mib * MIB, options.rounds, threads))


if __name__ == "__main__":
    main()
