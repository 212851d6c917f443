"""How many sources are worth it, in numbers that can be checked by hand; measured rates in place of assumed ones."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.planner.given import MIB, SEAT, SIZES, TOPOLOGY, agents, demand, holder, planned, source

from tensorhub_common.protocol.plans import LinkRate, Plan, PlanRequest, SourceId, Transport
from tensorhub_planner.catalog_view.holders import HolderSet
from tensorhub_planner.load.ledger import LoadView
from tensorhub_planner.load.load import Load
from tensorhub_planner.planning.cost_model import (
    BPS_MAX,
    OWN_HOST,
    STEP,
    StripeCandidate,
    measured_limits,
    stepped,
    stripe,
    trusted_rates,
)
from tensorhub_planner.planning.plan import make_plan
from tensorhub_planner.primitives.limits import LOCAL, NETWORK, WIDE, PlanLimits, Rates
from tensorhub_planner.primitives.topology import AgentPlace, Topology

GB = 10**9
RATES = Rates(ingest_bps=10 * GB, source_bps=10 * GB, setup_s=0.01)
FREE = Rates(ingest_bps=1e15, source_bps=GB, setup_s=0)
"""Asking one more costs nothing, and the reader is no bound."""
IDLE = StripeCandidate(0)


def test_a_slow_source_gives_less() -> None:
    """One that was measured to give a quarter of the other's gives a fifth, so that both end together."""
    found = stripe(10 * GB, [StripeCandidate(0, 0, 4 * GB), StripeCandidate(0, 0, 1 * GB)], RATES, 16, 0.0)
    assert found.nbytes == pytest.approx((8 * GB, 2 * GB))
    assert found.seconds == pytest.approx(2.02)


def test_on_one_host_nothing_is_striped_and_nothing_to_read_asks_no_second_source() -> None:
    """The reader copies by itself: its speed is the bound, however many sources there are and however busy."""
    found = stripe(12 * GB, [StripeCandidate(7)] * 4, LOCAL, 16, 0.1)
    assert list(found.nbytes) == [12 * GB]
    assert found.seconds == found.seconds_alone == pytest.approx(1.0005)
    assert stripe(0, [StripeCandidate(4)] * 3, NETWORK, 16, 0.1).nbytes == (0,)
    assert stripe(0, [StripeCandidate(0, begun=GB), IDLE], FREE, 16, 0.1).nbytes == (0,)


candidates = st.lists(st.builds(StripeCandidate, st.integers(0, 20), st.integers(0, 10**12)), min_size=1, max_size=40)
rates = st.builds(
    lambda ingest, source, setup: Rates(ingest_bps=ingest, source_bps=source, setup_s=setup),
    st.floats(1e6, 1e12),
    st.none() | st.floats(1e6, 1e12),
    st.floats(0, 1),
)


def seconds_of(nbytes: int, used: list[StripeCandidate], speed: Rates) -> float:
    """Return what the model says, with the common end found by trying: by then all that end sooner give everything."""
    setup = speed.setup_s * sum(not each.begun for each in used)
    ingest = (nbytes + sum(each.begun for each in used)) / speed.ingest_bps
    if speed.source_bps is None:
        return ingest + setup
    early, late = 0.0, max((nbytes + each.begun) * (each.readers + 1) for each in used) / speed.source_bps
    for _ in range(100):
        end = (early + late) / 2
        given_by_then = sum(max(0.0, end * speed.source_bps / (each.readers + 1) - each.begun) for each in used)
        early, late = (early, end) if given_by_then >= nbytes else (end, late)
    return max(late, ingest) + setup


