"""What the service manager is told, by a socket that stands in for it."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorhub_common.service.systemd import ServiceManager, serving

BOUND_S = 60.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)  # noqa: FBT003 (the library's own form)
        yield listening


def environ_of(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": str(manager.getsockname()), **more}


def waiting_in(manager: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode())
        except BlockingIOError:
            return found


async def test_ready_is_told_first_and_stopping_last_also_when_the_service_fails(manager: socket.socket) -> None:
    async with serving("agent a-0 serves", environ_of(manager)):
        assert waiting_in(manager) == ["READY=1\nSTATUS=agent a-0 serves"]
    assert waiting_in(manager) == ["STOPPING=1\nSTATUS=stopping"]
    with pytest.raises(ValueError, match="broken"):
        async with serving("works", environ_of(manager)):
            raise ValueError("broken")
    assert waiting_in(manager)[-1] == "STOPPING=1\nSTATUS=stopping"


async def test_signs_of_life_come_again_and_again_from_the_loop(manager: socket.socket) -> None:
    """Twice within the window that the manager named, and for this process."""
    environ = environ_of(manager, WATCHDOG_USEC="20000", WATCHDOG_PID=str(os.getpid()))
    loop = asyncio.get_running_loop()
    async with serving("works", environ), asyncio.timeout(BOUND_S):
        signs = 0
        while signs < 3:
            signs += (await loop.sock_recv(manager, 4096)) == b"WATCHDOG=1"


@pytest.mark.parametrize(
    "said",
    [
        pytest.param({}, id="it does not watch"),
        pytest.param({"WATCHDOG_USEC": "0"}, id="it does not watch any more"),
        pytest.param({"WATCHDOG_USEC": "soon"}, id="no number"),
        pytest.param({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, id="it watches another process"),
    ],
)
async def test_nobody_watches(manager: socket.socket, said: dict[str, str]) -> None:
    told = ServiceManager(environ_of(manager, **said))
    assert told.window_s is None
    await told.give_signs()
    assert waiting_in(manager) == []


def test_an_abstract_socket_is_reached_and_who_does_not_listen_holds_nobody_up(manager: socket.socket) -> None:
    name = f"tensorhub-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0{name}")
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).tell("READY=1")
        assert listening.recv(64) == b"READY=1"
    for address in ("", "vsock:2:9999", "/nowhere/at/all"):
        ServiceManager({"NOTIFY_SOCKET": address}).tell("READY=1")
    for _ in range(10_000):
        ServiceManager(environ_of(manager)).tell("WATCHDOG=1")
