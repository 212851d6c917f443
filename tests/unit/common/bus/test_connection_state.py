"""Whether there is a connection, as those who watch and those who wait hear of it."""

import asyncio

from tensorhub_common.bus.connection_state import ConnectionState


def test_each_change_is_told_once() -> None:
    presence, told = ConnectionState(), list[bool]()
    unwatch = presence.watch(told.append)
    for connected in (False, True, True, False, False, True):
        presence.note(connected=connected)
        assert (presence.since is not None) == connected
    assert told == [True, False, True]
    unwatch()
    unwatch()
    presence.note(connected=False)
    assert told == [True, False, True]


async def test_who_waits_is_let_go_by_the_connection_or_by_the_bound() -> None:
    presence = ConnectionState()
    assert not await presence.wait(0.01)
    waiting = asyncio.create_task(presence.wait(30.0))
    await asyncio.sleep(0)
    presence.note(connected=True)
    assert await waiting
    assert await presence.wait(0.0)
