"""Which holders give which pieces, and the order in which distances are read."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner.given import MIB, SIZES, source

from tensorhub_common.protocol.ranges import Ranges, merge_ranges
from tensorhub_planner.planning.selection import MeasuredDistance, SourceOffer, ranks, select_sources
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.topology import Distance

ALL = SIZES.all()


def offer(agent: str, pieces: Ranges = ALL, *, distance: Distance = Distance.SITE, **more: float) -> SourceOffer:
    about: dict[str, Any] = {"readers": 0, "assigned": 0, "depth": 0, "lot": 0} | more
    return SourceOffer(source=source(agent), distance=distance, pieces=pieces, **about)


def chosen(
    *offers: SourceOffer, wanted: Ranges = ALL, limits: PlanLimits | None = None
) -> tuple[dict[str, Ranges], Ranges]:
    choices, missing = select_sources(wanted, SIZES, offers, limits or PlanLimits())
    found: dict[str, Ranges] = {}
    for part in (part for choice in choices for part in choice.parts):
        found[part.offer.source.agent] = merge_ranges((*found.get(part.offer.source.agent, ()), *part.pieces))
    return found, missing


@pytest.mark.parametrize("distance", Distance)
def test_the_order_among_equals(distance: Distance) -> None:
    """Fewest readers, then fewest bytes, then the lot, then the name."""
    by_rank = [
        offer("f", distance=distance, readers=1),
        offer("e", distance=distance, assigned=1),
        offer("c", distance=distance, lot=2),
        offer("b", distance=distance, lot=1),
        offer("a", distance=distance, lot=1),
    ]
    while by_rank:
        best = by_rank.pop()
        assert list(chosen(best, *by_rank)[0]) == [best.source.agent]


HOST, AGENT, SITE, WAN = Distance.HOST, Distance.AGENT, Distance.SITE, Distance.WAN


@pytest.mark.parametrize(
    ("offers", "best"),
    [
        # From a holder with a reader 1 GiB takes as long as two, and a hop as long as 8 MiB.
        ([offer("ready", readers=1), offer("half", depth=1)], "half"),
        ([offer("ready"), offer("half", depth=1)], "ready"),
        # On the reader's host its own copying is the bound, however many others read.
        ([offer("near", distance=HOST, readers=100), offer("half", distance=HOST, depth=1)], "near"),
        ([offer("near", distance=HOST, readers=100), offer("half", distance=AGENT, depth=1)], "near"),
        # A half-filled one in the site spares the link until that is faster: 1 GiB takes 1.17 s over it, as long as
        # from a source with 26 readers in the site.
        ([offer("ready", distance=WAN), offer("half", depth=1, readers=26)], "half"),
        ([offer("ready", distance=WAN), offer("half", depth=1, readers=27)], "ready"),
        # A host and a site take the bytes once: who is nearer than every ready one gives them to its neighbours.
        ([offer("ready"), offer("half", distance=HOST, depth=1, readers=3)], "ready"),
        ([offer("ready", distance=WAN), offer("half", depth=1, readers=3)], "half"),
        # A small read forms no chain.
        ([offer("ready", ((0, 1),), readers=1), offer("half", ((0, 1),), depth=1)], "ready"),
        # From a holder with a reader 128 MiB take as long as 256, and 128 MiB as long as 16 hops.
        ([offer("ready", ((0, 32),), readers=1), offer("half", ((0, 32),), depth=15)], "half"),
        ([offer("ready", ((0, 32),), readers=1), offer("half", ((0, 32),), depth=17)], "ready"),
    ],
)
def test_half_filled_ones_beside_ready_ones(offers: list[SourceOffer], best: str) -> None:
    assert list(chosen(*offers, wanted=offers[0].pieces)[0]) == [best]


def test_where_a_hop_costs_nothing_a_ready_one_comes_first() -> None:
    found, _ = chosen(offer("ready", lot=2), offer("half", depth=1, lot=1), limits=PlanLimits(hop_bytes=0))
    assert list(found) == ["ready"]


@pytest.mark.parametrize(
    ("offers", "found", "missing"),
    [
        # A near part comes before a far whole: only what the host lacks is fetched from elsewhere in the site.
        ([offer("a"), offer("near", ((0, 64),), distance=HOST)], {"near": ((0, 64),), "a": ((64, 192),)}, ()),
        # What one alone has comes from it; what two have goes to the one with less to do.
        ([offer("a", ((0, 128),)), offer("b", ((64, 192),))], {"a": ((0, 128),), "b": ((128, 128),)}, ()),
        (
            [offer("a", ((0, 4),)), offer("far", ((2, 4),), distance=WAN)],
            {"a": ((0, 4),), "far": ((4, 2),)},
            ((6, 250),),
        ),
        # Whoever gives more of one group gives less of the next: all that is begun counts.
        (
            [
                offer("a", ((0, 144),), readers=20),
                offer("b", ((32, 64),), readers=20),
                offer("c", ((96, 48),), readers=20),
            ],
            {"a": ((0, 32), (80, 16)), "b": ((32, 48),), "c": ((96, 48),)},
            ((144, 112),),
        ),
        # What two give may come from the one that ends first with what it has begun.
        (
            [offer("a", ((0, 10), (16, 1))), offer("b", ((10, 7),), readers=1)],
            {"a": ((0, 10), (16, 1)), "b": ((10, 6),)},
            ((17, 239),),
        ),
        (
            [offer("a", ((0, 10), (16, 1)), measured_bps=50e9), offer("b", ((10, 7),))],
            {"a": ((0, 10), (16, 1)), "b": ((10, 6),)},
            ((17, 239),),
        ),
        # A part is not striped where the rest takes longer.
        (
            [offer("a", ((0, 240),)), offer("b", ((240, 16),), readers=3), offer("c", ((240, 16),), readers=3)],
            {"a": ((0, 240),), "b": ((240, 16),)},
            (),
        ),
    ],
)
def test_parts(offers: list[SourceOffer], found: dict[str, Ranges], missing: Ranges) -> None:
    assert chosen(*offers) == (found, missing)


@pytest.mark.parametrize("readers", [1, 3])
def test_sources_end_together_with_all_that_they_give(readers: int) -> None:
    """What only `a` has counts when the rest is divided: half of the whole from each, as both are equally busy."""
    found, _ = chosen(offer("a", readers=readers), offer("b", ((64, 192),), readers=readers))
    assert {agent: SIZES.of(pieces) for agent, pieces in found.items()} == {"a": 512 * MIB, "b": 512 * MIB}


def test_on_one_host_whoever_is_read_already_gives_the_rest_too() -> None:
    """The reader's copying is the bound there, so asking one more costs its setup and gains nothing."""
    first = offer("first", ((10, 10),), distance=HOST, lot=1)
    second = offer("second", ((10, 20),), distance=HOST, lot=2)
    found, _ = chosen(first, second, wanted=((10, 20),))
    assert found == {"second": ((10, 20),)}


