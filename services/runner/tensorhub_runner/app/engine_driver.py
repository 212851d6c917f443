"""What drives an engine: a thread of this process, or streams of a server. Types for those who use either."""

import asyncio
from collections.abc import Callable, Iterable
from typing import NoReturn, Protocol

from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import RunEngine
from tensorhub_runner.core.runner_events import Begin, StepTokens, Stop

OnStepped = Callable[[tuple[StepTokens, ...], float], None]
"""Takes what a step made, and how long it took, in seconds."""


def ignore_steps(made: tuple[StepTokens, ...], seconds: float) -> None:
    """Hear of tokens before anybody else does: there are none."""


class EngineDriver(Protocol):
    """One engine; `run` is its task."""

    on_stepped: OnStepped
    """Who hears of tokens; set before `run`."""
    between_steps: asyncio.Lock
    """Who holds it may change weights, once `stand_still` is back."""
    busy_s: float
    """How long all steps took together."""
    recomputed: int
    """How many tokens of responses attempts have begun behind, for which a cache was computed anew."""

    def do(self, command: Begin | Stop) -> None:
        """Begin or stop an attempt before the next step."""

    async def run(self) -> NoReturn:
        """Make steps while there is work."""

    async def stand_still(self) -> None:
        """Make no token until `weights_changed`, and tell of all that were made. The caller has `between_steps`."""

    async def weights_changed(self) -> RunEngine | None:
        """Make tokens of the weights that are there now, and return what the engine is. The caller has `between_steps`.

        None: there are no weights, and no token is made.
        """

    async def leave(self, attempts: Iterable[Attempt]) -> None:
        """Have the engine leave attempts at once, and make no further step: it is somebody else's from here on."""

    async def close(self) -> None:
        """End after the step that is under way."""
