"""The agents that run on this machine, as the kernel shows them: with which environment, by which interpreter.

What an agent was started with decides how it copies and what UCX does; the shell of whoever asks may differ.
"""

from pathlib import Path

import msgspec

from tensorhub._control.discovery import read_hub_file
from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import TensorHubError


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
