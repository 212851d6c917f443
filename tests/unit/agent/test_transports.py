"""An agent with one transport, with two, and with one that can't start."""

import pytest

from tensorhub_agent.primitives.lease_messages import AvailabilityUpdate
from tensorhub_agent.transports.base import (
    OnAvailability,
    OnLost,
    SourceSession,
    TransportLost,
    TransportUnavailable,
    unheard,
)
from tensorhub_agent.transports.registry import TransportRegistry
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.protocol.plans import Transport

GRANT = LeaseGrant(lease="l", ticket="t", ticket_s=5.0, endpoint="there", pieces=0, digests=b"")


class Fake:
    """A transport that writes down what it is told."""

    def __init__(self, endpoint: str, failure: Exception | None = None) -> None:
        self.endpoint, self.failure = endpoint, failure
        self.told: list[str] = []
        self.served_bytes, self.links = 5, 2

    async def start(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.told.append("start")

    async def stop(self) -> None:
        self.told.append("stop")

    def break_lease(self, lease: str, reason: str) -> None:
        self.told.append(f"break {lease}: {reason}")

    def announce(self, lease: str, news: AvailabilityUpdate) -> None:
        self.told.append(f"show {lease}: {news}")

    async def open(
        self, grant: LeaseGrant, *, reader: str, on_lost: OnLost, on_have: OnAvailability = unheard
    ) -> SourceSession:
        self.told.append(f"open {grant.lease} as {reader}")
        raise TransportLost("a fake opens nothing")


def lost(_: str) -> None:
    """Hear nothing."""


async def test_each_is_asked_under_its_name() -> None:
    local, ucxx = Fake("/run/a.peers"), Fake("10.0.0.1:7")
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
    local, ucxx = Fake("/run/a.peers"), Fake("nowhere", TransportUnavailable("UCX can't be used here: no libucp"))
    transports = TransportRegistry(local, ucxx)
    await transports.start()
    assert transports.endpoint("local") == "/run/a.peers"
    assert transports.endpoint("ucxx") is None
    assert "no libucp" in transports.lack("ucxx")
    with pytest.raises(TransportLost, match=r"agent 'me' can't read: .*no libucp.*tensorhub doctor"):
        await transports.open("ucxx", GRANT, reader="me", on_lost=lost, on_have=unheard)
    await transports.stop()
    assert ucxx.told == []


async def test_what_was_switched_off_says_so() -> None:
    transports = TransportRegistry(Fake("/run/a.peers"), None)
    await transports.start()
    assert "TENSORHUB_UCXX=off" in transports.lack("ucxx")
