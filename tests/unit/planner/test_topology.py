"""How far agents are apart."""

import pytest
from tests.unit.planner.given import TOPOLOGY

from tensorhub_planner.primitives.topology import TRANSPORTS, WORDS, Distance, Place, Topology


@pytest.mark.parametrize(
    ("agent", "distance", "transport"),
    [
        ("me", Distance.AGENT, "local"),
        ("beside", Distance.HOST, "local"),
        ("a", Distance.SITE, "ucxx"),
        ("far", Distance.WAN, "ucxx"),
        ("unheard-of", Distance.WAN, "ucxx"),
    ],
)
def test_distance_from_me(agent: str, distance: Distance, transport: str) -> None:
    """`far` is on a host of the reader's name in another site, and so no neighbour."""
    assert TOPOLOGY.distance("me", agent) is distance
    assert TOPOLOGY.distance(agent, "me") is distance
    assert TRANSPORTS[distance] == transport


def test_every_distance_has_words_and_a_transport() -> None:
    assert set(WORDS) == set(TRANSPORTS) == set(Distance)


@pytest.mark.parametrize(
    ("other", "distance"),
    [
        (Place("node-1", "berlin", "r07"), Distance.HOST),
        (Place("node-1", "berlin"), Distance.HOST),
        (Place("node-2", "berlin", "r07"), Distance.RACK),
        (Place("node-2", "berlin", "r08"), Distance.SITE),
        (Place("node-2", "berlin"), Distance.SITE),
        (Place("node-2", "paris", "r07"), Distance.WAN),
    ],
)
def test_a_rack_is_between_host_and_site(other: Place, distance: Distance) -> None:
    """A rack's name counts within its site alone."""
    topology = Topology({"me": Place("node-1", "berlin", "r07"), "other": other})
    assert topology.distance("me", "other") is topology.distance("other", "me") is distance


def test_who_names_no_rack_is_in_none_with_others() -> None:
    topology = Topology({"me": Place("node-1", "berlin"), "other": Place("node-2", "berlin")})
    assert topology.distance("me", "other") is Distance.SITE
