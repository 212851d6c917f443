"""An agent with one transport, with two, and with one that can't start."""

import pytest
from tests.kit.fakes import FakeTransport

from tensorhub_agent.transports.base import (
    TransportLost,
    TransportUnavailable,
    unheard,
)
from tensorhub_agent.transports.registry import TransportRegistry
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.protocol.plans import Transport

GRANT = LeaseGrant(lease="l", ticket="t", ticket_s=5.0, endpoint="there", pieces=0, digests=b"")


def lost(_: str) -> None:
    """Hear nothing."""


async def test_each_is_asked_under_its_name() -> None:
    local, ucxx = FakeTransport("/run/a.peers"), FakeTransport("10.0.0.1:7")
    transports = TransportRegistry(local, ucxx)
    await transports.start()
    assert (transports.endpoint("local"), transports.endpoint("ucxx")) == ("/run/a.peers", "10.0.0.1:7")
    assert transports.connections() == {"local": 2, "ucxx": 2}
    assert transports.served_bytes() == {"local": 5, "ucxx": 5}
    names: tuple[Transport, ...] = ("local", "ucxx")
    for name in names:
        with pytest.raises(TransportLost, match="a fake opens nothing"):
            await transports.open(name, GRANT, reader="me", on_lost=lost, on_have=unheard)
    transports.break_lease("l", "why")
    await transports.stop()
    assert local.told == ucxx.told == ["start", "open l as me", "break l: why", "stop"]


async def test_without_ucx_the_agent_goes_on_and_says_why_it_can_not_reach_others() -> None:
    ucxx = FakeTransport("nowhere", TransportUnavailable("UCX can't be used here: no libucp"))
    transports = TransportRegistry(FakeTransport("/run/a.peers"), ucxx)
    await transports.start()
    assert (transports.endpoint("local"), transports.endpoint("ucxx")) == ("/run/a.peers", None)
    assert "no libucp" in transports.lack("ucxx")
    with pytest.raises(TransportLost, match=r"agent 'me' can't read: .*no libucp.*tensorhub doctor"):
        await transports.open("ucxx", GRANT, reader="me", on_lost=lost, on_have=unheard)
    await transports.stop()
    assert ucxx.told == []
    switched_off = TransportRegistry(FakeTransport("/run/a.peers"), None)
    await switched_off.start()
    assert "TENSORHUB_UCXX=off" in switched_off.lack("ucxx")
