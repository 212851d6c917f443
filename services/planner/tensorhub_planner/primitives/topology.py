"""The places of agents, and so the distance between reader and source and the transport of the bytes. Pure.

A host's name counts within its site alone: two datacenters may both have a `node-1`. So does a rack's. An agent is one
GPU's, so the same GPU is the same agent; those of one host share its memory.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

import msgspec

from tensorhub_common.protocol.plans import Transport


class Distance(IntEnum):
    """How far apart two agents are; less is nearer."""

    AGENT = 0
    HOST = 1
    RACK = 2
    SITE = 3
    WAN = 4


DISTANCE_WORDS: Final[Mapping[Distance, str]] = {
    Distance.AGENT: "the same agent",
    Distance.HOST: "the same host",
    Distance.RACK: "the same rack",
    Distance.SITE: "the same site",
    Distance.WAN: "another site",
}

TRANSPORT_BY_DISTANCE: Final[Mapping[Distance, Transport]] = {
    Distance.AGENT: "local",
    Distance.HOST: "local",
    Distance.RACK: "ucxx",
    Distance.SITE: "ucxx",
    Distance.WAN: "ucxx",
}


class AgentPlace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A host of a site, and its rack there; without one it shares none with anybody."""

    host: str
    site: str
    rack: str = ""


class Topology(msgspec.Struct, frozen=True):
    """The places of the agents that a plan is about."""

    places: Mapping[str, AgentPlace]

    def distance(self, one: str, other: str) -> Distance:
        """Tell how far two agents are apart; an agent without a place is as far as can be."""
        return Distance.AGENT if one == other else between(self.places.get(one), self.places.get(other))


def between(here: AgentPlace | None, there: AgentPlace | None) -> Distance:
    """Tell how far apart two agents are that stand there."""
    if here is None or there is None or here.site != there.site:
        return Distance.WAN
    if here.host == there.host:
        return Distance.HOST
    return Distance.RACK if here.rack and here.rack == there.rack else Distance.SITE
