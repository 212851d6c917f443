"""What doctor says of GPUs, from what a driver and the kernel's tree of buses would say."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tensorhub.cli.doctor import gpu_checks
from tensorhub.cli.doctor.finding import Finding
from tensorhub_common.devices.device import DeviceError
from tensorhub_common.devices.fake import FakeDevice

GPU = "0000:1b:00.0"


@dataclass
class Gpu:
    """A GPU as far as it is asked."""

    ordinal: int = 0
    capability: tuple[int, int] = (9, 0)
    shares: bool = True
    direct: int = 1
    reached: set[int] = field(default_factory=set)
    uuid: str = "GPU-1"

    def attribute(self, name: str) -> int:
        assert name == "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"
        return self.direct

    def pci_address(self) -> str:
        return GPU

    def reaches(self, other: "Gpu") -> bool:
        return other.ordinal in self.reached

    def allocate(self, nbytes: int) -> Any:
        if not self.shares:
            raise DeviceError("cuMemCreate failed: not supported")
        return FakeDevice().allocate(nbytes)

    def free_bytes(self) -> int:
        return 70 << 30

    def total_bytes(self) -> int:
        return 80 << 30


@pytest.mark.parametrize(
    ("gpu", "level", "found"),
    [
        (Gpu(), "ok", "can be shared by descriptors"),
        (Gpu(shares=False), "warn", "can't be shared between processes: cuMemCreate failed"),
        (Gpu(capability=(7, 0)), "warn", "compute capability 7.0 is too old"),
    ],
)
def test_memory_is_tried(gpu: Any, level: str, found: str) -> None:
    finding = gpu_checks.memory_of(gpu)
    assert (finding.check, finding.level) == ("gpu 0", level)
    assert found in finding.found
    assert bool(finding.advice) == (level == "warn")


def test_peers_that_do_not_reach_each_other_are_named() -> None:
    gpus: Any = [Gpu(0, reached={1, 2}), Gpu(1, reached={0, 2}), Gpu(2, reached={0, 1})]
    assert gpu_checks.peers(gpus).level == "ok"
    gpus[2].reached = {0}
    finding = gpu_checks.peers(gpus)
    assert (finding.level, finding.found) == ("warn", "no peer access between GPUs 1 and 2")


def machine(folder: Path, nics: dict[str, tuple[str, int]]) -> tuple[Path, Path]:
    """Make a tree of buses: the GPU on node 0, behind a bridge; NICs by their paths below a root, and their nodes."""
    pci, rdma, root = folder / "pci", folder / "infiniband", folder / "devices"
    for each in (pci, rdma):
        each.mkdir()
    places = {GPU: ("pci0000:17/0000:17:01.0/0000:18:00.0/" + GPU, 0), **nics}
    for name, (place, node) in places.items():
        device = root / place
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        if name == GPU:
            (pci / name).symlink_to(device)
        else:
            (rdma / name).mkdir()
            (rdma / name / "device").symlink_to(device)
    return pci, rdma


NEAR = ("pci0000:17/0000:17:01.0/0000:18:01.0/0000:1c:00.0", 0)
SAME_NODE = ("pci0000:31/0000:31:01.0/0000:32:00.0", 0)
SAME_ROOT = ("pci0000:17/0000:17:05.0/0000:19:00.0", 0)
FAR = ("pci0000:b1/0000:b1:01.0/0000:b2:00.0", 1)


def found(folder: Path, nics: dict[str, tuple[str, int]], direct: int = 1) -> Finding:
    gpu: Any = Gpu(direct=direct)
    return gpu_checks.nics_of(gpu, *machine(folder, nics))


def test_nics_behind_the_same_bridge_are_near(tmp_path: Path) -> None:
    finding = found(tmp_path, {"mlx5_0": FAR, "mlx5_1": NEAR, "mlx5_2": SAME_NODE})
    assert finding.level == "ok"
    assert finding.found == "mlx5_1 behind the same PCIe bridge, which can reach its memory (GPUDirect)"


@pytest.mark.parametrize("place", [SAME_NODE, SAME_ROOT])
def test_nics_of_the_same_node_are_the_next_best(tmp_path: Path, place: tuple[str, int]) -> None:
    finding = found(tmp_path, {"mlx5_0": FAR, "mlx5_2": place}, direct=0)
    assert finding.level == "ok"
    assert finding.found.startswith("mlx5_2 on the same NUMA node, which can't reach its memory: no GPUDirect")


def test_nics_that_are_all_far_away_are_a_warning(tmp_path: Path) -> None:
    finding = found(tmp_path, {"mlx5_0": FAR})
    assert (finding.level, "mlx5_0 on another NUMA node" in finding.found) == ("warn", True)
    assert "UCX_NET_DEVICES" in finding.advice


def test_without_rdma_it_says_where_bytes_go(tmp_path: Path) -> None:
    assert "pass through the host's memory" in found(tmp_path, {}).found
