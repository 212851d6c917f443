"""The life of a lease on one connection, without I/O: what may not be said when, and one report of its end."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensorhub_agent.primitives.lease_messages import (
    REASON_CHARS_MAX,
    ConfirmReply,
    ConfirmRequest,
    Denied,
    Hello,
    LeaseBroken,
    PiecesAvailable,
    PiecesPromised,
    ReaderDone,
    Renew,
    SourceMessage,
    Welcome,
)
from tensorhub_agent.transports.lease_server import LeaseServer, LeaseState
from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.log.commands import PROTOCOL


class Leases:
    """A `LeaseAuthority` whose ticket is good as often as it comes."""

    def __init__(self, **opened: Any) -> None:
        self.more = opened
        self.waits = self.held = False
        self.readers: list[tuple[str, str]] = []
        self.ends: list[tuple[str, bool]] = []

    def redeem(self, ticket: str, reader: str) -> Any:
        self.readers.append((ticket, reader))
        segment = SimpleNamespace(name="segment-1", nbytes=4096, origin=64, device="GPU-0")
        more = {"pieces": None, "promised": ()} | self.more
        return SimpleNamespace(lease=f"lease-{len(self.readers)}", segment=segment, **more)

    def renew(self, lease: str) -> bool:
        assert lease == f"lease-{len(self.readers)}"
        return self.waits

    def holds(self, lease: str) -> bool:
        assert lease == f"lease-{len(self.readers)}"
        return self.held

    def ended(self, lease: str, done: bool) -> None:  # noqa: FBT001 (as LeaseAuthority has it)
        self.ends.append((lease, done))


HELLO = Hello(PROTOCOL, "ticket", "reader")
MAY_BE_SAID = {
    LeaseState.WAITING: (Hello,),
    LeaseState.OPEN: (Renew, ConfirmRequest, ReaderDone),
    LeaseState.DONE: (),
}
MOVES = (HELLO, Renew(), ConfirmRequest(1), ReaderDone(), Welcome("x", 1), "break", "release", "lost")


@given(st.lists(st.sampled_from(MOVES)))
@example([HELLO, ReaderDone(), "release", HELLO, ReaderDone(), "lost"])
@example([HELLO, "break", "lost", "lost"])
@example(["release", "break", HELLO, "release", "break", "break"])
def test_the_end_of_each_lease_is_told_once_unless_it_was_broken_and_nothing_is_said_after_it(
    moves: list[object],
) -> None:
    """A lease that is done is told as ended once it is released: bytes may still be on their way before."""
    leases, broken, done = Leases(), 0, 0
    server = LeaseServer("source", leases)
    for move in moves:
        before, ends = server.state, len(leases.ends)
        is_told = [PiecesAvailable()] if before is LeaseState.OPEN else []
        assert server.announce(PiecesAvailable()) == is_told
        if move == "break":
            was_broken = before in (LeaseState.OPEN, LeaseState.DONE)
            said = LeaseBroken("y" * REASON_CHARS_MAX)
            assert server.break_lease("y" * (REASON_CHARS_MAX + 1)) == [said] * was_broken
            broken += was_broken
        elif move == "release":
            assert server.release() is (before is LeaseState.DONE)
            done += before is LeaseState.DONE
        elif move == "lost":
            server.connection_lost()
        elif before in (LeaseState.BROKEN, LeaseState.ENDED):
            assert server.receive(move) == []
        elif isinstance(move, MAY_BE_SAID[before]):
            answers = server.receive(move)
            assert bool(answers) is isinstance(move, Hello | ConfirmRequest)
            assert len(leases.ends) == ends
        else:
            when = "the first frame must be Hello" if before is LeaseState.WAITING else f"is {before.name.lower()}$"
            with pytest.raises(BadCommand, match=when) as why:
                server.receive(move)
            assert type(move).__name__ in str(why.value)
            assert (server.state, len(leases.ends)) == (before, ends)
        assert (server.opened is None) is (server.state is LeaseState.WAITING or not leases.readers)
    server.connection_lost()
    assert len(leases.ends) == len(set(leases.ends)) == len(leases.readers) - broken
    assert sum(is_done for _, is_done in leases.ends) == done


def test_a_reader_hears_what_it_may_read_and_whether_it_may_go_on() -> None:
    leases = Leases(pieces=((0, 2),), promised=((2, 1),))
    server = LeaseServer("source", leases)
    welcome: list[SourceMessage] = [Welcome("segment-1", 4096, 64, "GPU-0")]
    assert server.receive(HELLO) == [*welcome, PiecesAvailable(((0, 2),)), PiecesPromised(((2, 1),))]
    assert leases.readers == [("ticket", "reader")]
    for leases.waits, leases.held in ((True, False), (False, True)):
        assert server.receive(Renew()) == [PiecesAvailable()] * leases.waits
        assert server.receive(ConfirmRequest(7)) == [ConfirmReply(7, leases.held)]
    assert LeaseServer("source", Leases()).receive(HELLO) == welcome


def test_a_reader_of_a_later_release_alone_is_told_which_are_too_old_and_uses_no_ticket() -> None:
    leases = Leases()
    server = LeaseServer("source", leases)
    assert server.receive(Hello(PROTOCOL + 1, "ticket", "newer", PROTOCOL + 2)) == [
        Denied(
            f"agent source (protocol {PROTOCOL}) is too old for newer (protocol {PROTOCOL + 1} to {PROTOCOL + 2}): "
            "upgrade tensorhub where agent source runs"
        )
    ]
    assert (server.state, server.opened, leases.readers) == (LeaseState.ENDED, None, [])
