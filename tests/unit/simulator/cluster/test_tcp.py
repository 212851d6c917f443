"""The ceiling of one TCP stream."""

import math

import pytest

from tensorhub_simulator.performance.model.network import UNBOUND, stream_bytes_s


def test_a_window_in_each_round_trip() -> None:
    assert stream_bytes_s(16 << 20, 0.05, 0.0) == int((16 << 20) / 0.05)


def test_loss_by_mathis() -> None:
    assert stream_bytes_s(1 << 40, 0.1, 1e-4) == int(math.sqrt(1.5) * 1448 / (0.1 * 1e-2))


@pytest.mark.parametrize("rtt_s", [0.0, -1.0])
def test_without_a_round_trip_nothing_bounds_it(rtt_s: float) -> None:
    assert stream_bytes_s(1, rtt_s, 0.5) == UNBOUND
