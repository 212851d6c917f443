"""Finds out which ways for bytes work here, by bringing some over each of them.

Each try is a process of its own with a bound, run by the interpreter and with the UCX settings of the agents that run
here: a UCX that hangs or crashes is a finding. Nothing is judged here; see `transport_advice`.
"""

import contextlib
import importlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from tensorhub.cli.doctor import transports as advice
from tensorhub.cli.doctor import ucx_probe
from tensorhub.cli.doctor.transports import Gpus, ProbeCase, ProbeFailed, ProbeRun, Rdma, Transferred, Transports, Ucx
from tensorhub.cli.output import size
from tensorhub_common.protocol.decoding import MALFORMED

NBYTES: Final = 64 << 20
TRY_S: Final = 20.0
"""The probe gives up by itself before; this is for one that hangs."""

SEGMENTS_TRIED: Final = ("64k", "512k", "1m")
RDMA_DEVICES: Final = Path("/sys/class/infiniband")
RDMA_NODES: Final = Path("/dev/infiniband")
NVIDIA_NODES: Final = "nvidia[0-9]*"
KEPT: Final = ("UCX_", "RAPIDS_", "CUDA_", "NVIDIA_", "LD_LIBRARY_PATH", "LD_PRELOAD")

# UCX says once for each pair of processes which lanes it has chosen, the last time when it knows its peer.
_LANES: Final = re.compile(r" tag\(([^)]*)\)")
_COMPLAINT: Final = re.compile(r"UCXX?\s+ERROR\s+(.*)")


WHY_CHARS_MAX: Final = 200

Result = TypeVar("Result", Ucx, "_Sent")


class _Sent(msgspec.Struct, frozen=True):
    seconds: float


def find(agent: Mapping[str, str] | None, interpreter: str | None) -> Transports:
    """Try everything. `agent` is the environment of an agent that runs here, with its interpreter, if there is one."""
    environment = _environment(os.environ if agent is None else agent)
    probe = Probe(interpreter or sys.executable, environment)
    ucx = probe.about({})
    rdma, gpus = _rdma(), _gpus()
    host = None
    if rdma.devices and isinstance(ucx, Ucx) and not ucx.has_verbs:
        host = probe.host_ucx()
    tried: tuple[ProbeRun, ...] = ()
    if isinstance(ucx, Ucx):
        tried = tuple(ProbeRun(way, probe.carry(way)) for way in _ways(ucx, rdma, gpus))
    settings = {name: text for name, text in environment.items() if name.startswith("UCX_")}
    return Transports(ucx=ucx, host_ucx=host, tried=tried, rdma=rdma, gpus=gpus, settings=settings)


def _ways(ucx: Ucx, rdma: Rdma, gpus: Gpus) -> Iterator[ProbeCase]:
    """Yield what is worth a try here. Without another device than TCP's, a failure would tell nothing new."""
    for segment in SEGMENTS_TRIED:
        yield ProbeCase(f"{advice.TCP} {segment}", {"UCX_TLS": "tcp", **dict.fromkeys(advice.SEGMENTS, segment)})
    shared = {"UCX_TLS": "sm,tcp"}
    yield ProbeCase(advice.SHARED, shared)
    yield ProbeCase(advice.SHARED_UNSAFE, shared, errors=False)
    if rdma.devices and ucx.has_verbs:
        yield ProbeCase(advice.VERBS, {"UCX_TLS": "rc,ud,tcp"})
    if gpus.names and ucx.has_cuda:
        yield ProbeCase(advice.CUDA, {"UCX_TLS": "all"}, memory="cuda")