@pytest.mark.parametrize(("slack", "count"), [(0.0, 4), (100.0, 1)])
def test_so_many_are_striped_as_are_allowed_and_pay(slack: float, count: int) -> None:
    """Out of many busy sources the least loaded, in equal parts."""
    busy = [offer(f"agent-{n:02}", readers=20, assigned=n) for n in range(40)]
    found, _ = chosen(*busy, limits=PlanLimits(stripes_max=4, slack=slack))
    assert {agent: SIZES.of(its) for agent, its in found.items()} == {
        f"agent-{n:02}": 1024 * MIB // count for n in range(count)
    }


@pytest.mark.parametrize(("distance", "bps"), [(Distance.HOST, 1e9), (Distance.SITE, 1e9), (Distance.SITE, 1e15)])
def test_a_measured_rate_is_that_of_the_copying_on_the_host_and_of_the_source_elsewhere(
    distance: Distance, bps: float
) -> None:
    limits = PlanLimits()
    rates = limits.rates(distance)
    bound = bps if rates.source_bps is None else min(bps, rates.ingest_bps)
    ((choice,), _) = select_sources(ALL, SIZES, (offer("a", distance=distance, measured_bps=bps),), limits)
    assert choice.seconds == pytest.approx(SIZES.of(ALL) / bound + rates.setup_s)


def test_of_those_that_have_everything_only_as_many_are_looked_at_as_may_be_striped() -> None:
    """So that a plan among thousands of replicas costs what one among a few does. A part is looked at all the same."""
    whole = [offer("a", lot=1), offer("b", lot=2)]
    found, _ = chosen(*whole, offer("part", ((0, 64),), lot=3), limits=PlanLimits(stripes_max=1))
    assert found == {"a": ((64, 192),), "part": ((0, 64),)}


