"""Arrivals of weights: never before the bytes can come, and later for a larger fleet."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_simulator.rollout_performance.config.weights import Weights
from tensorhub_simulator.rollout_performance.models.arrivals import arrivals_s

WEIGHTS = Weights(gbytes=16.0, shards=2, nic_gbit_s=100)
BYTES_S = 8.0 / (100 / 8 * 0.88)
"""A shard over its card."""


@pytest.mark.long
@given(st.integers(1, 20))
@settings(deadline=None, max_examples=20)
def test_each_reader_has_a_time_and_none_is_sooner_than_its_bytes(readers: int) -> None:
    found, far = arrivals_s(WEIGHTS, readers)
    assert far == []
    assert len(found) == readers
    assert found == sorted(found)
    assert BYTES_S <= found[0] <= found[-1] < 2 * BYTES_S


def test_a_reader_alone_takes_its_bytes_and_many_read_from_each_other() -> None:
    assert arrivals_s(WEIGHTS, 0) == ([], [])
    assert arrivals_s(WEIGHTS, 1)[0][0] < 1.05 * BYTES_S
    assert arrivals_s(WEIGHTS, 1)[0][0] < arrivals_s(WEIGHTS, 16)[0][-1]
