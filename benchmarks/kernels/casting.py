"""How fast the casts are, beside one memcpy of the source and torch's own cast on one thread, in the same run.

    python benchmarks/kernels/casting.py [--mib 256] [--rounds 7] [--busy] [--threads 1]

Bytes are those of the source. A round runs every contender once, and a ratio is that of two runs of one round, so that
what else the machine does at the time falls on both; above 1 is faster. torch's fp8 with scales is the engine's formula
in eager torch. `--busy` lets another thread compute in Python all the while, as an event loop under load does; every
pass over a block must then win the GIL back. `--threads` cuts the work among threads, as a pool of them would.
"""

import argparse
import ctypes
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import ml_dtypes
import numpy as np
import torch

from tensorhub_agent.casting.floats import Bits, bits_of
from tensorhub_agent.casting.fp8 import quantise
from tensorhub_agent.casting.kernels import BLOCK_ELEMENTS_MAX
from tensorhub_agent.casting.values import cast
from tensorhub_common.layout.casts import CASTABLE, fp8_scheme

MIB: Final = 1024 * 1024
COLUMNS: Final = 4096
PAIRS: Final = (
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("float32", "float8_e4m3fn"),
    ("bfloat16", "float32"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "bfloat16"),
    ("float8_e4m3fn", "bfloat16"),
    ("float64", "bfloat16"),
)
SCHEMES: Final = (("float32", "fp8-block-128"), ("bfloat16", "fp8-block-128"), ("bfloat16", "fp8-channel"))

Contender = Callable[[], object]

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


def source_of(dtype: str, mib: int) -> tuple[torch.Tensor, Bits]:
    """Return normal weights of [rows, COLUMNS], as torch's tensor and as our view of it."""
    rows = mib * MIB // CASTABLE[dtype] // COLUMNS // 128 * 128
    weights = (torch.randn(rows, COLUMNS) * 0.02).to(getattr(torch, dtype))
    view = weights.view(torch.uint8).numpy().view(bits_of(dtype))
    return weights, view


def by_threads(pool: ThreadPoolExecutor, threads: int, rows: int, work: Callable[[slice], object]) -> Contender:
    """Return the work cut into blocks of rows, one for each thread."""
    step = -(-rows // threads // 128) * 128
    parts = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
    return lambda: list(pool.map(work, parts)) if threads > 1 else work(slice(0, rows))


def value_casts(
    from_dtype: str, to_dtype: str, source: Bits, weights: torch.Tensor
) -> dict[str, Callable[..., object]]:
    """Return torch's cast and ours."""
    torch_out = torch.empty(weights.shape, dtype=getattr(torch, to_dtype))
    out = np.zeros(source.shape, bits_of(to_dtype))
    return {
        "torch": lambda: torch_out.copy_(weights),
        "ours": lambda part: cast(source[part], from_dtype, out[part], to_dtype),
    }


def fp8_casts(dtype: str, name: str, source: Bits, weights: torch.Tensor) -> dict[str, Callable[..., object]]:
    """Return the formula in torch and ours."""
    scheme = fp8_scheme(name)
    values, scales = np.zeros(source.shape, np.uint8), np.zeros(scheme.scales_shape(source.shape), np.float32)
    rows_of_block = scheme.block[0] or 1

    def eager() -> object:
        rows, columns = scheme.block[0] or weights.shape[0], scheme.block[1] or weights.shape[1]
        view = weights.view(-1, rows, weights.shape[1] // columns, columns)
        scale = view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
        return (view * (1.0 / scale)).to(torch.float8_e4m3fn), scale

    def ours(part: slice) -> None:
        blocks = slice(part.start // rows_of_block, -(-part.stop // rows_of_block))
        quantise(source[part], dtype, scheme, values[part], scales[blocks])

    return {"torch": eager, "ours": ours}


def measure(title: str, source: Bits, casts: dict[str, Callable[..., object]], options: argparse.Namespace) -> None:
    """Run the rounds of one cast and print its line."""
    copy = np.zeros_like(source)
    with ThreadPoolExecutor(options.threads) as pool:
        running: dict[str, Contender] = {
            "memcpy": partial(_memcpy, copy.ctypes.data, source.ctypes.data, source.nbytes),
            "torch": casts["torch"],
            "ours": by_threads(pool, options.threads, source.shape[0], casts["ours"]),
        }
        took: dict[str, list[float]] = {name: [] for name in running}
        for number in range(options.rounds + 1):
            for name, contender in running.items():
                begin = time.perf_counter()
                contender()
                if number:
                    took[name].append(time.perf_counter() - begin)
    speeds = [f"{source.nbytes / statistics.median(times) / 1e9:8.2f}" for times in took.values()]
    ratios = [
        statistics.median(theirs / ours for theirs, ours in zip(took[name], took["ours"], strict=True))
        for name in ("memcpy", "torch")
    ]
    print(f"{title:32}{''.join(speeds)}  {ratios[0]:8.2f} {ratios[1]:8.2f}")


def spin(stop: threading.Event) -> None:
    """Compute in Python without a pause."""
    while not stop.is_set():
        sum(range(100))


def print_settings(options: argparse.Namespace) -> None:
    """Say what a figure means nothing without."""
    print(f"source         {options.mib} MiB of [rows, {COLUMNS}], blocks of {BLOCK_ELEMENTS_MAX} elements")
    print(f"threads        ours {options.threads}, torch {torch.get_num_threads()}; GIL busy: {options.busy}")
    print(f"cores          {len(os.sched_getaffinity(0))}, load {os.getloadavg()[0]:.2f}, {platform.machine()}")
    print(f"numpy          {np.__version__}, ml_dtypes {ml_dtypes.__version__}, torch {torch.__version__}")
    print(f"switch         every {sys.getswitchinterval() * 1000:g} ms\n")
    print(f"{'GB/s of the source':32}{'memcpy':>8}{'torch':>8}{'ours':>8}  {'× memcpy':>8} {'× torch':>8}")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--switch-ms", type=float, default=0.5, help="as the agent sets it")
    options = parser.parse_args()
    sys.setswitchinterval(options.switch_ms / 1000)
    torch.set_num_threads(1)
    print_settings(options)
    stop = threading.Event()
    if options.busy:
        threading.Thread(target=spin, args=(stop,), daemon=True).start()
    try:
        for from_dtype, to_dtype in PAIRS:
            weights, source = source_of(from_dtype, options.mib)
            casts = value_casts(from_dtype, to_dtype, source, weights)
            measure(f"{from_dtype} → {to_dtype}", source, casts, options)
        for dtype, name in SCHEMES:
            weights, source = source_of(dtype, options.mib)
            measure(f"{dtype} → {name}", source, fp8_casts(dtype, name, source, weights), options)
    finally:
        stop.set()


if __name__ == "__main__":
    main()
