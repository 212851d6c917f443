"""What the shards of a replica want of a round, and what it decides for all of them. No changes."""

from collections.abc import Mapping
from dataclasses import dataclass

from tensorhub_common.catalog.state import ATTEMPTS_MAX, SUPERSEDED_MAX, Model, Round, newest
from tensorhub_common.errors import VersionConflict, VersionUnavailable
from tensorhub_common.protocol.log.commands import VersionRequest
from tensorhub_common.protocol.queries import VersionState


@dataclass(frozen=True, slots=True)
class WaitForVersion:
    """There is nothing to decide yet."""


@dataclass(frozen=True, slots=True)
class NothingNewer:
    """There is nothing newer: None for all."""


@dataclass(frozen=True, slots=True)
class CannotDecide:
    """The wishes can't be met."""

    error: type[VersionConflict | VersionUnavailable]
    message: str


Decision = int | WaitForVersion | NothingNewer | CannotDecide


def select_version(model: Model, wants: Mapping[int, VersionRequest], patient: bool, held: int | None) -> Decision:  # noqa: FBT001 (pure table)
    """Judge the wishes of all shards: `latest` yields to a number, two numbers clash, newer may find nothing."""
    numbers = sorted({want for want in wants.values() if isinstance(want, int)})
    if len(numbers) > 1:
        return CannotDecide(
            VersionConflict, f"the shards ask for versions {numbers}; all shards of a replica must ask for one"
        )
    if numbers:
        return _decide_number(model, numbers[0])
    best = newest(model)
    if "latest" in wants.values():
        return WaitForVersion() if best is None else best
    if best is not None and (held is None or best > held):
        return best
    return WaitForVersion() if patient else NothingNewer()


def _decide_number(model: Model, number: int) -> Decision:
    version = model.versions.get(number)
    if version is not None and version.state is VersionState.AVAILABLE:
        return number
    if model.last is None or number > model.last:
        return WaitForVersion()
    if version is not None and version.state is VersionState.RETIRED:
        return CannotDecide(
            VersionUnavailable, f"version {number} of model {model.name!r} was retired by a rewind: ask for latest"
        )
    able = sorted(n for n, v in model.versions.items() if v.state is VersionState.AVAILABLE)
    return CannotDecide(
        VersionUnavailable,
        f"version {number} of model {model.name!r} has no live holder; available now: {able or 'none'}",
    )


def is_overtaken(model: Model, current: Round) -> bool:
    """Tell whether a newer version is available that the round may still take: no read begins with an overtaken one."""
    best = newest(model)
    numbered = any(isinstance(wish, int) for wish in current.wants.values())
    may = current.supersede and current.superseded < SUPERSEDED_MAX and current.attempt < ATTEMPTS_MAX
    return may and not numbered and best is not None and current.version is not None and best > current.version
