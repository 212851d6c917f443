"""What `tensorhub doctor` makes of what it found about the ways between hosts; and probes that hang or crash."""

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tensorhub.cli.doctor import transport_probes, ucx_probe
from tensorhub.cli.doctor.finding import Finding
from tensorhub.cli.doctor.transport_probes import Probe
from tensorhub.cli.doctor.transports import (
    CUDA,
    SHARED,
    SHARED_UNSAFE,
    VERBS,
    Gpus,
    ProbeCase,
    ProbeFailed,
    ProbeRun,
    Rdma,
    Transferred,
    Transports,
    Ucx,
    findings,
)

WHEEL = Ucx(
    "0.52.0", "1.21.0", "/v/lib/python3/site-packages/libucx/lib/libucp.so", ("tcp", "sysv", "cma"), ("tcp/eth0",)
)
HOST = Ucx("0.52.0", "1.20.0", "/usr/lib/libucp.so.0", ("tcp", "ib", "rdmacm"), ("tcp/eth0", "rc_mlx5/mlx5_0:1"))
MLX = Rdma(devices=("mlx5_0",), active=("mlx5_0",), nodes=("/dev/infiniband/uverbs0",))


def tried(name: str, result: Transferred | ProbeFailed, **settings: str) -> ProbeRun:
    return ProbeRun(ProbeCase(name, settings), result)


def segment(size: str, gbps: float) -> ProbeRun:
    return tried(f"tcp {size}", Transferred(gbps, ("tcp/lo",)), UCX_TCP_TX_SEG_SIZE=size)


def found(**changes: Any) -> Transports:
    """A host where all is well: TCP between hosts, neither RDMA nor GPUs."""
    well = Transports(
        ucx=WHEEL,
        host_ucx=None,
        tried=(
            segment("64k", 1.3),
            segment("512k", 3.1),
            tried(SHARED, Transferred(3.0, ("tcp/lo",))),
            tried(SHARED_UNSAFE, Transferred(6.6, ("sysv/memory", "cma/memory"))),
        ),
        rdma=Rdma(),
        gpus=Gpus(),
        settings={},
    )
    return msgspec.structs.replace(well, **changes)


def judged(**changes: Any) -> dict[str, Finding]:
    said = list(findings(found(**changes)))
    assert all(bool(each.advice) == (each.level != "ok") for each in said)
    assert len({each.check for each in said}) == len(said)
    return {each.check: each for each in said}


def test_a_host_with_tcp_alone_is_well() -> None:
    said = judged()
    assert {each.level for each in said.values()} == {"ok"}
    assert "without verbs" in said["ucx"].found
    assert "3.1 GB/s" in said["ucx tcp"].found
    assert "with error handling UCX takes tcp/lo instead" in said["ucx shm"].found
    assert "6.6 GB/s over sysv/memory, cma/memory" in said["ucx shm"].found


def test_no_ucx_is_no_failure_for_a_host_that_needs_none() -> None:
    said = judged(ucx=ProbeFailed("No module named 'libucx'"), tried=())
    assert said["ucx"].level == "warn"
    assert "tensorhub[agent]" in said["ucx"].advice


def test_tcp_that_carries_nothing_fails() -> None:
    dead = tuple(tried(f"tcp {size}", ProbeFailed("it was ended by SIGSEGV")) for size in ("64k", "512k"))
    said = judged(tried=dead, settings={"UCX_NET_DEVICES": "eth9"})
    assert said["ucx tcp"].level == "fail"
    assert "SIGSEGV" in said["ucx tcp"].found
    assert "UCX_NET_DEVICES=eth9" in said["ucx tcp"].found


@pytest.mark.parametrize(("told", "level"), [("64k", "warn"), ("512k", "ok"), ("8k", "ok"), ("", "ok")])
def test_segments_are_held_against_what_the_agents_were_told(told: str, level: str) -> None:
    said = judged(settings={"UCX_TCP_TX_SEG_SIZE": told})["tcp segments"]
    assert said.level == level
    assert level == "ok" or "UCX_TCP_TX_SEG_SIZE=512k" in said.advice


@pytest.mark.parametrize(
    ("rdma", "word"),
    [
        (msgspec.structs.replace(MLX, active=()), "ibv_devinfo"),
        (msgspec.structs.replace(MLX, nodes=()), "ib_uverbs"),
        (msgspec.structs.replace(MLX, denied=MLX.nodes), "udev"),
        (msgspec.structs.replace(MLX, locked_bytes_max=65536), "memlock"),
    ],
)
def test_an_rdma_device_that_may_not_be_used(rdma: Rdma, word: str) -> None:
    """What bars the way to the device is said before anything else of it."""
    said = judged(rdma=rdma, ucx=HOST)["rdma"]
    assert said.level == "warn"
    assert word in said.advice
    assert word in judged(rdma=rdma, ucx=ProbeFailed("gone"), tried=())["rdma"].advice


