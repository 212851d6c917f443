"""What `tensorhub doctor` makes of what it found; a hub that does not answer, and probes that hang or crash."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.kit.waiting import is_alive, wait_until
from tests.unit.client.conftest import Run, python

from tensorhub.cli.doctor import hub_checks, transport_probes, ucx_probe
from tensorhub.cli.doctor.finding import Finding, ok
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


def test_without_a_hub_it_fails_and_says_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_checks, "CONNECT_S", 0.2)
    ended = run("doctor", "--quick", "--json")
    found = {each["check"]: each for each in ended.objects}
    assert (ended.code, found["nats"]["level"], found["python"]["level"]) == (1, "fail", "ok")
    assert "tensorhub up" in found["nats"]["advice"]
    assert found["torch"]["found"].startswith(torch.__version__)
    assert all(each["advice"] for each in ended.objects if each["level"] != "ok")
    assert "fail  nats" in run("doctor", "--quick").out


def test_it_ends_though_the_hub_does_not_answer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object) -> AsyncIterator[Finding]:
        yield ok("nats", "answers")
        await asyncio.Event().wait()

    monkeypatch.setattr("tensorhub.cli.commands.doctor.hub", silent)
    monkeypatch.setattr("tensorhub.cli.commands.doctor.HUB_S_MAX", 0.05)
    ended = run("doctor", "--quick", "--json")
    assert (ended.code, ended.objects[-1]["check"]) == (1, "hub")
    assert ended.objects[-1]["found"] == "its checks did not end within 0.05 s; nats was the last that did"


@pytest.mark.long
def test_where_nothing_is_installed_that_an_agent_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that only asks: it is warned that no agent can run here, and all else is looked at."""
    monkeypatch.setenv("TENSORHUB_NATS", "nats://127.0.0.1:1")
    without = "import sys; sys.modules |= dict.fromkeys(('uvloop', 'ml_dtypes', 'torch'))\n"
    ended = python(f"{without}from tensorhub.cli.main import main; main()", "doctor", "--quick", "--json")
    found = {each["check"]: each for each in map(msgspec.json.decode, ended.stdout.splitlines())}
    assert (ended.returncode, ended.stderr) == (1, "")
    needs = found["agent's needs"]
    assert needs["found"] == "ml_dtypes, uvloop can't be imported, so no agent can run here"
    assert "pip install 'tensorhub[agent]'" in needs["advice"]
    assert [found[each]["level"] for each in ("agent's needs", "torch", "nats")] == ["warn", "warn", "fail"]


# --------------------------------------------------------------------------------------------- ways between the hosts

WHEEL = Ucx("0.52.0", "1.21.0", "/v/libucx/lib/libucp.so", ("tcp", "sysv", "cma"), ("tcp/eth0",))
HOST = Ucx("0.52.0", "1.20.0", "/usr/lib/libucp.so.0", ("tcp", "ib", "rdmacm"), ("tcp/eth0", "rc_mlx5/mlx5_0:1"))
WITH_CUDA = msgspec.structs.replace(WHEEL, components=("tcp", "cuda_cpy", "cuda_ipc"))
MLX = Rdma(devices=("mlx5_0",), active=("mlx5_0",), nodes=("/dev/infiniband/uverbs0",))
H100 = Gpus(names=("H100 (80.0 GiB)",))
OLD = ProbeFailed("Support for UCX 1.13.1 has ended")
INSTALL = "install UCX 1.19 or newer"
TCP = "UCX_TCP_TX_SEG_SIZE"


def tried(name: str, result: Transferred | ProbeFailed, **settings: str) -> ProbeRun:
    return ProbeRun(ProbeCase(name, settings), result)


def segment(size: str, gbps: float) -> ProbeRun:
    return tried(f"tcp {size}", Transferred(gbps, ("tcp/lo",)), **{TCP: size})


def over(name: str, gbps: float, *lanes: str) -> tuple[ProbeRun, ...]:
    return segment("64k", 1), tried(name, Transferred(gbps, lanes))