def test_a_part_with_less_to_do_comes_before_what_has_everything() -> None:
    """And the other way round: the order by load is one for both."""
    halves = offer("left", ((0, 128),), readers=4), offer("right", ((128, 128),), readers=4)
    for readers, first in ((9, "left"), (0, "whole")):
        found, _ = chosen(offer("whole", readers=readers), *halves, limits=PlanLimits(stripes_max=1))
        assert found == {first: ((0, 128),), "right": ((128, 128),)}


def test_what_is_one_source_too_many_takes_nothing_else_along() -> None:
    """Of `a`, `b` and `c` only `a` may be read: what it shares with `c` comes from it, though `b`'s are missing."""
    parts = (offer("a", ((0, 20),)), offer("b", ((20, 10),)), offer("c", ((10, 10),)))
    assert chosen(*parts, wanted=((0, 30),), limits=PlanLimits(shares_max=1)) == ({"a": ((0, 20),)}, ((20, 10),))


def test_who_gives_several_groups_of_pieces_is_one_source() -> None:
    """What `a` gives of two groups leaves room for another one, of which `c` gives the third."""
    parts = {"a": ((0, 1), (2, 1)), "b": ((2, 1),), "c": ((4, 1),), "d": ((4, 1),)}
    near = [offer(name, pieces, distance=HOST, lot=lot) for lot, (name, pieces) in enumerate(parts.items())]
    found, missing = chosen(*near, wanted=((0, 6),), limits=PlanLimits(shares_max=2))
    assert found == {"a": ((0, 1), (2, 1)), "c": ((4, 1),)}
    assert missing == ((1, 1), (3, 1), (5, 1))


LIMITS = PlanLimits(nearer_times=2.0)


def order(*sources: tuple[Distance, int | None]) -> list[Distance]:
    """Return the distances in the order in which they are read from."""
    found = ranks([MeasuredDistance(*source) for source in sources], LIMITS)
    return [sources[index][0] for index in sorted(range(len(sources)), key=lambda index: found[index])]


@pytest.mark.parametrize(
    ("host", "site", "nearer"),
    [
        (None, None, Distance.HOST),
        (None, 10_000, Distance.HOST),
        (10, None, Distance.HOST),
        (500, 1000, Distance.HOST),
        (499, 1000, Distance.SITE),
        (2000, 1000, Distance.HOST),
    ],
)
def test_only_a_clear_measurement_turns_the_order(host: int | None, site: int | None, nearer: Distance) -> None:
    """Both must be measured, and the nearer one bring less than half."""
    assert order((Distance.HOST, host), (Distance.SITE, site))[0] is nearer


@pytest.mark.parametrize(
    ("host", "rack", "expected"),
    [
        (1, 100, [Distance.SITE, Distance.RACK, Distance.HOST]),
        (60, 100, [Distance.SITE, Distance.HOST, Distance.RACK]),
        (1, 900, [Distance.RACK, Distance.SITE, Distance.HOST]),
        (460, 900, [Distance.RACK, Distance.SITE, Distance.HOST]),
        (460, None, [Distance.RACK, Distance.SITE, Distance.HOST]),
    ],
)
def test_a_slow_one_goes_behind_all_that_are_far_faster(host: int, rack: int | None, expected: list[Distance]) -> None:
    """Whichever way these stand to each other; other sites stay where they are."""
    found = order((Distance.HOST, host), (Distance.RACK, rack), (Distance.SITE, 1000), (Distance.WAN, None))
    assert found == [*expected, Distance.WAN]


def test_two_of_one_distance_may_be_before_and_behind_a_farther_one() -> None:
    assert order((HOST, 1), (HOST, 900), (SITE, 1000)) == [HOST, SITE, HOST]


measures = st.lists(
    st.builds(MeasuredDistance, st.sampled_from(Distance), st.none() | st.integers(1, 10**6)), min_size=1, max_size=8
)


@given(measures)
def test_a_nearer_one_is_behind_only_what_was_measured_to_be_far_faster(sources: list[MeasuredDistance]) -> None:
    found = ranks(sources, LIMITS)
    for one, its in zip(sources, found, strict=True):
        for other, others in zip(sources, found, strict=True):
            if one.distance < other.distance and others < its:
                assert other.distance is not Distance.WAN
                assert one.bps is not None
                assert any(
                    each.bps is not None and one.bps * LIMITS.nearer_times < each.bps
                    for each in sources
                    if one.distance < each.distance < Distance.WAN
                )
