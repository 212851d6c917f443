"""The arena finds a wrong byte, and the peers that need no environment of their own bring every byte."""

import os
from collections.abc import Iterator

import pytest
from benchmarks.side_by_side.arena import READERS, Arena
from benchmarks.side_by_side.contender import Failed, PeerProgram

from tensorhub_common.config.settings import load

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
