"""Names of shards and versions that all packages of the agent use. Pure."""

import msgspec


class ShardKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Names a shard within one job."""

    model: str
    replica: str
    shard: int

    def __str__(self) -> str:
        """Return the name that messages use."""
        return f"shard {self.shard} of {self.model}/{self.replica}"


class BaseVersion(msgspec.Struct, frozen=True):
    """A version whose bytes the reader's shard holds whole when it begins to be filled with another one."""

    version: int
    root: str
