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
        ("far", Distance.WAN, "ucxx"),
        ("unheard-of", Distance.WAN, "ucxx"),
    ],
)
def test_distance_from_me(agent: str, distance: Distance, transport: str) -> None:
    """`far` is on a host of the reader's name in another site, and so no neighbour."""
    assert TOPOLOGY.distance("me", agent) is distance
    assert TOPOLOGY.distance(agent, "me") is distance
    assert TRANSPORT_BY_DISTANCE[distance] == transport


def test_every_distance_has_words_and_a_transport() -> None:
    assert set(DISTANCE_WORDS) == set(TRANSPORT_BY_DISTANCE) == set(Distance)


@pytest.mark.parametrize(
    ("other", "distance"),
    [
        (AgentPlace("node-1", "berlin", "r07"), Distance.HOST),
        (AgentPlace("node-1", "berlin"), Distance.HOST),
        (AgentPlace("node-2", "berlin", "r07"), Distance.RACK),
        (AgentPlace("node-2", "berlin", "r08"), Distance.SITE),
        (AgentPlace("node-2", "berlin"), Distance.SITE),
        (AgentPlace("node-2", "paris", "r07"), Distance.WAN),
    ],
)
def test_a_rack_is_between_host_and_site(other: AgentPlace, distance: Distance) -> None:
    """A rack's name counts within its site alone."""
    topology = Topology({"me": AgentPlace("node-1", "berlin", "r07"), "other": other})
    assert topology.distance("me", "other") is topology.distance("other", "me") is distance


def test_who_names_no_rack_is_in_none_with_others() -> None:
    topology = Topology({"me": AgentPlace("node-1", "berlin"), "other": AgentPlace("node-2", "berlin")})
    assert topology.distance("me", "other") is Distance.SITE


def test_rates_by_distance() -> None:
    limits = PlanLimits()
    assert [limits.rates(distance) for distance in Distance] == [LOCAL, LOCAL, NETWORK, NETWORK, WIDE]


def test_a_plan_fits_the_wire() -> None:
    """The wire's own limit on shares is kept."""
    assert PlanLimits().stripes_max <= PlanLimits().shares_max <= SHARES_MAX


def test_order_and_what_was_published_count() -> None:
    sets = [
        LayoutSet(("a", "b"), ("a",)),
        LayoutSet(("b", "a"), ("a",)),
        LayoutSet(("a", "b"), ("b",)),
        LayoutSet(("a",), ("b", "a")),
        LayoutSet(("a", "b"), ()),
        LayoutSet((), ("a", "b")),
    ]
    assert len(set(sets)) == len(sets)
    assert sets[0] != "a"
