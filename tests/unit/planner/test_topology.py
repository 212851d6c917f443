"""How far agents are apart."""

import pytest
from tests.unit.planner.given import TOPOLOGY

from tensorhub_planner.topology import TRANSPORTS, WORDS, Distance


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
