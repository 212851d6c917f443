"""Sockets and segments are their owner's alone: another user of the host is refused, counted and logged."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from tests.kit.hubs import RunningHub, new_job
from tests.kit.tensors import full
from tests.leftovers import memory_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well"),
]

OTHER_USER: Final = 65534

# It runs without our environment: another user may not read this checkout.
INTRUDER: Final = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
said = []
for path in sys.argv[1:]:
    try:
        if path.endswith((".sock", ".peers")):
            with socket.socket(socket.AF_UNIX) as intruder:
                intruder.settimeout(10)
                intruder.connect(path)
                said.append("closed" if intruder.recv(1) == b"" else "served")
        else:
            open(path, "rb").close()
            said.append("read")
    except OSError as why:
        said.append(type(why).__name__)
print(" ".join(said))
"""


def intrude(*paths: Path | str) -> list[str]:
    command = [sys.executable, "-I", "-S", "-c", INTRUDER, *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()


@pytest.mark.long
async def test_another_user_reaches_nothing(hub: RunningHub) -> None:
    """Modes keep others out: of sockets, keys, hub.json, logs and the segments in memory."""
    async with hub.connected(new_job(), agents=1) as (here,):
        await here.register("m", full(1), replica="trainer")
        socket = Path(hub.file.agents[0].socket)
        segments = memory_of(hub.directory)
        files = [
            socket,
            socket.with_suffix(".peers"),
            Path(hub.file.credentials),
            hub.directory / "hub.json",
            hub.directory / "nats/nats-server.conf",
            hub.directory / "logs/agent-0.log",
            *segments,
        ]
        assert segments
        for path in (socket, socket.with_suffix(".peers"), Path(hub.file.credentials), *segments):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert intrude(*files) == ["PermissionError"] * len(files)


@pytest.mark.long
async def test_another_user_on_the_socket(hub: RunningHub, tmp_path: Path) -> None:
    """Where the modes were opened, the user that the kernel reports decides: the connection is closed at once."""
    sockets = [Path(hub.file.agents[0].socket), Path(hub.file.agents[0].socket).with_suffix(".peers")]
    opened = [*sockets, *hub.directory.resolve().parents, hub.directory, sockets[0].parent]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in opened}
    try:
        for path, mode in modes.items():
            path.chmod(mode | (0o666 if path in sockets else 0o711))
        assert intrude(*sockets) == ["closed", "closed"]
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    log = hub.log("agent-0")
    assert f"of user {OTHER_USER})" in log
    async with hub.connected(new_job(), agents=1) as (here,):
        await here.register("m", full(1), replica="trainer")
