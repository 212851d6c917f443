"""The life of a lease on one connection, without I/O: what may not be said when, and one report of its end."""

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.fakes import FakeLeases

from tensorhub_agent.primitives.lease_messages import (
    ConfirmRequest,
    Hello,
    PiecesAvailable,
    ReaderDone,
    Renew,
    Welcome,
)
from tensorhub_agent.storage.segments import Segment
from tensorhub_agent.transports.base import LeaseOpened
from tensorhub_agent.transports.lease_server import LeaseServer, LeaseState
from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.log.commands import PROTOCOL


class Memory:
    name, nbytes, origin = "segment-1", 4096, 64


HELLO = Hello(PROTOCOL, "ticket", "reader")
MAY_BE_SAID = {
    LeaseState.WAITING: (Hello,),
    LeaseState.OPEN: (Renew, ConfirmRequest, ReaderDone),
    LeaseState.DONE: (),
}
MOVES = (HELLO, Renew(), ConfirmRequest(1), ReaderDone(), Welcome("x", 1), "break", "release", "lost")


@given(st.lists(st.sampled_from(MOVES)))
def test_the_end_of_each_lease_is_told_once_unless_it_was_broken_and_nothing_is_said_after_it(
    moves: list[object],
) -> None:
    """A lease that is done is told as ended once it is released: bytes may still be on their way before."""
    leases, opened, broken, done = FakeLeases(), 0, 0, 0
    server = LeaseServer("source", leases)
    for move in moves:
        before, ends = server.state, len(leases.ends)
        leases.tickets["ticket"] = LeaseOpened(f"lease-{opened}", cast("Segment", Memory()))
        if isinstance(move, str):
            broken += bool(server.break_lease("why")) if move == "break" else 0
            done += server.release() if move == "release" else 0
            if move == "lost":
                server.connection_lost()
        elif before in (LeaseState.BROKEN, LeaseState.ENDED):
            assert server.receive(move) == server.announce(PiecesAvailable()) == server.break_lease("again") == []
        elif isinstance(move, MAY_BE_SAID[before]):
            answers = server.receive(move)
            assert bool(answers) is isinstance(move, Hello | ConfirmRequest)
            opened += isinstance(move, Hello)
            assert len(leases.ends) == ends
        else:
            with pytest.raises(BadCommand, match=type(move).__name__):
                server.receive(move)
            assert (server.state, len(leases.ends)) == (before, ends)
        assert (server.opened is None) is (server.state is LeaseState.WAITING or not opened)
    server.connection_lost()
    assert len(leases.ends) == len(set(leases.ends)) == opened - broken
    assert [what for what, _ in leases.ends].count("done") == done


@pytest.mark.parametrize("hello", [Hello(PROTOCOL, "wrong", "reader"), Hello(PROTOCOL + 1, "ticket", "newer")])
def test_a_refused_reader_uses_no_ticket(hello: Hello) -> None:
    leases = FakeLeases()
    leases.tickets["ticket"] = LeaseOpened("lease", cast("Segment", Memory()))
    server = LeaseServer("source", leases)
    server.receive(hello)
    assert (server.state, server.opened, leases.told) == (LeaseState.ENDED, None, [])
    assert "ticket" in leases.tickets
