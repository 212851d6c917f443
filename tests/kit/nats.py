"""NATS servers as `tensorhub up` configures them, alone or as nodes of a cluster."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from tests.kit.waiting import wait_until
from tests.stopping import stop

from tensorhub.local import tether
from tensorhub.local.nats_server import Cluster, NatsServer

END_S: Final = 60.0
USERS: Final = 'authorization { user: tensorhub, password: "let-me-in" }'


class RunningNats:
    """One server. It may be killed, and started again on its port and store.

    A client that has its address may do everything; `users` says otherwise (tests/integration/security).
    """

    def __init__(
        self, directory: Path, users: Path | None = None, cluster: Cluster | None = None, index: int = 0
    ) -> None:
        self.directory = directory
        self._login = "tensorhub:let-me-in@" if users is None else ""
        if users is None:
            directory.mkdir(parents=True, exist_ok=True)
            users = directory / "users.conf"
            users.write_text(USERS)
        self._server = NatsServer(directory, users, cluster, index)
        self._server.prepare()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self._server.url.replace("//", f"//{self._login}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        tethered = (sys.executable, "-I", "-S", str(tether.__file__), str(os.getpid()), *self._server.command)
        with (self.directory / "server.log").open("ab") as log:
            self._process = process = subprocess.Popen(tethered, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def is_ready() -> bool:
            assert process.poll() is None, (self.directory / "server.log").read_text()
            return self._server.is_ready(process.pid)

        wait_until(is_ready)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal; once this returns, a server that was to stop has stopped with all its threads."""
        stop(self.pid) if number == signal.SIGSTOP else os.kill(self.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S)
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in taken]


@contextmanager
def running_nats(directory: Path, users: Path | None = None) -> Iterator[RunningNats]:
    server = RunningNats(directory, users)
    server.start()
    try:
        yield server
    finally:
        server.kill()
