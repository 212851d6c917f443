"""How busy a source is, and who reads from it. Pure."""

from typing import Final, get_args

import msgspec

from tensorhub_common.protocol.plans import Transport

TRANSPORTS: Final[tuple[Transport, ...]] = get_args(Transport)

AgentTransport = tuple[str, Transport]
"""An agent, and a way in which it is read."""


class ReaderId(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A shard that reads."""

    job: str
    model: str
    replica: str
    shard: int


class Load(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many readers a source has, and the bytes that were assigned to them."""

    readers: int
    nbytes: int


IDLE: Final = Load(0, 0)
