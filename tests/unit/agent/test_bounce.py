"""Bounce memory is bounded, waited for in turn, and used again."""

import asyncio

import pytest

from tensorhub_agent.transports.ucxx import bounce_buffers
from tensorhub_agent.transports.ucxx.bounce_buffers import BounceBuffers, SlotPool
from tensorhub_agent.transports.ucxx.protocol.frames import SLOT_BYTES


async def test_who_finds_no_slot_waits_in_turn_and_gets_the_same_memory() -> None:
    user, order = BounceBuffers(SlotPool(), 1), []

    async def take(number: int) -> memoryview:
        async with user.slot() as slot:
            order.append(number)
            await asyncio.sleep(0)
            return slot

    slots = await asyncio.gather(*(take(number) for number in range(4)))
    assert order == [0, 1, 2, 3]
    assert len({id(slot) for slot in slots}) == 1
    assert len(slots[0]) == SLOT_BYTES


async def test_users_have_bounds_of_their_own() -> None:
    store = SlotPool()
    one, other = BounceBuffers(store, 1), BounceBuffers(store, 1)
    async with one.slot() as first:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0), one.slot():
                raise AssertionError
        async with other.slot() as second:
            assert first is not second
    async with one.slot() as again:
        assert again is first, "it is the one that was given back last"


async def test_whatever_ends_the_use_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounce_buffers, "KEPT_SLOTS_MAX", 1)
    store = SlotPool()
    user = BounceBuffers(store, 2)
    with pytest.raises(RuntimeError):
        async with user.slot(), user.slot():
            raise RuntimeError
    assert len(store._free) == 1, "no more is kept than the bound"
    async with user.slot(), user.slot():
        assert not store._free
