"""Kernels in CUDA C++, compiled for the CPU: the lanes of a warp are coroutines, everything else is a loop."""

import ctypes
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

import tensorhub_agent.devices.kernels

SHIM = """
#include <ucontext.h>
#define __global__
#define __device__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
struct Place { unsigned x, y; };
static Place blockIdx, threadIdx, blockDim;
struct u64x2 { unsigned long long x, y; };
#define LOAD_ONCE(at) (*(at))
#define STORE_ONCE(at, value) (*(at) = (value))

// The lanes of a warp are coroutines: each runs to its next exchange, and goes on once all have come there.
static ucontext_t caller, lanes[32];
static char stacks[32][65536];
static unsigned long long handed[2][32];
static unsigned lane, exchanges[32];
static bool ended[32];
static unsigned long long exchanged(unsigned long long value, int apart) {
    unsigned mine = lane, side = exchanges[lane]++ % 2;
    handed[side][mine] = value;
    swapcontext(&lanes[mine], &caller);
    return handed[side][mine ^ apart];
}
#define EXCHANGE(value, apart) exchanged(value, apart)
"""


def compiled(name: str, run: str, folder: Path) -> ctypes.CDLL:
    """Return a library of the source `name`.cu with a function that runs it; skip where nothing compiles C++."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here to compile the kernels' source with")
    source = resources.files(tensorhub_agent.devices.kernels).joinpath(f"{name}.cu").read_text()
    file, library = folder / f"{name}.cpp", folder / f"{name}.so"
    file.write_text(SHIM + source + run)
    subprocess.run([compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-w", file, "-o", library], check=True)
    return ctypes.CDLL(str(library))