DEAD = tuple(tried(f"tcp {size}", ProbeFailed("it was ended by SIGSEGV")) for size in ("64k", "512k"))
NOTHING_CAME = (segment("64k", 1), tried(VERBS, ProbeFailed("nothing came within 8 s")))
WELL = Transports(
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


def barred(**changes: Any) -> dict[str, Any]:
    return {"rdma": msgspec.structs.replace(MLX, **changes), "ucx": HOST}


@pytest.mark.parametrize(
    ("changes", "check", "level", "said"),
    [
        ({}, "ucx", "ok", "without verbs"),
        ({}, "ucx tcp", "ok", "3.1 GB/s"),
        ({}, "ucx shm", "ok", "with error handling UCX takes tcp/lo instead"),
        ({}, "ucx shm", "ok", "6.6 GB/s over sysv/memory, cma/memory"),
        # No UCX is no failure for a host that needs none.
        ({"ucx": ProbeFailed("No module named 'libucx'"), "tried": ()}, "ucx", "warn", "tensorhub[agent]"),
        ({"tried": DEAD, "settings": {"UCX_NET_DEVICES": "eth9"}}, "ucx tcp", "fail", "SIGSEGV"),
        ({"tried": DEAD, "settings": {"UCX_NET_DEVICES": "eth9"}}, "ucx tcp", "fail", "UCX_NET_DEVICES=eth9"),
        # Segments are held against what the agents were told.
        ({"settings": {TCP: "64k"}}, "tcp segments", "warn", f"{TCP}=512k"),
        *(({"settings": {TCP: told}}, "tcp segments", "ok", "") for told in ("512k", "8k", "")),
        # What bars the way to a device is said before anything else of it.
        (barred(active=()), "rdma", "warn", "ibv_devinfo"),
        (barred(nodes=()), "rdma", "warn", "ib_uverbs"),
        (barred(denied=MLX.nodes), "rdma", "warn", "udev"),
        (barred(locked_bytes_max=65536), "rdma", "warn", "memlock"),
        (barred(denied=MLX.nodes) | {"ucx": ProbeFailed("gone"), "tried": ()}, "rdma", "warn", "udev"),
        # For a UCX without verbs the host's is the way out; whether there is one was tried too.
        ({"rdma": MLX, "host_ucx": HOST}, "rdma", "warn", "/usr/lib/libucp.so.0"),
        ({"rdma": MLX, "host_ucx": HOST}, "rdma", "warn", "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"),
        *(({"rdma": MLX, "host_ucx": host}, "rdma", "warn", INSTALL) for host in (None, WHEEL, OLD)),
        ({"rdma": MLX, "host_ucx": OLD}, "rdma", "warn", "1.13.1"),
        # Verbs count only if the bytes went over them.
        ({**barred(), "tried": over(VERBS, 24.0, "rc_mlx5/mlx5_0:1")}, "rdma", "ok", "24.0 GB/s over rc_mlx5"),
        ({**barred(), "tried": over(VERBS, 3.0, "tcp/lo")}, "rdma", "warn", ""),
        ({**barred(), "tried": NOTHING_CAME}, "rdma", "warn", ""),
        (barred(), "rdma", "warn", ""),
        ({"gpus": Gpus(why="no driver", has_nodes=True)}, "gpu", "warn", ""),
        ({"gpus": H100}, "gpu", "warn", "CUDA 13"),
        ({"gpus": H100, "ucx": WITH_CUDA}, "gpu", "warn", ""),
        (
            {"gpus": H100, "ucx": WITH_CUDA, "tried": over(CUDA, 100.0, "cuda_ipc/cuda")},
            "gpu",
            "ok",
            "100.0 GB/s over cuda_ipc/cuda",
        ),
    ],
)
def test_what_was_found_about_ways_between_hosts(changes: dict[str, Any], check: str, level: str, said: str) -> None:
    told = {each.check: each for each in findings(msgspec.structs.replace(WELL, **changes))}
    assert all(bool(each.advice) == (each.level != "ok") for each in told.values())
    assert changes or {each.level for each in told.values()} == {"ok"}
    assert told[check].level == level
    assert said in f"{told[check].found} {told[check].advice}"


# ------------------------------------------------------------------------------------------------------ the processes

WAY = ProbeCase("tcp", {"UCX_TLS": "tcp"})


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put another program in the probe's place."""

    def make(program: str) -> Probe:
        path = tmp_path / "probe.py"
        path.write_text(program)
        monkeypatch.setattr(ucx_probe, "__file__", str(path))
        return Probe(sys.executable, {})

    return make


def test_a_probe_that_crashes_or_is_not_there_is_a_finding(probe: Any) -> None:
    crashing = probe("import os\nprint('x:1 UCX  ERROR no such device', flush=True)\nos.kill(os.getpid(), 11)")
    assert crashing.carry(WAY) == ProbeFailed("it was ended by SIGSEGV: no such device")
    assert crashing.about({}) == crashing.carry(WAY)
    assert probe('print(\'{"why": "no"}\')').carry(WAY) == ProbeFailed("no")
    assert probe("raise SystemExit(3)").carry(WAY) == ProbeFailed("it ended with code 3")
    assert isinstance(Probe("/nowhere/python", {}).about({}), ProbeFailed)


def test_a_probe_that_hangs_ends_with_its_child(probe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    wait_until(lambda: not is_alive(int((tmp_path / "child").read_text())))


def test_the_lanes_are_those_ucx_chose_last(probe: Any) -> None:
    carried = probe("""
print("UCX  INFO  inter-node cfg#0 tag(tcp/lo)  am(tcp/lo)")
print("UCX  INFO  intra-node cfg#1 tag(sysv/memory cma/memory)  rma(sysv/memory)")
print('{"seconds": 0.01}')
""").carry(WAY)
    assert carried.lanes == ("sysv/memory", "cma/memory")
    assert carried.gbps == pytest.approx(6.7, abs=0.1)
