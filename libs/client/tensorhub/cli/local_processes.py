"""The hub's processes on this machine, as its kernel shows them.

The kernel shows whether a process has ended or was stopped. Of each running agent it shows the environment and the
interpreter. The environment that an agent was started with decides how the agent copies and what UCX does. The shell of
the caller may have a different one.
"""

from contextlib import suppress
from pathlib import Path

import msgspec

from tensorhub._control.discovery import read_hub_file
from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import TensorHubError

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


class RunningAgent(msgspec.Struct, frozen=True):
    """One agent."""

    environment: dict[str, str]
    interpreter: str


def running_agents(settings: Settings) -> list[RunningAgent]:
    """Look at the agents of `hub.json`; those that are gone or belong to somebody else are left out."""
    try:
        hub = read_hub_file(settings.dir)
    except TensorHubError:
        return []
    found = [_agent(each.pid) for each in hub.agents] if hub is not None else []
    return [each for each in found if each is not None]


def _agent(pid: int) -> RunningAgent | None:
    process = Path(f"/proc/{pid}")
    try:
        environment = (process / "environ").read_bytes()
        program = (process / "cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return None
    if not environment or not program:
        return None
    pairs = (each.decode(errors="replace").partition("=") for each in environment.split(b"\0") if each)
    return RunningAgent({name: value for name, _, value in pairs}, program.decode(errors="replace"))
