"""The figures of a run as a page: each as a share of a limit that the same run has measured."""

from typing import NamedTuple

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.crossing import CrossingRates
from benchmarks.gpu.deltas import DeltaRow
from benchmarks.gpu.host_copy import HostCopyRates
from benchmarks.gpu.kernels import BoxRow, Row
from benchmarks.gpu.paths import Update
from benchmarks.gpu.processes import ProcessRates
from benchmarks.gpu.stall import Stall
from benchmarks.gpu.torch_ways import TorchRates


class Figures(NamedTuple):
    """All of one run."""

    machine: str
    ceilings: Ceilings
    kernels: list[Row]
    boxes: list[BoxRow]
    deltas: list[DeltaRow]
    processes: list[ProcessRates]
    crossing: CrossingRates
    host_copy: HostCopyRates
    torch: TorchRates
    updates: list[Update]
    stalls: list[Stall]


def of(found: Figures, seconds: float) -> str:
    """Return a run as Markdown."""
    limits = found.ceilings
    lines = [
        f"Measured on {found.machine}; one run of {seconds:.0f} s.",
        "",
        "| limit | GB/s |",
        "|---|---|",
        f"| copy within the GPU (each byte is read and written) | {limits.copy_bps / 1e9:.0f} |",
        f"| pinned host to GPU | {limits.to_gpu_bps / 1e9:.1f} |",
        f"| GPU to pinned host | {limits.from_gpu_bps / 1e9:.1f} |",
        f"| host that is not pinned to GPU | {limits.unpinned_to_gpu_bps / 1e9:.1f} |",
        f"| GPU to host that is not pinned | {limits.unpinned_from_gpu_bps / 1e9:.1f} |",
        f"| pinning, seconds a GiB | {limits.pin_s_per_gib:.3f} |",
        "",
        "| what | pieces of 4 MiB | GB/s | of the driver's copy |",
        "|---|---|---|---|",
        *(f"| {each.what} | {each.pieces} | {each.bps / 1e9:.0f} | {each.share:.2f} |" for each in found.kernels),
        "",
        "| boxes, with the wait | GB/s | of the driver's copy |",
        "|---|---|---|",
        *(f"| {each.what} | {each.bps / 1e9:.0f} | {each.share:.2f} |" for each in found.boxes),
        "",
        "| deltas | pieces of 4 MiB | values changed | GB/s of pieces | of the driver's copy |",
        "|---|---|---|---|---|",
        *(
            f"| {each.what} | {each.pieces} | {each.changed:.1%} | {each.bps / 1e9:.0f} | {each.share:.2f} |"
            for each in found.deltas
        ),
        "",
        "| memory of another process on this GPU | GB/s | of the driver's copy |",
        "|---|---|---|",
        *(line for each in found.processes for line in _of_processes(each)),
        "",
        "| copied and digested by the agent's pool | GB/s | of a pinned copy |",
        "|---|---|---|",
        _row("GPU to pinned host", found.crossing.to_host_bps, limits.from_gpu_bps),
        _row("pinned host to GPU", found.crossing.to_gpu_bps, limits.to_gpu_bps),
        "",
        "| tensors on a GPU, hub memory of the host | GB/s | of a pinned copy |",
        "|---|---|---|",
        _row("to hub memory, 256 tensors of 16 MiB", found.host_copy.to_host_bps, limits.from_gpu_bps),
        _row("from hub memory", found.host_copy.to_gpu_bps, limits.to_gpu_bps),
        "",
        "| torch's own ways, without digests | GB/s | of the driver's copy |",
        "|---|---|---|",
        _row("`copy_` in one process", found.torch.copy_bps, limits.copy_bps),
        _row("CUDA IPC between two processes, the first time", found.torch.ipc_first_bps, limits.copy_bps),
        _row("CUDA IPC again", found.torch.ipc_bps, limits.copy_bps),
        "",
        "| through a hub, two agents | GiB | publish, ms | update, ms | bytes under way, ms | GB/s |",
        "|---|---|---|---|---|---|",
        *(
            f"| {each.way} | {each.nbytes >> 30} | {each.publish_s * 1e3:.1f} | {each.update_s * 1e3:.1f} "
            f"| {each.wire_s * 1e3:.1f} | {each.rate_bps / 1e9:.1f} |"
            for each in found.updates
        ),
        "",
        "| an engine's steps, a new version each second | GiB | versions | alone, steps/s | meanwhile | kept |",
        "|---|---|---|---|---|---|",
        *(
            f"| memory {each.memory}, {each.install} | {each.nbytes / (1 << 30):.1f} | {each.updates} "
            f"| {each.steps_alone:.0f} | {each.steps_meanwhile:.0f} | {each.kept:.3f} |"
            for each in found.stalls
        ),
        "",
    ]
    return "\n".join(lines)


def _of_processes(found: ProcessRates) -> list[str]:
    size = f"{found.nbytes >> 30} GiB"
    return [
        _row(f"{size}, the driver's copy of this process's own", found.copy_bps, found.copy_bps),
        _row(f"{size}, the driver's copy of the other's", found.foreign_copy_bps, found.copy_bps),
        _row(f"{size}, copied and digested by the agent's pool", found.pool_bps, found.copy_bps),
        _row(f"{size}, digested where it is", found.digest_bps, found.copy_bps),
    ]


def _row(what: str, bps: float, limit_bps: float) -> str:
    return f"| {what} | {bps / 1e9:.1f} | {bps / limit_bps:.2f} |"
