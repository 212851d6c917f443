"""The peers that need no environment of their own, really run on a little memory."""

import os
from collections.abc import Iterator

import pytest
from benchmarks.arena import READERS, Arena
from benchmarks.contender import Failed, PeerProgram
from benchmarks.telemetry import Comparison, Pairs, in_turn

from tensorhub_common.settings import load

NBYTES = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(load({}).shm_dir, NBYTES) as made:
        yield made


@pytest.mark.parametrize("how", ["send", "sendfile"])
async def test_sockets_bring_every_byte_to_one_and_to_all(arena: Arena, how: str) -> None:
    peer = PeerProgram("sockets", "sockets", arena, how=how, environment=os.environ)
    try:
        await peer.start()
        assert (await peer.run(1)).seconds > 0
        assert arena.is_equal(1)
        assert not arena.is_equal(READERS)
        assert (await peer.run(READERS)).seconds > 0
        assert arena.is_equal(READERS)
        arena.erase()
        await peer.check()
    finally:
        await peer.stop()


async def test_a_program_that_ends_is_told_as_failed(arena: Arena) -> None:
    peer = PeerProgram("none", "no_such_program", arena, environment=os.environ)
    try:
        with pytest.raises(Failed, match="died at 'start'"):
            await peer.start()
    finally:
        await peer.stop()


def test_one_wrong_byte_is_found(arena: Arena) -> None:
    for reader in range(READERS):
        arena.destination(reader).bytes[:] = arena.source.bytes
    assert arena.is_equal(READERS)
    arena.destination(READERS - 1).bytes[NBYTES - 1] ^= 1
    assert not arena.is_equal(READERS)
    assert arena.is_equal(READERS - 1)


async def test_both_are_asked_in_each_round_and_in_turn_first() -> None:
    asked: list[str] = []

    async def on() -> float:
        asked.append("on")
        return 1.0

    async def off() -> float:
        asked.append("off")
        return 0.99

    pairs = await in_turn("what", on, off, 2, warm_up=1)
    assert asked == ["on", "off", "off", "on", "on", "off"]
    assert pairs.ratio() == pytest.approx(0.99)


def test_a_bias_of_the_hub_that_is_started_first_falls_out() -> None:
    """Telemetry costs 1 %, and whoever is started first is 5 % slower."""
    on_first = [Pairs("what", on=[1.01 * 1.05] * 3, off=[1.0] * 3)] * 2
    off_first = [Pairs("what", on=[1.01] * 3, off=[1.05] * 3)] * 3
    comparison = Comparison("what", on_first, off_first)
    assert comparison.ratio() == pytest.approx(1 / 1.01)
    assert comparison.interval() == pytest.approx((1 / 1.01, 1 / 1.01))


def test_an_interval_is_wider_than_its_ratio_when_rounds_differ() -> None:
    pairs = Pairs("what", on=[1.0, 1.1, 0.9, 1.2, 0.8], off=[1.0, 0.9, 1.1, 0.8, 1.2])
    comparison = Comparison("what", [pairs], [pairs])
    low, high = comparison.interval()
    assert low < comparison.ratio() < high
