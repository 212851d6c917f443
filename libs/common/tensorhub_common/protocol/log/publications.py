"""What becomes of a publication before the version exists: who has joined it, and why it came to nothing."""

from tensorhub_common.protocol.log.events import ReplicaEvent, ShardEvent


class PublishWished(ReplicaEvent, frozen=True, kw_only=True, tag="publish.wished"):
    """Somebody outside asked for a publication; the agents of these shards gate, digest and say ready."""

    version: int | None
    shards: int


class PublishDeclined(ShardEvent, frozen=True, kw_only=True, tag="publish.declined"):
    """The shard does not fulfil the wish at log sequence `wish`, for the reason given; nothing has changed."""

    wish: int
    error: str
    message: str


class PublishJoined(ShardEvent, frozen=True, kw_only=True, tag="publish.joined"):
    """The shard is ready to be published and waits for the missing ones."""

    version: int | None
    missing: tuple[int, ...]


class PublishStands(ShardEvent, frozen=True, kw_only=True, tag="publish.stands"):
    """The shard holds this version published already."""

    version: int


class PublishFailed(ReplicaEvent, frozen=True, kw_only=True, tag="publish.failed"):
    """No shard of the replica publishes; all that had joined are told."""

    error: str
    message: str
    shards: tuple[int, ...]


class PublishWithdrawn(ShardEvent, frozen=True, kw_only=True, tag="publish.withdrawn"):
    """The shard no longer waits; `missing` had not come."""

    missing: tuple[int, ...]