@given(st.integers(0, 10**13), candidates, rates, st.integers(1, 16), st.floats(0, 1))
@example(GB, [StripeCandidate(0, begun=3 * GB), StripeCandidate(0, begun=GB)], FREE, 2, 0.0)
@example(GB, [StripeCandidate(9, begun=GB), StripeCandidate(0, begun=8 * GB)], FREE, 2, 0.0)
@example(1, [StripeCandidate(0, begun=GB), IDLE], FREE, 2, 0.0)
@example(4 * GB, [StripeCandidate(0, begun=GB), StripeCandidate(9, begun=GB)], FREE, 2, 0.0)
def test_all_bytes_are_given_out_in_the_shortest_time_and_sources_end_together(
    nbytes: int, some: list[StripeCandidate], speed: Rates, stripes_max: int, slack: float
) -> None:
    """To the first few sources, and no other number of them is faster, but for the slack.

    Where the reader is the bound, there is nothing to gain from more than one. Whoever gets a part ends with the
    others, all that it had begun included; whoever gets none ends no sooner.
    """
    found = stripe(nbytes, some, speed, stripes_max, slack)
    assert sum(found.nbytes) == pytest.approx(nbytes, rel=1e-6, abs=1), "but for a byte of rounding"
    assert all(each >= 0 for each in found.nbytes)
    assert 1 <= len(found.nbytes) <= min(len(some), stripes_max)
    assert found.seconds <= found.seconds_alone * (1 + slack) * (1 + 1e-9)
    if not nbytes:
        return
    all_of_them = range(1, min(len(some), stripes_max) + 1) if speed.source_bps is not None else [1]
    times = [seconds_of(nbytes, some[:count], speed) for count in all_of_them]
    assert found.seconds == pytest.approx(times[len(found.nbytes) - 1])
    assert found.seconds_alone == pytest.approx(times[0])
    assert found.seconds <= min(times) * (1 + slack) * (1 + 1e-6)
    if speed.source_bps is not None:
        even = stripe(nbytes, some, speed, stripes_max, 0.0)
        used = zip(some[: len(even.nbytes)], even.nbytes, strict=True)
        ends = [(each.begun + part) * (each.readers + 1) for each, part in used]
        last = max(end for end, part in zip(ends, even.nbytes, strict=True) if part)
        assert min(ends) >= last * (1 - 1e-9)


def test_a_part_of_a_plan_need_not_end_before_the_whole() -> None:
    """Two busy sources would bring a tenth in half the time; but the reader takes in the rest for longer than that."""
    busy = [StripeCandidate(3)] * 4
    assert len(stripe(GB, busy, RATES, 16, 0.1).nbytes) > 1
    found = stripe(GB, busy, RATES, 16, 0.1, floor_s=1.0)
    assert list(found.nbytes) == [GB]
    assert found.seconds == pytest.approx(1.01)


LIMITS = PlanLimits()


def rate(link: str, bps: int, *, samples: int = 9, age_s: float = 1.0, transport: Transport = "ucxx") -> LinkRate:
    return LinkRate(link, transport, bps, samples, age_s)


def measured(*rates: LinkRate) -> PlanRequest:
    return msgspec.structs.replace(demand(), rates=rates)


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
        (rate("site/a", 1), True),
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


def test_what_is_not_measured_is_as_its_like() -> None:
    """Hosts of a site: the median of those that are measured. The reader takes in what it got at best.

    The reader's own host and other sites say nothing of the network.
    """
    assert measured_limits({}, LIMITS) is LIMITS
    rates = [rate("site/a", 1 * GB), rate("site/b", 2 * GB), rate("site/c", 9 * GB)]
    limits = measured_limits(trusted_rates(rates, LIMITS), LIMITS)
    assert (limits.network.source_bps, limits.network.ingest_bps) == (stepped(2 * GB), stepped(9 * GB))
    assert limits.rack == limits.network, "of the rack nothing is known but that it is of this network"
    assert (limits.local, limits.wide) == (LOCAL, WIDE)
    rates = [rate(OWN_HOST, 5 * GB, transport="local"), rate("wan/paris", 100)]
    limits = measured_limits(trusted_rates(rates, LIMITS), LIMITS)
    assert (limits.local.ingest_bps, limits.local.source_bps) == (stepped(5 * GB), None)
    assert (limits.network, limits.wide) == (NETWORK, WIDE)


@given(st.integers(1, 10**12))
def test_a_rate_counts_as_the_nearest_step(bps: int) -> None:
    """Within the square root of a step; and a step is its own."""
    assert STEP**-0.5001 <= stepped(bps) / bps <= STEP**0.5001
    assert stepped(stepped(bps)) == stepped(bps)


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
    assert "; 1 of 1 source on the same host, after farther ones that were measured to be far faster" in alone.why
    assert [share.transport for share in alone.shares] == ["ucxx", "local"]


def test_each_share_names_its_link() -> None:
    """So that the reader can tell what it got over it."""
    for agent, link in (("a", "site/host-of-a"), ("beside", "host"), ("far", "wan/paris"), ("unheard-of", "")):
        assert [share.link for share in planned(holder(agent)).shares] == [link]
