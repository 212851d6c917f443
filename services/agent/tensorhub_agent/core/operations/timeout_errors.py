"""What a call that ran out of time tells its caller: who or what was missing, and what to do. Pure."""

from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.errors import DrainTimeout, RegistryUnavailable, RoundTimeout, VersionUnavailable
from tensorhub_common.protocol.log.commands import VersionRequest


class MissingShards:
    """Whom the shards of a replica wait for, as one of them hears it.

    All of them end at about the same bound. The shard that ends last finds the others gone, and did not wait for them.
    """

    def __init__(self) -> None:
        """Begin before anybody has come."""
        self._never: set[int] | None = None
        self._all_came = False

    def heard(self, missing: tuple[int, ...]) -> None:
        """Somebody has come, and these have not, or have left."""
        self._all_came = self._all_came or not missing
        self._never = self._never.intersection(missing) if self._never is not None else set(missing)

    def of(self, missing: tuple[int, ...]) -> tuple[int, ...]:
        """Of those who are not there at the end, return those that were waited for; none where all were there once."""
        if self._all_came:
            return ()
        return tuple(each for each in missing if self._never and each in self._never) or missing


def not_in_time(
    key: ShardKey,
    want: VersionRequest,
    missing: tuple[int, ...],
    *,
    is_joining: bool,
    unplanned: str | None,
    trouble: str,
) -> tuple[str, str]:
    """Return the error and its message; `missing` are the shards that never joined.

    `unplanned` says why the planner's last answer did not come, if it did not; `trouble` why the
    last source was left, or is empty.
    """
    where = f"shard {key.shard} of {key.model}/{key.replica}"
    if not is_joining and unplanned is not None:
        message = (
            f"{key.model}/{key.replica} could not be filled within the bound, for it got no plan: {unplanned}. See "
            "that tensorhub-planner runs ('tensorhub doctor'), then call again"
        )
        return RoundTimeout.__name__, message
    if not is_joining:
        # The fold says before it which shard it is: it fails the round for all of them.
        why = f" ({trouble})" if trouble else ""
        message = f"{key.model}/{key.replica} could not be filled within the bound{why}: allow more time"
        return RoundTimeout.__name__, message
    others = [index for index in missing if index != key.shard]
    if others:
        message = (
            f"{where}: shards {others} of the replica did not join the round within the bound: every shard must call "
            "replicate or update"
        )
        return RoundTimeout.__name__, message
    if isinstance(want, str):
        why = f"no version of model {key.model!r} was to be had within the bound: has a trainer published one?"
    else:
        why = f"version {want} of model {key.model!r} has no live holder within the bound: has a trainer published it?"
    return VersionUnavailable.__name__, why


def still_mapped(key: ShardKey) -> tuple[str, str]:
    """The same where somebody maps the memory that would have been overwritten."""
    where = f"shard {key.shard} of {key.model}/{key.replica}"
    message = f"the memory that {where} would be filled in is still mapped by a reader of this host: call again"
    return DrainTimeout.__name__, message


def unanswered(key: ShardKey) -> tuple[str, str]:
    """The same where the registry does not even say what became of giving up."""
    where = f"shard {key.shard} of {key.model}/{key.replica}"
    message = f"the registry did not say what became of the read of {where}; it is given up: see 'tensorhub status', "
    return RegistryUnavailable.__name__, message + "then call again"
