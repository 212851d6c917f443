"""Measured rates in place of the model's: which count, and what follows for what was not measured."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner.given import GIVEN_LINKS, MIB, SEAT, SIZES, TOPOLOGY, agents, demand, holder, planned, source

from tensorhub_common.protocol.plans import RATES_MAX, LinkRate, Plan, PlanRequest, SourceId, Transport
from tensorhub_planner.catalog_view.holders import HolderSet
from tensorhub_planner.load.ledger import LoadView
from tensorhub_planner.load.load import Load
from tensorhub_planner.planning.cost_model import (
    BPS_MAX,
    OWN_HOST,
    STEP,
    link_of,
    measured_limits,
    stepped,
    trusted_rates,
)
from tensorhub_planner.planning.plan import make_plan
from tensorhub_planner.primitives.limits import LOCAL, NETWORK, WIDE, PlanLimits
from tensorhub_planner.primitives.topology import AgentPlace, Distance, Topology

GB = 10**9
LIMITS = PlanLimits()
NODE = AgentPlace("node-2", "berlin", "r07")


def rate(link: str, bps: int, *, samples: int = 9, age_s: float = 1.0, transport: Transport = "ucxx") -> LinkRate:
    return LinkRate(link, transport, bps, samples, age_s)


def measured(*rates: LinkRate) -> PlanRequest:
    return msgspec.structs.replace(demand(), rates=rates)


@pytest.mark.parametrize(
    ("distance", "link"),
    [
        (Distance.AGENT, "host"),
        (Distance.HOST, "host"),
        (Distance.RACK, "rack/node-2"),
        (Distance.SITE, "site/node-2"),
        (Distance.WAN, "wan/berlin"),
    ],
)
def test_the_links_names(distance: Distance, link: str) -> None:
    """Another site is one link, whichever of its hosts the bytes come from."""
    assert link_of(distance, NODE) == link
    assert link_of(Distance.WAN, None) == ""


@pytest.mark.parametrize(
    ("told", "counts"),
    [
        (rate("site/a", GB), True),
        (rate("site/a", GB, samples=LIMITS.samples_min), True),
        (rate("site/a", GB, samples=LIMITS.samples_min - 1), False),
        (rate("site/a", GB, age_s=0.0), True),
        (rate("site/a", GB, age_s=LIMITS.measured_s_max), True),
        (rate("site/a", GB, age_s=LIMITS.measured_s_max + 1), False),
        (rate("site/a", GB, age_s=-1.0), False),
        (rate("site/a", 0), False),
        (rate("site/a", -GB), False),
        (rate("site/a", BPS_MAX), True),
        (rate("site/a", BPS_MAX + 1), False),
        (rate("site/a", 10**400), False),
        (rate("site/a", GB, samples=10**400), True),
        (rate("site/a", GB, age_s=float("nan")), False),
    ],
)
def test_what_counts_has_enough_samples_and_is_not_too_old(told: LinkRate, *, counts: bool) -> None:
    assert bool(trusted_rates([told], LIMITS)) == counts


def test_a_demand_that_tells_too_much_is_cut() -> None:
    assert len(trusted_rates([rate(f"site/{n}", GB) for n in range(2 * RATES_MAX)], LIMITS)) == RATES_MAX


def test_without_measurements_the_model_holds() -> None:
    assert measured_limits({}, LIMITS) is LIMITS


def test_what_is_not_measured_is_as_its_like() -> None:
    """Hosts of a site: the median of those that are measured. The reader takes in what it got at best."""
    rates = [rate("site/a", 1 * GB), rate("site/b", 2 * GB), rate("site/c", 9 * GB)]
    limits = measured_limits(trusted_rates(rates, LIMITS), LIMITS)
    assert (limits.network.source_bps, limits.network.ingest_bps) == (stepped(2 * GB), stepped(9 * GB))
    assert limits.rack == limits.network, "of the rack nothing is known but that it is of this network"
    assert (limits.local, limits.wide) == (LOCAL, WIDE)


def test_a_rack_is_measured_by_itself() -> None:
    rates = [rate("rack/a", 8 * GB), rate("site/b", 2 * GB)]
    limits = measured_limits(trusted_rates(rates, LIMITS), LIMITS)
    assert (limits.rack.source_bps, limits.network.source_bps) == (stepped(8 * GB), stepped(2 * GB))
    assert limits.rack.ingest_bps == limits.network.ingest_bps == stepped(8 * GB)


def test_the_readers_own_host_and_other_sites_say_nothing_of_the_network() -> None:
    rates = [rate(OWN_HOST, 5 * GB, transport="local"), rate("wan/paris", 100)]
    limits = measured_limits(trusted_rates(rates, LIMITS), LIMITS)
    assert limits.local.ingest_bps == stepped(5 * GB)
    assert limits.local.source_bps is None
    assert (limits.network, limits.wide) == (NETWORK, WIDE)


@given(st.integers(1, 10**12))
def test_a_rate_counts_as_the_nearest_step(bps: int) -> None:
    """Within the square root of a step; and a step is its own."""
    assert STEP**-0.5001 <= stepped(bps) / bps <= STEP**0.5001
    assert stepped(stepped(bps)) == stepped(bps)


# What a plan makes of it.


def test_of_sources_that_are_about_as_fast_the_lot_decides() -> None:
    """Else every reader would take the one that was measured a little faster."""
    readers = [source(f"reader-{number}") for number in range(32)]
    rates = (rate("site/host-of-a", GB), rate("site/host-of-b", GB + GB // 50))
    wants = [
        msgspec.structs.replace(measured(*rates), replica=reader.replica, agent=reader.agent) for reader in readers
    ]
    found = {agent for each, reader in zip(wants, readers, strict=True) for agent in _given_to(each, reader)}
    assert found == {"a", "b"}


def _given_to(wants: PlanRequest, reader: SourceId) -> list[str]:
    places = Topology({**TOPOLOGY.places, reader.agent: AgentPlace("host-of-reader", "berlin")})
    seat = msgspec.structs.replace(SEAT, me=reader)
    answer = make_plan(wants, seat, SIZES, HolderSet((holder("a"), holder("b"))), places, {}, LIMITS)
    assert isinstance(answer, Plan)
    return agents(answer)


def test_a_source_that_was_measured_to_be_slow_is_avoided() -> None:
    """Also where the others have readers, as long as a part of what they give is more."""
    slow = measured(rate("site/host-of-a", GB // 10), rate("site/host-of-b", GB))
    assert agents(planned(holder("a"), holder("b"), wants=slow)) == ["b"]
    assert agents(planned(holder("a"), holder("b"), holder("c"), wants=slow)) != ["a"]
    busy: LoadView = {("b", "ucxx"): Load(4, 0)}
    found = planned(holder("a"), holder("b"), wants=slow, load=busy)
    assert agents(found)[0] == "b"
    assert {share.source.agent: share.nbytes for share in found.shares}["b"] > 512 * MIB
    assert "measured 954 MiB/s in 9 samples, the last 1 s ago" in found.shares[0].why


def test_it_is_read_from_where_nobody_else_has_the_pieces() -> None:
    slow = measured(rate("site/host-of-a", 1), rate("site/host-of-b", GB))
    assert agents(planned(holder("a"), wants=slow)) == ["a"]


def test_and_again_once_the_measurement_is_old() -> None:
    """Else one bad day would be for ever: who is not read from is not measured."""
    old = [rate("site/host-of-a", 1, age_s=LIMITS.measured_s_max + 1), rate("site/host-of-b", GB)]
    busy: LoadView = {("b", "ucxx"): Load(1, 0)}
    assert "a" in agents(planned(holder("a"), holder("b"), wants=measured(*old), load=busy))
    assert agents(planned(holder("a"), holder("b"), wants=measured(rate("site/host-of-a", 1), old[1]), load=busy)) == [
        "b"
    ]


def test_a_slow_host_of_its_own_comes_after_a_fast_network() -> None:
    """By more than `nearer_times` only; and the plan says so."""
    local = rate(OWN_HOST, GB, transport="local")
    for bps, expected in ((LIMITS.nearer_times * GB * 1.1, "a"), (LIMITS.nearer_times * GB * 0.9, "beside")):
        found = planned(holder("beside"), holder("a"), wants=measured(local, rate("site/host-of-a", round(bps))))
        assert agents(found) == [expected]
    alone = planned(
        holder("beside"), holder("a", pieces=((0, 1),)), wants=measured(local, rate("site/host-of-a", 9 * GB))
    )
    assert agents(alone) == ["a", "beside"]
    assert "after farther ones that were measured to be far faster" in alone.why
    assert [share.transport for share in alone.shares] == ["ucxx", "local"]


def test_the_faster_of_two_other_sites() -> None:
    """Each link between two sites is measured for itself."""
    wants = measured(rate("wan/paris", GB // 100), rate("wan/oslo", GB))
    assert agents(planned(holder("far"), holder("farther"), wants=wants, topology=GIVEN_LINKS)) == ["farther"]
    wants = measured(rate("wan/paris", GB), rate("wan/oslo", GB // 100))
    assert agents(planned(holder("far"), holder("farther"), wants=wants, topology=GIVEN_LINKS)) == ["far"]


def test_each_share_names_its_link() -> None:
    """So that the reader can tell what it got over it."""

    def links(found: Plan) -> list[str]:
        return [share.link for share in found.shares]

    assert links(planned(holder("a"))) == ["site/host-of-a"]
    assert links(planned(holder("beside"))) == ["host"]
    assert links(planned(holder("far"))) == ["wan/paris"]


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 10**11), min_size=5),
    st.lists(st.integers(0, 6), min_size=5, max_size=5),
)
def test_whoever_gives_one_reader_more_the_most_is_read(bps: dict[str, int], readers: list[int]) -> None:
    """All are measured, whole and equally far; each divides what it gives among its readers."""
    load: LoadView = {(agent, "ucxx"): Load(count, 0) for agent, count in zip("abcde", readers, strict=True) if count}
    wants = measured(*(rate(f"site/host-of-{agent}", each) for agent, each in bps.items()))
    found = planned(*(holder(agent) for agent in "abcde"), wants=wants, load=load)
    gives = {agent: stepped(bps[agent]) / (count + 1) for agent, count in zip("abcde", readers, strict=True)}
    assert max(gives[agent] for agent in agents(found)) == max(gives.values())
