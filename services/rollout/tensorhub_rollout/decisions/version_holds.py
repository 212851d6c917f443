"""What a leading manager says to a job's log about the versions that the hub is to hold, and how often. Pure.

The log says what stands. A word that was lost, refused or late is therefore seen, and said again. Each has a higher
number than the last of this leader, and its term, so a late one never takes the place of a later one.

A hold is stated again long before its end, so that it outlives a manager that is stopped or replaced. It ends by itself
where none comes back. A new leader states what it wants at its first look: then no word of the one before counts.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from tensorhub_rollout.core.leader import Leader
from tensorhub_rollout.core.leader_events import HubHold
from tensorhub_rollout.policy.retention import RetentionLimits, decide

HOLDER: Final = "rollouts"
"""Under this name the rollout manager of a job holds versions."""
RENEWALS: Final = 3
"""A hold is stated so often while it would last."""
AGAIN_S: Final = 2.0
"""What does not stand in the log after this is said again."""


class HoldWord(msgspec.Struct, frozen=True):
    """What is to be said: these versions of a model are held, and no others."""

    model: str
    n: int
    versions: tuple[int, ...]
    lasts_s: int


@dataclass(slots=True)
class _Said:
    versions: tuple[int, ...]
    at: float


class VersionHolds:
    """The holds of one leading manager."""

    def __init__(self, limits: RetentionLimits) -> None:
        """Know nothing yet: what stands in the log is what the leader before has said."""
        self._limits = limits
        self._n = 0
        self._said: dict[str, _Said] = {}
        """By model."""

    def look(self, leader: Leader, model: str, now: float) -> HoldWord | None:
        """Return what is to be said of a model's versions now; None: nothing."""
        hold = leader.models[model].seen.hold
        said = self._said.get(model)
        is_idle = hold is not None and not hold.versions and said is None and not leader.pinned.has_any(model)
        if hold is None or is_idle or hold.term > leader.term:
            # Its term is over where a later leader has spoken.
            return None
        wanted = _wanted(leader, model, hold, self._limits)
        stands = hold.versions == wanted
        if not wanted and stands:
            self._said.pop(model, None)
            return None
        if said is not None and said.versions == wanted:
            again_s = self._limits.hold_s / RENEWALS if stands else AGAIN_S
            if now - said.at < again_s:
                return None
        self._n += 1
        self._said[model] = _Said(wanted, now)
        return HoldWord(model, self._n, wanted, self._limits.hold_s)

    def story(self, leader: Leader, model: str, version: int) -> str | None:
        """Say in words how safe a version is that requests are for alone; None: versions are not held."""
        hold = leader.models[model].seen.hold
        if hold is None or not self._limits.is_on:
            return None
        return _story(hold, version, self._limits.versions_max)


def _wanted(leader: Leader, model: str, hold: HubHold, limits: RetentionLimits) -> tuple[int, ...]:
    """Return the versions to hold. Not all runners need be known for that: they may be gone by then."""
    seen = leader.models[model].seen
    demand = leader.pinned.demand(model)
    needed = {each for each in demand if each is not None and not seen.versions.is_retired(each)}
    instances = leader.fleet.of_model(model)
    can_load = not instances or any(each.keeps_versions for each in instances)
    return decide(needed, seen.available, hold.versions, limits, can_load=can_load)


def _story(hold: HubHold, version: int, versions_max: int) -> str:
    if version not in hold.versions:
        if len(hold.versions) >= versions_max:
            others = f"{versions_max} others are, which is the limit"
            return f"version {version} is not held: {others}, until the requests for one of them have ended"
        return f"version {version} is not held yet"
    if version in hold.copied:
        return f"version {version} is held until its last request ends, and the hub has a copy of it"
    return f"version {version} is held until its last request ends; the hub has no copy of it yet"
