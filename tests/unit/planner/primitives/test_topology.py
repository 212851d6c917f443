"""How far agents are apart, the rates over each distance, and sets of layouts."""

import pytest
from tests.unit.planner.given import TOPOLOGY

from tensorhub_common.protocol.plans import SHARES_MAX
from tensorhub_planner.primitives.limits import LOCAL, NETWORK, WIDE, PlanLimits
from tensorhub_planner.primitives.source_set import LayoutSet
from tensorhub_planner.primitives.topology import DISTANCE_WORDS, TRANSPORT_BY_DISTANCE, AgentPlace, Distance, Topology


@pytest.mark.parametrize(
    ("agent", "distance", "transport"),
    [
        ("me", Distance.AGENT, "local"),
        ("beside", Distance.HOST, "local"),
        ("a", Distance.SITE, "ucxx"),
        # On a host of the reader's name in another site, and so no neighbour.
        ("far", Distance.WAN, "ucxx"),
        ("unheard-of", Distance.WAN, "ucxx"),
    ],
)
def test_distance_from_me(agent: str, distance: Distance, transport: str) -> None:
    assert TOPOLOGY.distance("me", agent) is TOPOLOGY.distance(agent, "me") is distance
    assert TRANSPORT_BY_DISTANCE[distance] == transport
    assert set(DISTANCE_WORDS) == set(TRANSPORT_BY_DISTANCE) == set(Distance)


@pytest.mark.parametrize(
    ("mine", "other", "distance"),
    [
        ("r07", AgentPlace("node-1", "berlin", "r07"), Distance.HOST),
        ("r07", AgentPlace("node-1", "berlin"), Distance.HOST),
        ("r07", AgentPlace("node-2", "berlin", "r07"), Distance.RACK),
        ("r07", AgentPlace("node-2", "berlin", "r08"), Distance.SITE),
        ("r07", AgentPlace("node-2", "berlin"), Distance.SITE),
        ("r07", AgentPlace("node-2", "paris", "r07"), Distance.WAN),
        # Who names no rack is in none with others.
        ("", AgentPlace("node-2", "berlin"), Distance.SITE),
    ],
)
def test_a_rack_is_between_host_and_site(mine: str, other: AgentPlace, distance: Distance) -> None:
    """A rack's name counts within its site alone."""
    topology = Topology({"me": AgentPlace("node-1", "berlin", mine), "other": other})
    assert topology.distance("me", "other") is topology.distance("other", "me") is distance


def test_rates_by_distance_and_a_plan_that_fits_the_wire() -> None:
    limits = PlanLimits()
    assert [limits.rates(distance) for distance in Distance] == [LOCAL, LOCAL, NETWORK, NETWORK, WIDE]
    assert limits.stripes_max <= limits.shares_max <= SHARES_MAX


def test_order_and_what_was_published_count() -> None:
    given = ((("a", "b"), ("a",)), (("b", "a"), ("a",)), (("a", "b"), ("b",)), (("a",), ("b", "a")), (("a", "b"), ()))
    sets = [LayoutSet(*each) for each in (*given, ((), ("a", "b")))]
    assert len(set(sets)) == len(sets)
    assert sets[0] != "a"
