"""What a read that ran out of time tells its caller: what was missing, and what to do. Pure."""

from tensorhub_agent.effects import Key
from tensorhub_common.errors import DrainTimeout, RoundTimeout, VersionUnavailable
from tensorhub_common.wire.commands import Wish


def not_in_time(key: Key, want: Wish, missing: tuple[int, ...], *, is_joining: bool) -> tuple[str, str]:
    """Return the error and its message; `missing` are the shards that have not joined."""
    where = f"shard {key.shard} of {key.model}/{key.replica}"
    if not is_joining:
        return RoundTimeout.__name__, f"{where} could not be filled within the bound: allow more time"
    others = [index for index in missing if index != key.shard]
    if others:
        message = (
            f"{where}: shards {others} of the replica did not join the round within the bound: every shard must call "
            "replicate or update"
        )
        return RoundTimeout.__name__, message
    wish = want if isinstance(want, str) else f"version {want}"
    return (
        VersionUnavailable.__name__,
        f"{wish} of model {key.model!r} has no live holder within the bound: has a trainer published it?",
    )


def still_mapped(key: Key) -> tuple[str, str]:
    """The same where somebody maps the memory that would have been overwritten."""
    where = f"shard {key.shard} of {key.model}/{key.replica}"
    message = f"the memory that {where} would be filled in is still mapped by a reader of this host: call again"
    return DrainTimeout.__name__, message
