"""What `tensorhub doctor` finds out about GPUs as memory of the hub: each is tried, and looked up among the buses."""

import importlib.util
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tensorhub.cli.doctor.finding import Finding, ok, warn
from tensorhub.cli.output import size
from tensorhub_common.devices.cuda import CAPABILITY_MIN, CudaDevice, cuda_devices
from tensorhub_common.devices.device import DeviceError, DeviceUnavailable

PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
RDMA_DEVICES: Final = Path("/sys/class/infiniband")
_PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")


def gpus() -> Iterator[Finding]:
    """Yield what there is to say of all GPUs that this process sees."""
    try:
        devices = cuda_devices()
    except DeviceUnavailable as why:
        yield ok("gpus", f"none for weights: {why}")
        return
    if importlib.util.find_spec("cupy") is None:
        advice = "pip install 'tensorhub[agent,cuda]'; memory='host' works without it"
        yield warn("gpus", "cupy can't be imported, so no agent can have memory of a GPU", advice)
    for device in devices:
        yield memory_of(device)
        yield nics_of(device)
    if len(devices) > 1:
        yield peers(devices)


def memory_of(device: CudaDevice) -> Finding:
    """Tell whether hub memory can be on a GPU: this process exports a few bytes there, as an agent does."""
    name = f"gpu {device.ordinal}"
    found = f"{device.uuid}, {size(device.free_bytes())} of {size(device.total_bytes())} free"
    host = "register with memory='host'"
    if device.capability < CAPABILITY_MIN:
        version = ".".join(map(str, device.capability))
        return warn(name, f"{found}; its compute capability {version} is too old for memory='device'", host)
    try:
        memory = device.allocate(1)
        os.close(memory.export())
        memory.close()
    except DeviceError as why:
        return warn(name, f"{found}; its memory can't be shared between processes: {why}", host)
    return ok(name, f"{found}; its memory can be shared by descriptors")


def peers(devices: Sequence[CudaDevice]) -> Finding:
    """Tell which GPUs can't read each other's memory."""
    apart = [
        f"{one.ordinal} and {other.ordinal}"
        for one, other in itertools.combinations(devices, 2)
        if not (one.reaches(other) and other.reaches(one))
    ]
    if not apart:
        return ok("gpu peers", f"all {len(devices)} GPUs reach each other's memory")
    return warn(
        "gpu peers",
        f"no peer access between GPUs {', '.join(apart)}",
        "bytes between them pass through the host: look at nvidia-smi topo -p2p r, and at ACS and IOMMU in the BIOS",
    )


def nics_of(device: CudaDevice, pci: Path = PCI_DEVICES, rdma: Path = RDMA_DEVICES) -> Finding:
    """Tell which RDMA devices are near a GPU, and whether they can reach its memory by themselves."""
    name = f"gpu {device.ordinal} nics"
    gpu = pci / device.pci_address()
    entries = sorted(rdma.iterdir()) if rdma.is_dir() else []
    if not entries:
        return ok(name, "there is no RDMA device here, so bytes to other hosts pass through the host's memory")
    near, same_node = [], []
    for entry in entries:
        nic = entry / "device"
        if _are_behind_one_bridge(gpu, nic):
            near.append(entry.name)
        elif _numa_node(gpu) == _numa_node(nic):
            same_node.append(entry.name)
    direct = device.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
    reach = "which can reach its memory (GPUDirect)" if direct else "which can't reach its memory: no GPUDirect"
    if near:
        return ok(name, f"{', '.join(near)} behind the same PCIe bridge, {reach}")
    if same_node:
        return ok(name, f"{', '.join(same_node)} on the same NUMA node, {reach}; none behind the same PCIe bridge")
    return warn(
        name,
        f"{', '.join(each.name for each in entries)} on another NUMA node alone, {reach}",
        "bytes to other hosts cross the link between the processors: if the machine has nearer NICs, name them in "
        "UCX_NET_DEVICES",
    )


def _are_behind_one_bridge(gpu: Path, nic: Path) -> bool:
    """Whether two devices are behind one bridge. A device's path has every bridge above it, from the bus's root on."""
    above = Path(os.path.commonpath([gpu.resolve().parent, nic.resolve().parent]))
    return any(_PCI_ADDRESS.fullmatch(part) for part in above.parts)


def _numa_node(device: Path) -> str:
    try:
        return (device / "numa_node").read_text().strip()
    except OSError:
        return ""
