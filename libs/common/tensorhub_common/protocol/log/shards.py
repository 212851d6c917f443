"""What happens to one shard: whose it is, what it holds, and when it holds it no longer."""

import msgspec

from tensorhub_common.protocol.log.events import ShardEvent


class Sibling(msgspec.Struct, frozen=True, array_like=True):
    """A shard of the same replica that was registered before, and its layout's digest."""

    shard: int
    layout: str


class ShardRegistered(ShardEvent, frozen=True, kw_only=True, tag="shard.registered"):
    """The shard is the agent's. The sender compares its layout with the siblings' and releases it if they clash.

    `siblings` are those near it, and a few of the others, where a replica has many shards.
    """

    shards: int
    spot: bool
    agent: str
    layout: str
    siblings: tuple[Sibling, ...] = ()


class ShardReleased(ShardEvent, frozen=True, kw_only=True, tag="shard.released"):
    """The shard is gone."""


class ShardDraining(ShardEvent, frozen=True, kw_only=True, tag="shard.draining"):
    """The shard no longer counts as a holder of the version."""

    version: int


class ShardDrained(ShardEvent, frozen=True, kw_only=True, tag="shard.drained"):
    """The shard's memory may be overwritten."""

    version: int


class ShardFilled(ShardEvent, frozen=True, kw_only=True, tag="shard.filled"):
    """The shard holds the version; its replica is ready once all its shards do."""

    version: int
    round: int
    root: str


class UnpublishHeld(ShardEvent, frozen=True, kw_only=True, tag="unpublish.held"):
    """The version is retained and this replica is its last counting copy: the shard stays published until one stands.

    `shard.draining` follows when one does, and `shard.stays` when none can.
    """

    version: int


class ShardStays(ShardEvent, frozen=True, kw_only=True, tag="shard.stays"):
    """The shard is not unpublished. `error` is what the call raises, empty when it was the call's own wish."""

    version: int
    error: str = ""
    message: str = ""
