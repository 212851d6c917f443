"""The flow network: fair shares, bytes that are conserved, links that are never above their capacity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_simulator.engine.agenda import Agenda
from tensorhub_simulator.performance.model.network import Connection, Link, Network, fair


def came(links: list[Link], ways: list[tuple[tuple[int, ...], int, int, float]]) -> list[float]:
    """Send (links, ceiling, bytes, at second) each over a connection of its own; return when each has come."""
    agenda = Agenda()
    network = Network(agenda)
    ends = [-1.0] * len(ways)
    for number, (over, ceiling, nbytes, at_s) in enumerate(ways):
        connection = Connection(tuple(links[each] for each in over), ceiling=ceiling)

        def end(number: int = number) -> None:
            ends[number] = agenda.now

        agenda.at(at_s, lambda c=connection, n=nbytes, e=end: network.send(c, n, e))  # type: ignore[misc]
    while agenda.step():
        check(links)
    return ends


def check(links: list[Link]) -> None:
    for link in links:
        assert sum(each.rate for each in link.active) <= link.bytes_s * (1 + 1e-9), link.name
        assert link.demand == sum(each.bound for each in link.active)


def test_one_alone_takes_bytes_over_capacity() -> None:
    out, into = Link("out", 100), Link("in", 50)
    assert came([out, into], [((0, 1), 1 << 60, 1000, 2.0)]) == [pytest.approx(2.0 + 1000 / 50)]


def test_a_star_takes_as_many_times_as_long_as_it_has_readers() -> None:
    links = [Link("out", 100), *(Link(f"in{n}", 100) for n in range(7))]
    ends = came(links, [((0, 1 + n), 1 << 60, 1000, 0.0) for n in range(7)])
    assert ends == [pytest.approx(7 * 10.0)] * 7


def test_a_chain_that_nobody_shares_takes_the_time_of_one() -> None:
    links = [Link(f"{n}", 100) for n in range(6)]
    assert came(links, [((2 * n, 2 * n + 1), 1 << 60, 1000, 0.0) for n in range(3)]) == [pytest.approx(10.0)] * 3


def test_what_one_leaves_another_takes() -> None:
    """Max-min: the one with a ceiling has 20, the other two of 120 get 50 each, and all of it when they are alone."""
    link = Link("line", 120)
    ends = came([link], [((0,), 20, 200, 0.0), ((0,), 1 << 60, 500, 0.0), ((0,), 1 << 60, 1000, 0.0)])
    # 10 s: 200, 500 and 500 have come; then the third alone has 120.
    assert ends == [pytest.approx(10.0), pytest.approx(10.0), pytest.approx(10.0 + 500 / 120)]


def test_messages_of_a_connection_come_in_order() -> None:
    agenda = Agenda()
    network = Network(agenda)
    connection = Connection((Link("line", 10),))
    ends: list[tuple[str, float]] = []
    network.send(connection, 100, lambda: ends.append(("first", agenda.now)))
    network.send(connection, 50, lambda: ends.append(("second", agenda.now)))
    while agenda.step():
        pass
    assert [name for name, _ in ends] == ["first", "second"]
    assert [at_s for _, at_s in ends] == pytest.approx([10.0, 15.0])


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


def test_what_is_closed_brings_nothing_more_and_frees_the_link() -> None:
    agenda = Agenda()
    network = Network(agenda)
    link = Link("line", 10)
    one, other = Connection((link,)), Connection((link,))
    ends: list[float] = []
    network.send(one, 100, lambda: pytest.fail("a closed connection brings nothing"))
    network.send(other, 100, lambda: ends.append(agenda.now))
    agenda.at(10.0, lambda: network.close(one))
    while agenda.step():
        pass
    network.send(one, 100, lambda: pytest.fail("nor when it is asked again"))
    assert not agenda.step()
    assert ends == [pytest.approx(15.0)]
    assert link.carried == pytest.approx(150.0)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[Link], list[tuple[tuple[int, ...], int, int, float]]]:
    links = [Link(f"{n}", draw(st.integers(1, 200))) for n in range(draw(st.integers(1, 5)))]
    way = st.tuples(
        st.lists(st.integers(0, len(links) - 1), min_size=1, max_size=3, unique=True).map(tuple),
        st.one_of(st.just(1 << 60), st.integers(1, 100)),
        st.integers(1, 5000),
        st.sampled_from([0.0, 0.0, 1.5, 7.0]),
    )
    return links, draw(st.lists(way, min_size=1, max_size=8))


@given(meshes())
def test_bytes_are_conserved_and_nothing_is_above_its_capacity(
    mesh: tuple[list[Link], list[tuple[tuple[int, ...], int, int, float]]],
) -> None:
    links, ways = mesh
    ends = came(links, ways)
    for number, link in enumerate(links):
        assert link.carried == pytest.approx(sum(nbytes for over, _, nbytes, _ in ways if number in over))
        assert not link.active
        assert link.demand == 0
    for (over, ceiling, nbytes, at_s), end in zip(ways, ends, strict=True):
        assert end >= at_s + nbytes / min(ceiling, *(links[each].bytes_s for each in over)) - 1e-6


@given(meshes())
def test_rates_are_max_min_fair(mesh: tuple[list[Link], list[tuple[tuple[int, ...], int, int, float]]]) -> None:
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


@given(meshes())
def test_solving_only_what_a_change_can_reach_is_solving_all(
    mesh: tuple[list[Link], list[tuple[tuple[int, ...], int, int, float]]],
) -> None:
    links, ways = mesh
    agenda = Agenda()
    network = Network(agenda)
    connections = []
    for over, ceiling, nbytes, at_s in ways:
        connection = Connection(tuple(links[each] for each in over), ceiling=ceiling)
        connections.append(connection)
        agenda.at(at_s, lambda c=connection, n=nbytes: network.send(c, n, lambda: None))  # type: ignore[misc]
    while agenda.step():
        busy = [each for each in connections if each.messages]
        for connection, rate in fair(busy).items():
            assert connection.rate == pytest.approx(rate)
