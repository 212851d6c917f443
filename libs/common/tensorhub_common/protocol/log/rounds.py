"""What happens in a round of a replica: all its shards join it, and one answer is decided for all."""

from tensorhub_common.protocol.log.events import RoundEvent


class RoundJoined(RoundEvent, frozen=True, kw_only=True, tag="round.joined"):
    """The shard waits in the round, for the missing shards or for a version."""

    shard: int
    missing: tuple[int, ...]


class RoundDecided(RoundEvent, frozen=True, kw_only=True, tag="round.decided"):
    """One version for all shards. `roots` by shard (None: no holder of that shard's layout); `held` have it already."""

    attempt: int
    version: int
    roots: tuple[str | None, ...]
    held: tuple[int, ...] = ()


class RoundStarted(RoundEvent, frozen=True, kw_only=True, tag="round.started"):
    """All leases of all shards are granted: drain and write."""

    attempt: int
    version: int
    stands: bool | None = None
    """True: every shard is filled beside what it holds, so the replica has lost nothing."""


class RoundHeld(RoundEvent, frozen=True, kw_only=True, tag="round.held"):
    """All leases are granted, but the replica has the last counting copy of a retained version: it starts later."""

    version: int
    """What is retained."""


class RoundOvertaken(RoundEvent, frozen=True, kw_only=True, tag="round.overtaken"):
    """While this attempt is read a newer version came. Each shard judges whether to read on; one `drop` is enough."""

    attempt: int
    version: int
    """The newer one."""


class RoundReopened(RoundEvent, frozen=True, kw_only=True, tag="round.reopened"):
    """The decided version went in good order before it was read; the round waits for another one."""

    version: int


class RoundSettled(RoundEvent, frozen=True, kw_only=True, tag="round.settled"):
    """There is nothing newer: every shard's call answers None."""


class RoundFailed(RoundEvent, frozen=True, kw_only=True, tag="round.failed"):
    """Every shard's call raises this error."""

    error: str
    message: str


class RoundWithdrawn(RoundEvent, frozen=True, kw_only=True, tag="round.withdrawn"):
    """The shard alone left; `missing` had not joined."""

    shard: int
    missing: tuple[int, ...]
