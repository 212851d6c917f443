"""One reader of very many sources gets every byte, whoever is killed or stopped, with some of them open at a time."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples_of import examples
from tests.property.crowd import LIMITS, READ, STALL_S, STOPPED_S, Crowd

from tensorhub_agent.transfer.transfer import TransferPhase

RANKS = 2_048


def read(crowd: Crowd) -> Crowd:
    """Run a read to its end, and compare every byte."""
    crowd.run()
    assert crowd.transfer.phase is TransferPhase.DONE, crowd.transfer.error
    assert np.array_equal(crowd.memory, crowd.values[:, READ])
    return crowd


@pytest.mark.long
def test_a_reader_of_as_many_fully_sharded_ranks() -> None:
    crowd = read(Crowd(Random(1), RANKS, kills=0.05, stops=0.03))
    assert crowd.inside_most == LIMITS.transports_max
    left = {source.lost for source in crowd.transfer.sources.values()}
    assert {"", "its connection ended", "it made no progress"} <= left


def test_whoever_is_stopped_keeps_nobody_else_waiting() -> None:
    """Half of the places are taken by sources that stand still: the others go on, and twins have what those have."""
    calm = read(Crowd(Random(2), 400))
    crowd = Crowd(Random(2), 400)
    stopped = [peer for peer in crowd.peers.values() if peer.source.replica == "trainer"][: LIMITS.transports_max // 2]
    for peer in stopped:
        # By then it has granted its lease, and is one of the first to be inside.
        peer.stops = 0.8 * calm.began
    read(crowd)
    others = [each for each in crowd.transfer.sources.values() if each.share.source.shard >= LIMITS.transports_max // 2]
    assert max(each.last_progress_at for each in others) < 3 * calm.now, "those were done long before"
    assert STALL_S < crowd.now < STOPPED_S, "and who stood still was left"


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 12))
@settings(max_examples=examples(0.4))
def test_every_byte_comes_whoever_is_killed_or_stopped(seed: int, ranks: int, inside: int) -> None:
    limits = replace(LIMITS, transports_max=inside, opening_max=max(1, inside // 2))
    read(Crowd(Random(seed), ranks, kills=0.2, stops=0.1, limits=limits))