class Probe:
    """Runs `ucx_probe.py`."""

    def __init__(self, interpreter: str, environment: Mapping[str, str]) -> None:
        self._command = (interpreter, "-I", ucx_probe.__file__)
        self._environment = environment

    def about(self, more: Mapping[str, str]) -> Ucx | ProbeFailed:
        """Load a UCX."""
        answer, _ = self._run(more, "about")
        return _decoded(answer, Ucx) if isinstance(answer, bytes) else answer

    def host_ucx(self) -> Ucx | ProbeFailed | None:
        """Load the host's own UCX; without one the loader takes the wheel's."""
        found = self.about({advice.PREFER_HOST: "true"})
        return None if isinstance(found, Ucx) and found.from_wheel else found

    def carry(self, way: ProbeCase) -> Transferred | ProbeFailed:
        """Bring bytes over one way."""
        errors = "on" if way.errors else "off"
        answer, log = self._run(way.settings | {"UCX_LOG_LEVEL": "info"}, "send", str(NBYTES), errors, way.memory)
        sent = _decoded(answer, _Sent) if isinstance(answer, bytes) else answer
        if isinstance(sent, ProbeFailed):
            return sent
        lanes = _LANES.findall(log)
        return Transferred(NBYTES / 1e9 / sent.seconds, tuple(lanes[-1].split()) if lanes else ())

    def _run(self, more: Mapping[str, str], *arguments: str) -> tuple[bytes | ProbeFailed, str]:
        """Return the last line of stdout, which is the result, and all that was written."""
        try:
            process = subprocess.Popen(
                [*self._command, *arguments],
                env={**self._environment, **more},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return ProbeFailed(str(error)), ""
        try:
            log, _ = process.communicate(timeout=TRY_S)
        except subprocess.TimeoutExpired:
            return ProbeFailed(f"it hung, and was ended after {TRY_S:g} s"), ""
        finally:
            # The probe has a child; both end now.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        text = log.decode(errors="replace")
        answer = next((line for line in reversed(log.splitlines()) if line.startswith(b"{")), None)
        if answer is None or process.returncode:
            return ProbeFailed(_ended(process.returncode, text)), text
        return answer, text


def _decoded(answer: bytes, what: type[Result]) -> Result | ProbeFailed:
    try:
        return msgspec.json.decode(answer, type=what)
    except MALFORMED:
        return msgspec.json.decode(answer, type=ProbeFailed)


def _ended(code: int, text: str) -> str:
    """Say how a probe ended that gave no answer."""
    how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"
    complaints = _COMPLAINT.findall(text) or [line for line in text.splitlines() if line.strip()]
    return f"{how}: {complaints[-1].strip()[:WHY_CHARS_MAX]}" if complaints else how


def _environment(agent: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with what of the agents' decides how UCX behaves."""
    own = {name: text for name, text in os.environ.items() if not name.startswith(KEPT)}
    return {**own, **{name: text for name, text in agent.items() if name.startswith(KEPT)}}


def _rdma() -> Rdma:
    devices = sorted(entry.name for entry in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []
    nodes = sorted(str(path) for path in RDMA_NODES.glob("uverbs*"))
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Rdma(
        devices=tuple(devices),
        active=tuple(name for name in devices if _has_active_port(RDMA_DEVICES / name)),
        nodes=tuple(nodes),
        denied=tuple(node for node in nodes if not os.access(node, os.R_OK | os.W_OK)),
        locked_bytes_max=None if limit == resource.RLIM_INFINITY else limit,
    )


def _has_active_port(device: Path) -> bool:
    """Look whether a port says `4: ACTIVE`."""
    return any("ACTIVE" in state.read_text() for state in device.glob("ports/*/state"))


def _gpus() -> Gpus:
    has_nodes = any(Path("/dev").glob(NVIDIA_NODES))
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        names = [
            f"{nvml.nvmlDeviceGetName(each)} ({size(nvml.nvmlDeviceGetMemoryInfo(each).total)})" for each in handles
        ]
    except Exception as error:  # noqa: BLE001 (without a driver it fails in ways of its own)
        return Gpus(why=" ".join(str(error).split()) or type(error).__name__, has_nodes=has_nodes)
    return Gpus(names=tuple(names), has_nodes=has_nodes)
