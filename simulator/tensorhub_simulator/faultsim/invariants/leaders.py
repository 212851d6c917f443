"""Who led, as the log has it: only the registry that said so last may cost an agent its place."""

from typing import Final

from tensorhub_common.protocol.log.hub import AgentLost, RegistryLeads
from tensorhub_simulator.faultsim.models.job_log import Entry, ModelLog
from tensorhub_simulator.faultsim.models.segments import Violation

_NAME: Final = 0


class Leaders:
    """Sees every entry as it is stored."""

    def __init__(self, log: ModelLog) -> None:
        """Begin with an empty log, in which nobody leads."""
        self.log = log
        self._led: list[tuple[int, str]] = []
        """From which command on who led."""

    def __call__(self, entry: Entry) -> None:
        """Take the entry that was just stored."""
        event = entry.event
        if isinstance(event, RegistryLeads):
            self._led.append((event.cmd, event.registry))
        elif isinstance(event, AgentLost):
            speaker = self.log.entries[event.cmd - 1].msg_id.split(".")[_NAME]
            leader = next((name for cmd, name in reversed(self._led) if cmd < event.cmd), None)
            if leader not in (None, speaker):
                raise Violation("only the leader expires", f"{speaker} expired {event.agent} while {leader} led")
