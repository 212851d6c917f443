"""The lease on leadership: one holder at a time, and a term that rises from holder to holder."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from tests.bounds import BUSY_S, WAIT_S
from tests.kit.nats import RunningNats
from tests.kit.waiting import until

from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.errors import NoAnswer
from tensorhub_common.errors import InvalidName
from tensorhub_common.jetstream import api, leader_lease
from tensorhub_common.jetstream.leader_lease import LeaderLease

TTL_S = 1.0


@pytest.fixture
async def second_bus(nats_server: RunningNats) -> AsyncIterator[Bus]:
    async with await connect(nats_server.url, name="second") as connected:
        yield connected


async def hold(wish: LeaderLease, timeout_s: float = WAIT_S) -> LeaderLease:
    """Return one that is held, started now unless it was."""
    if wish._task is None:
        await wish.start()
    assert await wish.wait(held=True, timeout_s=timeout_s)
    return wish


@pytest.mark.long
async def test_one_of_many_holds_it(bus: Bus, job: str) -> None:
    wishes = [LeaderLease(bus, job, f"registry-{index}", TTL_S) for index in range(5)]
    await asyncio.gather(*(wish.start() for wish in wishes))
    await until(lambda: any(wish.held for wish in wishes))
    end = time.monotonic() + 2.5 * TTL_S
    while time.monotonic() < end:
        assert sum(wish.held for wish in wishes) <= 1
        await asyncio.sleep(0.01)
    await asyncio.gather(*(wish.close() for wish in wishes))


async def test_a_holder_that_closes_hands_over_at_once_and_the_term_rises(bus: Bus, second_bus: Bus, job: str) -> None:
    async with LeaderLease(bus, job, "one", 60) as one:
        await hold(one)
        assert 58 < one.held_for_s <= 60
        two = LeaderLease(second_bus, job, "two", TTL_S)
        await two.start()
        assert not await two.wait(held=True, timeout_s=0.5)
        await one.close()
        assert not one.held
        await hold(two, 1.0)
        assert two.term > one.term > 0
        await two.close()


async def test_a_holder_that_falls_silent_loses_it_before_another_has_it(bus: Bus, second_bus: Bus, job: str) -> None:
    """The holder's process stops dead; its own clock ends the lease no later than the server's."""
    changes: list[bool] = []
    one = await hold(LeaderLease(bus, job, "one", TTL_S, on_change=changes.append))
    two = LeaderLease(second_bus, job, "two", TTL_S)
    await two.start()
    assert one._task is not None
    one._task.cancel()
    while not two.held:
        both = one.held
        await asyncio.sleep(0.001)
        assert not (both and two.held)
    assert not one.held
    assert two.term > one.term
    await two.close()
    await one.close()
    assert changes == [True, False]


async def test_a_restarted_process_takes_over_its_own_lease_at_once(bus: Bus, second_bus: Bus, job: str) -> None:
    before = await hold(LeaderLease(bus, job, "one", 60))
    term = before.term
    assert before._task is not None
    before._task.cancel()
    after = await hold(LeaderLease(second_bus, job, "one", 60), 1.0)
    assert after.term > term
    # The earlier life, should it live after all, finds that it is over and doesn't take it back.
    before._until = 0.0
    before._task = asyncio.create_task(before._keep())
    assert not await before.wait(held=True, timeout_s=0.5)
    assert after.held
    await after.close()
    await before.close()


async def test_a_renewal_whose_acknowledgement_was_lost_costs_nothing(
    bus: Bus, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry stands there, so the holder finds it to be its own and goes on with the same term."""
    lost = 0
    store = api.store

    async def lossy(*args: object) -> api.Ack:
        nonlocal lost
        ack = await store(*args)  # type: ignore[arg-type]
        if lost < 3:
            lost += 1
            raise NoAnswer("lost on the way")
        return ack

    async with LeaderLease(bus, job, "one", 2) as one:
        await hold(one)
        term, changes = one.term, list[bool]()
        one._on_change = changes.append
        monkeypatch.setattr(api, "store", lossy)
        await until(lambda: lost >= 3)
        assert await one.wait(held=True, timeout_s=2.0)
        assert changes == []
        assert one.term == term


async def test_an_acquisition_whose_acknowledgement_was_lost_is_found(
    bus: Bus, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = api.store

    async def lossy(*args: object) -> api.Ack:
        monkeypatch.setattr(api, "store", store)
        await store(*args)  # type: ignore[arg-type]
        raise NoAnswer("lost on the way")

    monkeypatch.setattr(api, "store", lossy)
    async with LeaderLease(bus, job, "one", 60) as one:
        await hold(one, 2.0)
        assert one.term > 0


@pytest.mark.long
async def test_it_is_lost_with_the_connection_and_comes_back(own_nats_server: RunningNats, own_bus: Bus) -> None:
    """The server forgets nothing by being killed: neither that the lease ended nor how far the terms had come."""
    async with LeaderLease(own_bus, "registry", "one", TTL_S) as one:
        await hold(one)
        for _ in range(2):
            term = one.term
            own_nats_server.kill()
            assert await one.wait(held=False, timeout_s=TTL_S + 0.5)
            own_nats_server.start()
            await hold(one)
            assert one.term >= term


async def test_a_lease_ends_though_the_server_was_killed_meanwhile(own_nats_server: RunningNats, own_bus: Bus) -> None:
    one = await hold(LeaderLease(own_bus, "registry", "one", TTL_S))
    assert one._task is not None
    one._task.cancel()
    own_nats_server.restart()
    two = await hold(LeaderLease(own_bus, "registry", "two", TTL_S))
    assert two.term > one.term
    await one.close()
    own_nats_server.kill()
    began = time.monotonic()
    await two.close()
    assert time.monotonic() - began < leader_lease.CLOSE_TIMEOUT_S + BUSY_S, "also without a server"


async def test_an_outage_shorter_than_the_lease_changes_nothing(own_nats_server: RunningNats, own_bus: Bus) -> None:
    changes: list[bool] = []
    async with LeaderLease(own_bus, "registry", "one", 5, on_change=changes.append) as one:
        await hold(one)
        term = one.term
        own_nats_server.restart()
        await until(lambda: one.held_for_s >= 4.9)
        assert one.term == term
        assert changes == [True]


async def test_what_can_not_be_a_lease_is_refused(bus: Bus) -> None:
    with pytest.raises(InvalidName):
        LeaderLease(bus, "a.b", "one", 1)
    with pytest.raises(ValueError, match="whole seconds"):
        LeaderLease(bus, "a", "one", 0.5)
    assert LeaderLease(bus, "a", "one", 2.9).ttl_s == 2
