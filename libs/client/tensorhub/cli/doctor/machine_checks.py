"""What `tensorhub doctor` finds out about this machine, by trying rather than by guessing from versions."""

import importlib
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from tensorhub.cli.doctor.finding import Finding, fail, ok, warn
from tensorhub.cli.doctor.gpu_checks import gpus
from tensorhub.cli.local_processes import running_agents
from tensorhub.cli.output import size
from tensorhub.local.nats_server import find_program
from tensorhub_common.config.settings import Settings, unknown_variables
from tensorhub_common.errors import TensorHubError

PYTHON_MIN: Final = (3, 11)
PROBE_S: Final = 10.0
AGENT_NEEDS: Final = ("ml_dtypes", "uvloop", "xxhash")
"""What an agent can't do without, and this package can."""
SERVER_NEEDS: Final = ("opentelemetry.sdk", "uvloop", "xxhash")
"""The same of a registry, a planner and a rollout manager."""
FREE_BYTES_MIN: Final = 1 << 30
"""Less free shared memory than this holds no model worth moving."""

HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
TUNABLES: Final = "GLIBC_TUNABLES"
NON_TEMPORAL: Final = "x86_non_temporal_threshold"


def machine(settings: Settings) -> Iterator[Finding]:
    """Yield what there is to say, one finding for each check."""
    yield _python()
    yield _nats_server()
    yield _shared_memory(settings)
    yield _huge_pages()
    yield _copying(settings)
    yield _agents_needs()
    yield _torch()
    yield from gpus()
    for sentence in unknown_variables(os.environ):
        yield warn("settings", sentence, "take it out of the environment, or name the setting that is meant")


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
        return fail(
            "nats-server", f"it can't be run: {error}", "'tensorhub up' needs it; a hub on other hosts does not"
        )
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


def _huge_pages() -> Finding:
    """Tell what is so; whether large pages pay is for a measurement on the machine itself."""
    try:
        chosen = HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError as error:
        return ok("huge pages", f"the kernel has none for shared memory ({error.strerror})")
    return ok("huge pages", f"shared memory: {chosen}, unless its file system is mounted with huge=…")


def _copying(settings: Settings) -> Finding:
    """Look into the running agents, since their environment counts and not this shell's."""
    if platform.machine() != "x86_64":
        return ok("copying", f"{platform.machine()} needs no tunable")
    environments = [agent.environment for agent in running_agents(settings)]
    known = environments or [dict(os.environ)]
    whose = "every agent" if environments else "this shell"
    if all(NON_TEMPORAL in each.get(TUNABLES, "") for each in known):
        return ok("copying", f"{whose} has {TUNABLES}={known[0][TUNABLES]}")
    return warn(
        "copying",
        f"{'an agent' if environments else 'this shell'} has no {TUNABLES} for large copies",
        f"start agents with {TUNABLES}=glibc.cpu.{NON_TEMPORAL}=0x80000: copies of pieces may be faster; measure",
    )


def _agents_needs() -> Finding:
    """Look for what an agent can't do without; a host that only asks needs none of it."""
    missing = [name for name in AGENT_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        advice = "pip install 'tensorhub[agent]', unless no agent is to run on this host"
        return warn("agent's needs", f"{', '.join(missing)} can't be imported, so no agent can run here", advice)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in AGENT_NEEDS)
    return ok("agent's needs", versions)


def _torch() -> Finding:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # noqa: BLE001 (a broken installation fails in any way it likes)
        return warn(
            "torch", f"it can't be imported: {error}", "pip install 'tensorhub[torch]', unless this host has no weights"
        )
    cuda = f"{torch.cuda.device_count()} GPU(s)" if torch.cuda.is_available() else "no GPU"
    return ok("torch", f"{torch.__version__}, {cuda}")
