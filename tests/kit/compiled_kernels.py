"""Kernels in CUDA C++, compiled for the CPU: the threads of a group are coroutines, everything else is a loop."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from tensorhub_agent.devices.kernels.library import FOLDER

SHIM = """
#include <cstring>
#include <ucontext.h>
#define __global__
#define __device__
#define __constant__ static const
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
struct Place { unsigned x, y; };
static Place blockIdx, threadIdx, blockDim;
struct alignas(16) u64x2 { unsigned long long x, y; };
#define LOAD_ONCE(at) (*(at))
#define STORE_ONCE(at, value) (*(at) = (value))

template <typename To, typename From> static To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &value, sizeof to);
    return to;
}
#define FLOAT_OF(bits) bits_as<float>(bits)
#define DOUBLE_OF(bits) bits_as<double>(bits)
#define FLOAT_BITS(value) bits_as<unsigned int>(value)
#define DOUBLE_BITS(value) bits_as<unsigned long long>(value)

// The threads of a group are coroutines: each runs until it has to wait for others.
#define THREADS_MAX 1024
#define WARPS_MAX (THREADS_MAX / 32)
static ucontext_t caller, threads[THREADS_MAX];
static char stacks[THREADS_MAX][32768];
static bool ended[THREADS_MAX];
static unsigned long long handed[2][THREADS_MAX];
static unsigned exchanges[THREADS_MAX];
struct Meeting { unsigned arrived, generation; };
static Meeting warps[WARPS_MAX], group;
static void (*body)();

static void pause_thread() {
    unsigned mine = threadIdx.x;
    swapcontext(&threads[mine], &caller);
}
static void meet(Meeting& meeting, unsigned all) {
    unsigned generation = meeting.generation;
    if (++meeting.arrived == all) meeting.arrived = 0, meeting.generation++;
    while (meeting.generation == generation) pause_thread();
}
static unsigned long long handed_over(unsigned long long value, unsigned from) {
    unsigned mine = threadIdx.x, side = exchanges[mine]++ % 2;
    handed[side][mine] = value;
    meet(warps[mine / 32], 32);
    return handed[side][from];
}
#define EXCHANGE(value, apart) handed_over(value, threadIdx.x ^ (apart))
#define FROM_BELOW(value, apart) \\
    (unsigned)handed_over(value, threadIdx.x % 32 >= (apart) ? threadIdx.x - (apart) : threadIdx.x)
#define ONES(word) ((unsigned)__builtin_popcount(word))
#define ZEROS_BEFORE(word) ((unsigned)__builtin_clz(word))
static float narrowed(double value) { return (float)value; }
static double widened(float value) { return (double)value; }
static float multiplied(float a, float b) { return a * b; }
static float divided(float a, float b) { return a / b; }
#define RAISE(at, value) (*(at) = *(at) < (value) ? (value) : *(at))
#define SYNC_WARP() meet(warps[threadIdx.x / 32], 32)
#define SYNC_GROUP() meet(group, blockDim.x)

struct Barrier { unsigned arrived, phase; };
static void prepare(Barrier* barrier) { barrier->arrived = barrier->phase = 0; }
static void arrive(Barrier* barrier) {
    if (++barrier->arrived == 32) barrier->arrived = 0, barrier->phase++;
}
static void wait(Barrier* barrier, unsigned phase) {
    while ((barrier->phase & 1) == (phase & 1)) pause_thread();
}

static void one_thread() {
    body();
    ended[threadIdx.x] = true;
}
// Run a group to its end. The warps have turns in an order that changes with `seed`.
static void run_group(unsigned count, unsigned seed, void (*what)()) {
    body = what, blockDim.x = count;
    for (unsigned each = 0; each < count; each++) {
        getcontext(&threads[each]);
        threads[each].uc_stack.ss_sp = stacks[each];
        threads[each].uc_stack.ss_size = sizeof stacks[each];
        threads[each].uc_link = &caller;
        makecontext(&threads[each], one_thread, 0);
        ended[each] = false, exchanges[each] = 0;
    }
    for (bool busy = true; busy;) {
        busy = false;
        for (unsigned warp = 0; warp < count / 32; warp++) {
            seed = seed * 1103515245u + 12345u;
            bool skipped = seed >> 30 == 0;
            for (unsigned lane = 0; lane < 32; lane++) {
                threadIdx.x = warp * 32 + lane;
                if (!ended[threadIdx.x] && !skipped) swapcontext(&caller, &threads[threadIdx.x]);
                busy |= !ended[warp * 32 + lane];
            }
        }
    }
}
"""


def compiled(name: str, run: str, folder: Path) -> ctypes.CDLL:
    """Return a library of the source `name`.cu with a function that runs it; skip where nothing compiles C++."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here to compile the kernels' source with")
    source = (FOLDER / f"{name}.cu").read_text()
    file, library = folder / f"{name}.cpp", folder / f"{name}.so"
    file.write_text(SHIM + source + run)
    # An access that a GPU would refuse, because its address is not aligned, ends the process here too.
    checks = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    options = ("-O2", "-std=c++17", "-shared", "-fPIC", "-w", *checks, f"-I{FOLDER}")
    subprocess.run([compiler, *options, file, "-o", library], check=True)
    return ctypes.CDLL(str(library))
