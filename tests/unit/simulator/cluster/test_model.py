"""The model of a cluster: the flow network, the ceiling of a TCP stream, generation, and a trial's worth."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_simulator.engine.agenda import Agenda
from tensorhub_simulator.performance import comparison
from tensorhub_simulator.performance.__main__ import read
from tensorhub_simulator.performance.config import Generation
from tensorhub_simulator.performance.model import shard
from tensorhub_simulator.performance.model.cluster import ClusterRun, run
from tensorhub_simulator.performance.model.generation import batch_s, boundary_s
from tensorhub_simulator.performance.model.network import UNBOUND, Connection, Link, Network, fair, stream_bytes_s

Way = tuple[tuple[int, ...], int, int, float]
"""Links, a ceiling, bytes, and the second at which they are sent."""

FREE = 1 << 60


def sent(links: list[Link], ways: list[Way], look: Callable[[list[Connection]], None]) -> list[float]:
    """Send each over a connection of its own, and look after each step; return when each has come."""
    agenda = Agenda()
    network = Network(agenda)
    ends = [-1.0] * len(ways)
    connections = []
    for number, (over, ceiling, nbytes, at_s) in enumerate(ways):
        connection = Connection(tuple(links[each] for each in over), ceiling=ceiling)
        connections.append(connection)

        def end(number: int = number) -> None:
            ends[number] = agenda.now

        agenda.at(at_s, lambda c=connection, n=nbytes, e=end: network.send(c, n, e))  # type: ignore[misc]
    while agenda.step():
        check(links)
        look(connections)
    return ends


def check(links: list[Link]) -> None:
    for link in links:
        assert sum(each.rate for each in link.active) <= link.bytes_s * (1 + 1e-9), link.name
        assert link.demand == sum(each.bound for each in link.active)


@pytest.mark.parametrize(
    ("bytes_s", "ways", "ends"),
    [
        pytest.param([100, 50], [((0, 1), FREE, 1000, 2.0)], [2.0 + 1000 / 50], id="one alone"),
        pytest.param([100] * 8, [((0, 1 + n), FREE, 1000, 0.0) for n in range(7)], [70.0] * 7, id="a star"),
        pytest.param([100] * 6, [((2 * n, 2 * n + 1), FREE, 1000, 0.0) for n in range(3)], [10.0] * 3, id="a chain"),
        # Max-min: the one with a ceiling has 20, the other two of 120 get 50 each, and all of it when they are alone.
        pytest.param(
            [120],
            [((0,), 20, 200, 0.0), ((0,), FREE, 500, 0.0), ((0,), FREE, 1000, 0.0)],
            [10.0, 10.0, 10.0 + 500 / 120],
            id="what one leaves another takes",
        ),
    ],
)
def test_bytes_over_a_fair_share_of_capacity(bytes_s: list[int], ways: list[Way], ends: list[float]) -> None:
    links = [Link(f"{n}", each) for n, each in enumerate(bytes_s)]
    assert sent(links, ways, lambda _: None) == pytest.approx(ends)


def test_messages_come_in_order_and_what_is_closed_brings_nothing_more_and_frees_the_link() -> None:
    agenda = Agenda()
    network = Network(agenda)
    link = Link("line", 10)
    one, other = Connection((link,)), Connection((link,))
    ends: list[tuple[str, float]] = []
    network.send(one, 100, lambda: pytest.fail("a closed connection brings nothing"))
    network.send(other, 100, lambda: ends.append(("first", agenda.now)))
    network.send(other, 50, lambda: ends.append(("second", agenda.now)))
    agenda.at(10.0, lambda: network.close(one))
    while agenda.step():
        check([link])
    network.send(one, 100, lambda: pytest.fail("nor when it is asked again"))
    assert not agenda.step()
    assert dict(ends) == pytest.approx({"first": 15.0, "second": 20.0})
    assert link.carried == pytest.approx(200.0)


def test_who_closes_as_soon_as_all_has_come_frees_the_link() -> None:
    agenda, link, ends = Agenda(), Link("line", 100), list[float]()
    network = Network(agenda)

    def send_next() -> None:
        connection = Connection((link,))

        def came() -> None:
            ends.append(agenda.now)
            network.close(connection)
            if len(ends) < 3:
                send_next()

        network.send(connection, 1000, came)

    send_next()
    while agenda.step():
        check([link])
    assert ends == [pytest.approx(10.0 * n) for n in (1, 2, 3)]
    assert not link.active


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[Link], list[Way]]:
    links = [Link(f"{n}", draw(st.integers(1, 200))) for n in range(draw(st.integers(1, 5)))]
    way = st.tuples(
        st.lists(st.integers(0, len(links) - 1), min_size=1, max_size=3, unique=True).map(tuple),
        st.one_of(st.just(FREE), st.integers(1, 100)),
        st.integers(1, 5000),
        st.sampled_from([0.0, 0.0, 1.5, 7.0]),
    )
    return links, draw(st.lists(way, min_size=1, max_size=8))


@given(meshes())
def test_bytes_are_conserved_and_solving_what_a_change_reaches_is_enough(mesh: tuple[list[Link], list[Way]]) -> None:
    def look(connections: list[Connection]) -> None:
        for connection, rate in fair([each for each in connections if each.messages]).items():
            assert connection.rate == pytest.approx(rate)

    links, ways = mesh
    ends = sent(links, ways, look)
    for number, link in enumerate(links):
        assert link.carried == pytest.approx(sum(nbytes for over, _, nbytes, _ in ways if number in over))
        assert not link.active
        assert link.demand == 0
    for (over, ceiling, nbytes, at_s), end in zip(ways, ends, strict=True):
        assert end >= at_s + nbytes / min(ceiling, *(links[each].bytes_s for each in over)) - 1e-6


@given(meshes())
def test_rates_are_max_min_fair(mesh: tuple[list[Link], list[Way]]) -> None:
    """Whoever has less than it could have shares a full link with nobody who has more."""
    links, ways = mesh
    connections = [Connection(tuple(links[each] for each in over), ceiling=ceiling) for over, ceiling, _, _ in ways]
    for connection in connections:
        for link in connection.links:
            link.active[connection] = None
            link.demand += connection.bound
    rates = fair(connections)
    for connection in connections:
        if rates[connection] >= connection.bound * (1 - 1e-9):
            continue
        full = [link for link in connection.links if sum(rates[c] for c in link.active) >= link.bytes_s * (1 - 1e-9)]
        assert any(max(rates[c] for c in link.active) <= rates[connection] * (1 + 1e-9) for link in full)


def test_the_ceiling_of_one_tcp_stream() -> None:
    """A window in each round trip, or what loss leaves of it by Mathis; without a round trip nothing bounds it."""
    assert stream_bytes_s(16 << 20, 0.05, 0.0) == int((16 << 20) / 0.05)
    assert stream_bytes_s(1 << 40, 0.1, 1e-4) == int(math.sqrt(1.5) * 1448 / (0.1 * 1e-2))
    assert [stream_bytes_s(1, rtt_s, 0.5) for rtt_s in (0.0, -1.0)] == [UNBOUND, UNBOUND]


def mean(generation: Generation) -> float:
    rng = random.Random(1)
    return sum(boundary_s(generation, rng) for _ in range(500)) / 500


def test_a_boundary_is_within_what_can_be_and_the_more_unequal_the_lengths_the_farther() -> None:
    """What can be interrupted stops at the next token; lengths have the percentile that is named."""
    generation = Generation(tokens_max=1000, token_s=0.01, skew=20)
    rng = random.Random(1)
    assert max(batch_s(generation, rng) for _ in range(500)) == pytest.approx(10.0)
    assert all(0 <= boundary_s(generation, rng) <= 10.0 for _ in range(500))
    assert mean(Generation(interrupted=True, token_s=0.02)) == pytest.approx(0.01, rel=0.2)
    near = mean(Generation(responses=1, skew=2, tokens_max=1e9))
    assert near < mean(Generation(responses=32, skew=2, tokens_max=1e9))
    assert near < mean(Generation(responses=1, skew=10, tokens_max=1e9))
    one = Generation(responses=1, skew=10, tokens_median=100, tokens_max=1e9, token_s=1)
    lengths = sorted(batch_s(one, rng) for _ in range(20_000))
    assert lengths[10_000] == pytest.approx(100, rel=0.05)
    assert lengths[19_800] == pytest.approx(1000, rel=0.1)


SLOW_BY, EVERY = 10, 8
"""One replica of so many sends so much more slowly."""


def test_a_trial_takes_readers_off_a_slow_middle_of_their_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is worth its code: the slowest of 12 updates of a standalone cluster with 64 GPUs, with trials and without."""

    def longest_s(trials_max: int) -> float:
        monkeypatch.setattr(shard, "LIMITS", replace(shard.LIMITS, trials_max=trials_max))
        cluster = comparison.grown(read("standalone"), 64)
        world = ClusterRun(comparison.changed(cluster, {"generation.interrupted": True}))
        readers = [places for (kind, _), places in world.fabric.seats.items() if kind != cluster.trainer]
        for places in readers[::EVERY]:
            for place in places:
                place.out.bytes_s //= SLOW_BY
        return max(update.took_s for update in run(world).updates)

    assert longest_s(8) < longest_s(0) / 2
