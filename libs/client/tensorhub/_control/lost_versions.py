"""What became of versions that were published, where none of them can be read: who held them last, and what to do.

A caller whose trainer has died is not to be asked whether a trainer has published: the registry knows that one has.
Invariants: `explain` decides alone, from two answers of the registry; `ask` ends within `ASK_S_MAX`, and a registry
that does not answer costs the caller only this explanation.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from tensorhub._control.registry_client import RegistryClient
from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol.queries import ReplicaInfo, VersionInfo, VersionState

ASK_S_MAX: Final = 1.0
"""A read that has failed waits for its explanation at most this long."""

HOLDERS_NAMED_MAX: Final = 4
"""Of the lost holders at most this many are named, those that were lost last first."""

LOST: Final = "lost"
_ENDS: Final = {"unpublished": "has unpublished it", "replaced": "holds another one now", "released": "was released"}
_MINUTE_S: Final = 60.0
_HOUR_S: Final = 3600.0


async def ask(registry: RegistryClient, model: str, wanted: int | None) -> str:
    """Ask the registry what became of a model's versions, or of the one wanted; empty where it does not say."""
    with suppress(TensorHubError, TimeoutError):
        async with asyncio.timeout(ASK_S_MAX):
            versions = await registry.versions(model, ASK_S_MAX)
            return explain(model, versions, await registry.replicas(model, ASK_S_MAX), wanted, time.time())
    return ""


def explain(
    model: str, versions: Sequence[VersionInfo], replicas: Sequence[ReplicaInfo], wanted: int | None, now: float
) -> str:
    """Say what became of the versions, or of the one wanted; empty where one can be read, or none was published."""
    able = [each.version for each in versions if each.state == VersionState.AVAILABLE]
    gone = [each for each in versions if each.state == VersionState.UNAVAILABLE and wanted in (None, each.version)]
    if not gone or not gone[-1].gone or (wanted is None and able):
        return ""
    last = gone[-1]
    if len(gone) > 1:
        what = f"versions {gone[0].version} to {last.version} of model {model!r} were published, but "
        whose = f"the last holder of version {last.version}"
    else:
        what, whose = f"version {last.version} of model {model!r} was published, but ", "its last holder"
    others = f"; available now: {able}" if able else ""
    if last.gone != LOST:
        end = _ENDS.get(last.gone, f"has gone ({last.gone})")
        return f"{what}{whose} {end}: wait until a version is published again{others}"
    holders = list(_lost(replicas, now))
    named = f" ({', '.join(holders[:HOLDERS_NAMED_MAX])})" if holders else ""
    bring_back = "start that agent again, which brings it back if its host has kept the memory, or " if holders else ""
    return f"{what}{whose} is lost{named}: {bring_back}publish again from a checkpoint{others}"


def _lost(replicas: Sequence[ReplicaInfo], now: float) -> Iterator[str]:
    """Name the replicas that have lost an agent, and when; those without bytes of their own held nothing."""
    found = {
        (-member.lost_at, replica.replica, member.agent)
        for replica in replicas
        if not replica.mapped
        for member in replica.members
        if not member.live
    }
    for lost_at, replica, agent in sorted(found):
        ago = f", lost {_duration(max(0.0, now + lost_at))} ago" if lost_at else ""
        yield f"{replica} on {agent}{ago}"


def _duration(seconds: float) -> str:
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE_S:.0f} min" if seconds < 2 * _HOUR_S else f"{seconds / _HOUR_S:.0f} h"
