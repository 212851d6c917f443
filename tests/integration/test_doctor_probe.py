"""The probe of `tensorhub doctor` brings real bytes over UCX, from one process to another."""

import os
import sys

import pytest

from tensorhub.cli.doctor.transport_probes import Probe
from tensorhub.cli.doctor.transports import ProbeCase, ProbeFailed, Transferred, Ucx

pytest.importorskip("libucx", reason="pip install 'tensorhub[agent]'")


@pytest.mark.long
def test_bytes_over_tcp() -> None:
    probe = Probe(sys.executable, os.environ)
    ucx = probe.about({})
    assert isinstance(ucx, Ucx), ucx
    assert "tcp" in ucx.components
    carried = probe.carry(ProbeCase("tcp", {"UCX_TLS": "tcp"}))
    assert isinstance(carried, Transferred), carried
    assert carried.gbps > 0
    assert all(lane.startswith("tcp/") for lane in carried.lanes)
    assert carried.lanes


def test_what_is_not_there_is_said_by_ucx() -> None:
    result = Probe(sys.executable, os.environ).carry(
        ProbeCase("none", {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "none-such"})
    )
    assert isinstance(result, ProbeFailed), result
    assert "UCX" in result.why
    assert "No such device" in result.why
