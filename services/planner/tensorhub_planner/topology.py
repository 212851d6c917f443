"""Where agents stand, and so how far a reader is from a source and by which transport its bytes come.

A host's name counts within its site alone: two datacenters may both have a `node-1`.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

import msgspec

from tensorhub_common.wire.transfer import Transport


class Distance(IntEnum):
    """How far apart two agents are; less is nearer."""

    AGENT = 0
    HOST = 1
    SITE = 2
    WAN = 3


WORDS: Final[Mapping[Distance, str]] = {
    Distance.AGENT: "the same agent",
    Distance.HOST: "the same host",
    Distance.SITE: "the same site",
    Distance.WAN: "another site",
}

TRANSPORTS: Final[Mapping[Distance, Transport]] = {
    Distance.AGENT: "local",
    Distance.HOST: "local",
    Distance.SITE: "ucxx",
    Distance.WAN: "ucxx",
}


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A host of a site."""

    host: str
    site: str


class Topology(msgspec.Struct, frozen=True):
    """The places of the agents that a plan is about."""

    places: Mapping[str, Place]

    def distance(self, one: str, other: str) -> Distance:
        """Tell how far two agents are apart; an agent without a place is as far as can be."""
        if one == other:
            return Distance.AGENT
        here, there = self.places.get(one), self.places.get(other)
        if here is None or there is None or here.site != there.site:
            return Distance.WAN
        return Distance.HOST if here.host == there.host else Distance.SITE
