"""`python -m benchmarks.gpu [--report FILE]`: kernels and ways through a hub on a GPU, as shares of its limits.

Everything is measured in one run: what the GPU and its bus can do, then what ours does of that, and torch's own ways.
"""

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import ceilings, crossing, deltas, host_copy, kernels, paths, processes, report, stall, torch_ways
from tensorhub_common.devices.cuda import cuda_device
from tensorhub_common.devices.device import DeviceUnavailable


def main() -> None:
    """Measure, print a report, and write it where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--report", type=Path, help="write the report as Markdown, as in --report gpu.md")
    parser.add_argument("--json", type=Path, help="write the figures as JSON, as in --json gpu.json")
    parser.add_argument("--gib", type=int, default=4, help="the size of what goes through the hub, in GiB (4)")
    options = parser.parse_args()
    try:
        device = cuda_device(0)
    except DeviceUnavailable as why:
        sys.exit(f"benchmarks.gpu needs a GPU: {why}")
    began = time.perf_counter()
    found = report.Figures(
        machine=f"{torch.cuda.get_device_name(0)}, {platform.platform()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
        ceilings=_told(ceilings.measure(device)),
        kernels=_told(kernels.measure(device, (1, 128, 1024))),
        boxes=_told(kernels.boxes(device)),
        deltas=_told(deltas.measure(device)),
        processes=_told([processes.measure(device, gib << 30) for gib in (2, 8, 16)]),
        crossing=_told(crossing.measure(device)),
        host_copy=_told(host_copy.measure(device)),
        torch=_told(torch_ways.measure()),
        updates=_told(asyncio.run(_through_a_hub(options.gib << 30))),
        stalls=_told(asyncio.run(_stalls())),
    )
    text = report.of(found, time.perf_counter() - began)
    print(text)
    if options.report is not None:
        options.report.write_text(text)
    if options.json is not None:
        options.json.write_text(json.dumps(_plain(found), indent=1))


def _told(found: Any) -> Any:  # noqa: ANN401 (any figures)
    """Show a part of the figures as it comes: a run that is cut off has said as much as it knew."""
    print(found, file=sys.stderr, flush=True)
    return found


async def _through_a_hub(nbytes: int) -> list[paths.Update]:
    with tempfile.TemporaryDirectory(prefix="tensorhub-gpu-") as folder:
        return await paths.measure_all(Path(folder), nbytes)


async def _stalls() -> list[stall.Stall]:
    found = []
    with tempfile.TemporaryDirectory(prefix="tensorhub-gpu-") as folder:
        async with paths.two_agents(Path(folder)) as hub:
            for memory, install in stall.KINDS:
                found.append(await asyncio.to_thread(stall.measure, hub, memory, install, 128, 4.0))
    return found


def _plain(value: Any) -> Any:  # noqa: ANN401 (any figures)
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
