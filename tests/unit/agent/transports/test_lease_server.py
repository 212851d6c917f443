"""The life of a lease on one connection, without I/O: answers, what may not be said, and one report of the end."""

from collections.abc import Callable
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
from tensorhub_agent.transports.base import BeyondGrant, LeaseOpened, ReadableRange
from tensorhub_agent.transports.lease_server import LeaseServer, LeaseState
from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.log.commands import PROTOCOL


class Memory:
    name, nbytes, origin = "segment-1", 4096, 64


HELLO = Hello(PROTOCOL, "ticket", "reader")
SEGMENT = cast("Segment", Memory())


class Scene:
    """A connection, and the authority that it tells."""

    def __init__(self) -> None:
        self.leases = FakeLeases()
        self.leases.tickets["ticket"] = LeaseOpened("lease", SEGMENT)
        self.server = LeaseServer("source", self.leases)

    def into(self, state: LeaseState) -> None:
        open_it, end_it = lambda: self.server.receive(HELLO), self.server.connection_lost
        steps: dict[LeaseState, list[Callable[[], object]]] = {
            LeaseState.OPEN: [open_it],
            LeaseState.DONE: [open_it, lambda: self.server.receive(ReaderDone())],
            LeaseState.BROKEN: [open_it, lambda: self.server.break_lease("why")],
            LeaseState.ENDED: [open_it, end_it],
        }
        for step in steps.get(state, []):
            step()
        assert self.server.state is state


def test_the_next_ticket_comes_when_the_last_lease_has_been_released() -> None:
    scene = Scene()
    scene.into(LeaseState.DONE)
    assert scene.leases.told == [], "bytes may still be on their way"
    assert scene.server.release()
    assert scene.leases.told == [("done", "lease")]
    assert (scene.server.opened, scene.server.release(), scene.server.break_lease("late")) == (None, False, [])
    scene.leases.tickets["ticket"] = LeaseOpened("second", SEGMENT)
    scene.server.receive(HELLO)
    scene.server.connection_lost()
    assert scene.leases.told == [("done", "lease"), ("gone", "second")]


@pytest.mark.parametrize(
    ("state", "message"),
    [(LeaseState.WAITING, message) for message in (Renew(), ConfirmRequest(1), ReaderDone(), Welcome("x", 1))]
    + [(LeaseState.OPEN, message) for message in (HELLO, Welcome("x", 1))]
    + [(LeaseState.DONE, message) for message in (HELLO, Renew(), ConfirmRequest(1), ReaderDone())],
)
def test_what_may_not_be_said_raises_and_changes_nothing(state: LeaseState, message: object) -> None:
    scene = Scene()
    scene.into(state)
    told = list(scene.leases.told)
    with pytest.raises(BadCommand, match=type(message).__name__):
        scene.server.receive(message)
    assert (scene.server.state, scene.leases.told) == (state, told)


@pytest.mark.parametrize("state", [LeaseState.BROKEN, LeaseState.ENDED])
def test_after_the_end_nothing_is_answered(state: LeaseState) -> None:
    scene = Scene()
    scene.into(state)
    assert scene.server.receive(ConfirmRequest(1)) == scene.server.receive(HELLO) == []
    assert scene.server.announce(PiecesAvailable()) == scene.server.break_lease("again") == []
    assert not scene.server.release()
    scene.server.connection_lost()
    assert scene.leases.told == ([("gone", "lease")] if state is LeaseState.ENDED else [])


@given(st.lists(st.sampled_from(["hello", "renew", "done", "break", "release", "lost"])))
def test_the_end_of_each_lease_is_told_once_unless_it_was_broken(moves: list[str]) -> None:
    scene, opened, broken = Scene(), 0, 0
    server, leases = scene.server, scene.leases
    for move in moves:
        if move == "hello" and server.state is LeaseState.WAITING:
            leases.tickets["ticket"] = LeaseOpened(f"lease-{opened}", SEGMENT)
            server.receive(HELLO)
            opened += 1
        elif move in ("renew", "done") and server.state is LeaseState.OPEN:
            server.receive(Renew() if move == "renew" else ReaderDone())
        elif move == "break":
            broken += bool(server.break_lease("why"))
        elif move == "release":
            server.release()
        elif move == "lost":
            server.connection_lost()
    server.connection_lost()
    assert len(leases.ends) == len(set(leases.ends)) == opened - broken


@pytest.mark.parametrize(
    ("origin", "nbytes", "why"),
    [(-1, 5, "beyond"), (0, 0, "beyond"), (90, 11, "beyond"), (1 << 60, 1 << 60, "beyond"), (50, 11, "before")],
)
def test_what_may_not_be_read_is_refused(origin: int, nbytes: int, why: str) -> None:
    readable = ReadableRange(memoryview(bytes(100)), lambda origin, nbytes: origin + nbytes > 60)
    readable.check([0, 50], [60, 10])
    with pytest.raises(BeyondGrant, match=why):
        readable.check([0, origin], [1, nbytes])
    ReadableRange(readable.view).check([50, 0], [50, 100])