def test_a_device_and_a_ucx_without_verbs() -> None:
    """The host's UCX is the way out; whether there is one was tried too."""
    with_verbs = judged(rdma=MLX, host_ucx=HOST)["rdma"]
    assert (with_verbs.level, "/usr/lib/libucp.so.0" in with_verbs.advice) == ("warn", True)
    assert "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true" in with_verbs.advice
    for host in (None, WHEEL, ProbeFailed("Support for UCX 1.13.1 has ended")):
        assert judged(rdma=MLX, host_ucx=host)["rdma"].advice.startswith("install UCX 1.19 or newer")
    assert "1.13.1" in judged(rdma=MLX, host_ucx=ProbeFailed("Support for UCX 1.13.1 has ended"))["rdma"].found


def test_verbs_count_only_if_the_bytes_went_over_them() -> None:
    lanes = Transferred(24.0, ("rc_mlx5/mlx5_0:1",))
    assert (
        "24.0 GB/s over rc_mlx5"
        in judged(rdma=MLX, ucx=HOST, tried=(segment("64k", 1), tried(VERBS, lanes)))["rdma"].found
    )
    for other in (Transferred(3.0, ("tcp/lo",)), ProbeFailed("nothing came within 8 s")):
        assert judged(rdma=MLX, ucx=HOST, tried=(segment("64k", 1), tried(VERBS, other)))["rdma"].level == "warn"
    assert judged(rdma=MLX, ucx=HOST)["rdma"].level == "warn"


def test_gpus() -> None:
    h100 = Gpus(names=("H100 (80.0 GiB)",))
    cuda = msgspec.structs.replace(WHEEL, components=("tcp", "cuda_cpy", "cuda_ipc"))
    well = Transferred(100.0, ("cuda_ipc/cuda",))
    assert judged(gpus=Gpus(why="no driver", has_nodes=True))["gpu"].level == "warn"
    assert "CUDA 13" in judged(gpus=h100)["gpu"].advice
    assert judged(gpus=h100, ucx=cuda)["gpu"].level == "warn"
    said = judged(gpus=h100, ucx=cuda, tried=(segment("64k", 1), tried(CUDA, well)))["gpu"]
    assert (said.level, "100.0 GB/s over cuda_ipc/cuda" in said.found) == ("ok", True)


# ------------------------------------------------------------------------------------------------------ the processes


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put another program in the probe's place."""

    def make(program: str) -> Probe:
        path = tmp_path / "probe.py"
        path.write_text(program)
        monkeypatch.setattr(ucx_probe, "__file__", str(path))
        return Probe(sys.executable, {})

    return make


WAY = ProbeCase("tcp", {"UCX_TLS": "tcp"})


def test_a_probe_that_crashes_is_a_finding(probe: Any) -> None:
    crashing = probe(
        "import os, signal\nprint('x:1 UCX  ERROR no such device', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)"
    )
    assert crashing.carry(WAY) == ProbeFailed("it was ended by SIGSEGV: no such device")
    assert crashing.about({}) == crashing.carry(WAY)


def test_a_probe_that_hangs_is_ended_with_its_child(
    probe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_probes, "TRY_S", 2.0)
    hanging = probe(f"""
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    open({str(tmp_path / "child")!r}, "w").write(str(child))
signal.pause()
""")
    assert "hung" in hanging.carry(WAY).why
    deadline = time.monotonic() + 10
    while is_alive(int((tmp_path / "child").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_lanes_are_those_ucx_chose_last(probe: Any) -> None:
    carried = probe("""
print("UCX  INFO  inter-node cfg#0 tag(tcp/lo)  am(tcp/lo)")
print("UCX  INFO  intra-node cfg#1 tag(sysv/memory cma/memory)  rma(sysv/memory)")
print('{"seconds": 0.01}')
""").carry(WAY)
    assert carried.lanes == ("sysv/memory", "cma/memory")
    assert carried.gbps == pytest.approx(6.7, abs=0.1)
    assert probe('print(\'{"why": "no"}\')').carry(WAY) == ProbeFailed("no")
    assert probe("raise SystemExit(3)").carry(WAY) == ProbeFailed("it ended with code 3")


def test_an_interpreter_that_is_not_there_is_a_finding() -> None:
    assert isinstance(Probe("/nowhere/python", {}).about({}), ProbeFailed)
