"""What must hold in a crowd: every read returns the version, and the work grows with the readers alone.

No read may raise while the log counts a holder, whatever stands still. What the world costs grows with its readers, and
not with their square: `STEPS_OF_ONE_MAX` steps for each.
"""

from typing import Final

from tensorhub_agent.core.effects import CallRead, FailCall
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.env import Env
from tensorhub_simulator.faultsim.observations import CallEnded

STEPS_OF_ONE_MAX: Final = 4000


class CrowdRules:
    """Judges a crowd. Raises `Violation`."""

    def __init__(self, env: Env, readers: int) -> None:
        """Judge `readers` readers."""
        self._env, self._readers = env, readers
        env.subscribe(CallEnded, self._on_end)

    def _on_end(self, ended: CallEnded) -> None:
        # The holder may be stopped while others register at it: those are told within their bound, and register again.
        if isinstance(ended.call, CallRead) and isinstance(ended.end, FailCall):
            raise Violation("patience", f"a read raised {ended.end} though the log counts a holder")

    def check(self) -> None:
        """Look how much has been done."""
        steps = self._env.clock.steps
        if steps > STEPS_OF_ONE_MAX * self._readers:
            raise Violation("bounded work", f"{steps} steps for {self._readers} readers")
