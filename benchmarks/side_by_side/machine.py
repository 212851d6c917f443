"""What a figure means nothing without: the machine and the settings that it was taken with."""

import os
import platform
import resource
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from benchmarks.side_by_side import perftest
from tensorhub_common.config.settings import load


def facts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what to say about this machine and about a hub that is started with this environment."""
    settings = load(environment)
    return {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, L3 {_l3()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, {'-'.join(platform.libc_ver())}",
        "python": platform.python_version(),
        "GLIBC_TUNABLES": f"{environment.get('GLIBC_TUNABLES', '') or 'not set'} (here, in memcpy and in the agents)",
        "segments": f"{settings.shm_dir}, reserved and populated, mapped shared, huge pages: {_huge_pages()}",
        "digests": "xxh3_128 of each piece, taken in the destination",
        "copy threads": f"{settings.copy_threads or 'one for each core, at most 4'}, in each agent",
        "window": f"{settings.window_bytes // 2**20} MiB of one read in flight",
        "UCX": f"{_ucx()}; ucx_perftest with {_in_words(perftest.settings(environment))}, our agents likewise",
        "memory of the peers": "as the segments, but for ucx_perftest's own and Ray's store; no digests on any peer",
        "load at the start": f"{os.getloadavg()[0]:.2f}",
    }


def free_bytes() -> int:
    """Return how much memory may be taken."""
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _ucx() -> str:
    for name in ("libucx-cu13", "libucx-cu12"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _in_words(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(variables.items()))


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _l3() -> str:
    return _read("/sys/devices/system/cpu/cpu0/cache/index3/size") or "unknown"


def _huge_pages() -> str:
    text = _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


class Others:
    """How much of the processors other programs used meanwhile: the less, the more a figure means."""

    def __init__(self) -> None:
        self._began, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()

    def share(self) -> float:
        """Return the share since the beginning; children that still run count as others."""
        busy = _busy_s() - self._busy_s - (_own_s() - self._own_s)
        return max(0.0, busy / (time.monotonic() - self._began) / (os.cpu_count() or 1))


def _busy_s() -> float:
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, _read("/proc/stat").splitlines()[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
