"""The shipped configurations of a cluster, in three real servers on loopback: they meet, and let no other client in."""

import asyncio
import contextlib
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.deployment.test_files import certify
from tests.kit.nats import free_ports
from tests.kit.waiting import until

from tensorhub.local import tether
from tensorhub.local.keyring import OF_EVERY_HUB, Keyring
from tensorhub.local.nats_server import find_program
from tensorhub_common.auth.permissions import Role, User
from tensorhub_common.auth.tls import TlsFiles
from tensorhub_common.bus.connection import connect
from tensorhub_common.jetstream.job_log import open_job

ROOT = Path(__file__).parents[2]
NODES: Final = 3
MEET_S: Final = 30.0


class Nodes:
    """Three servers with the configuration of one folder, of which only places and addresses are changed."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.clients, self.routes = free_ports(NODES), free_ports(NODES)
        self.keys = Keyring(folder / "credentials")
        self.keys.make([*OF_EVERY_HUB])
        self.pem = folder / "credentials/nats.pem"
        certify(self.keys.folder)
        self._running: list[subprocess.Popen[bytes]] = []

    @property
    def urls(self) -> str:
        return ",".join(f"tls://127.0.0.1:{port}" for port in self.clients)

    def start(self) -> None:
        for index in range(NODES):
            program = (find_program(), "-c", str(self._configured(index)))
            tethered = (sys.executable, "-I", "-S", str(tether.__file__), str(os.getpid()), *program)
            with (self.folder / f"nats-{index}.log").open("wb") as log:
                environment = {**os.environ, "NATS_NODE": f"nats-{index}"}
                self._running.append(subprocess.Popen(tethered, env=environment, stdout=log, stderr=log))

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.wait(10)

    def logged(self) -> str:
        return "".join((self.folder / f"nats-{index}.log").read_text() for index in range(NODES))

    def _configured(self, index: int) -> Path:
        etc = self.folder / f"etc-{index}"
        etc.mkdir()
        (etc / "credentials").symlink_to(self.keys.folder)
        for name in ("nats.conf", "nats-cluster.conf"):
            text = (ROOT / self.kind / name).read_text()
            text = text.replace("/etc/tensorhub", str(etc)).replace("/var/lib", str(self.folder / f"var-{index}"))
            text = re.sub(r'listen: "[0-9.]+:4222"', f'listen: "127.0.0.1:{self.clients[index]}"', text)
            text = re.sub(r'listen: "[0-9.]+:6222"', f'listen: "127.0.0.1:{self.routes[index]}"', text)
            text = re.sub(r"^http: .*$", "", text, flags=re.MULTILINE)
            routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in self.routes)
            text = re.sub(r"routes: \[.*\]", f"routes: [{routes}]", text)
            text = text.replace("server_name: nats-0", f"server_name: nats-{index}")
            text = text.replace('#include "nats-cluster.conf"', 'include "nats-cluster.conf"')
            (etc / name).write_text(text)
        return etc / ("nats-cluster.conf" if self.kind == "docker" else "nats.conf")


@pytest.fixture(params=["docker", "systemd"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(request.param, tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.mark.slow
async def test_three_nodes_meet_and_keep_a_log_together(nodes: Nodes) -> None:
    admin, tls = nodes.keys.path_of(User(Role.ADMIN)), TlsFiles(nodes.pem)
    async with await connect(nodes.urls, name="test", credentials=admin, tls=tls, timeout_s=MEET_S) as bus:
        assert bus.server_info["cluster"] == "tensorhub"
        async with asyncio.timeout(MEET_S):
            log = await open_job(bus, "job", NODES)
            assert await log.append("tensorhub.v1.job.cmd.publish", b"", "m") == 1
    assert await said_to_a_client_without_certificate(nodes.routes[0]) == b""
    # A node closes the connection before it writes why.
    await until(lambda: "didn't provide a certificate" in nodes.logged(), "a node says that a certificate is missing")


async def said_to_a_client_without_certificate(port: int) -> bytes:
    """Return what a node sends to a client that reaches its port for other nodes."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    async with asyncio.timeout(MEET_S):
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            try:
                return await reader.read(1)
            finally:
                writer.transport.abort()
    return b""
