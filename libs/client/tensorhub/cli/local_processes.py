"""What the kernel of this machine says of a process of the hub: that it has ended, or that somebody has stopped it."""

from contextlib import suppress
from pathlib import Path

STOPPED = frozenset("Tt")
ENDED = frozenset("ZX")


def state_of(pid: int) -> str:
    """Return the letter of the process's state, "X" where there is none, and "" where it can't be told."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"
    except (OSError, IndexError):
        return ""


def has_ended(pid: int) -> bool:
    """Tell whether the process is gone. What has ended and was not waited for yet still has its number."""
    return state_of(pid) in ENDED


def why_silent(pid: int) -> str:
    """Say why a process of this machine does not answer, as far as the kernel knows; "" where it does not."""
    state = state_of(pid)
    if state in STOPPED:
        return f"process {pid} is stopped (kill -CONT {pid} wakes it)"
    if state in ENDED:
        return f"process {pid} has ended"
    return f"process {pid} runs; see its log" if state else ""


def last_line(log: Path, chars_max: int = 300) -> str:
    """Return the last line of a log; "" where there is none."""
    with suppress(OSError), log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:chars_max] if lines else ""
    return ""
