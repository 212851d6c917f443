"""Calls to the hub that are made again where the hub's error says so: a registry or an agent was away for a while.

Always true: a call is made at most `CALLS_MAX` times, and every failure but the last is told.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from tensorhub import AgentUnavailable, RegistryUnavailable, RoundTimeout
from tensorhub.demo.messages import Trouble
from tensorhub.demo.station import Station

CALLS_MAX: Final = 8
PAUSE_S: Final = 0.5

MAY_CALL_AGAIN: Final = (AgentUnavailable, RegistryUnavailable, RoundTimeout)

Result = TypeVar("Result")


async def calling(call: Callable[[], Awaitable[Result]], station: Station) -> Result:
    """Return what the call returns in the end, or raise what the last one raises."""
    for _ in range(CALLS_MAX - 1):
        try:
            return await call()
        except MAY_CALL_AGAIN as error:
            station.say(Trouble(error=type(error).__name__, message=str(error)))
            await asyncio.sleep(PAUSE_S)
    return await call()
