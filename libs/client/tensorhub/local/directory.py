"""The directory of a hub on one machine: who may use it, and where its files are.

hub.json          how programs find the hub             (see hub_file)
up.lock           held by the `up` that uses it, with its process id inside
logs/NAME.log     what each child writes
credentials/      the key of each process, and of clients; see tensorhub.local.keyring
nats/             the embedded server's configuration and store; of a cluster in nats/node-0, nats/node-1, …
agents/ID.sock    where workers reach the agents, unless the path is too long for a socket
state/ID/         what each agent keeps
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from tensorhub_common.config.segment_names import segment_beginning
from tensorhub_common.errors import TensorHubError

MODE: Final = 0o700
SOCKET_PATH_BYTES_MAX: Final = 99
"""A socket's address holds 107 bytes; some are left for names that are made from it."""
_LONGEST_SOCKET: Final = "agent-0123456789ab.sock"


_STORE: Final = "store"
"""Where the embedded server keeps its streams, in its own folder."""


class HubDirInUse(TensorHubError):
    """Another `tensorhub up` uses the directory."""


class OtherNodes(TensorHubError):
    """The directory holds the logs of a hub with another number of NATS nodes."""


class HubDirUnusable(TensorHubError):
    """The directory can't be made or written."""


class HubDirectory:
    """A hub's directory, locked by this process from `open` to `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None
        self._sockets: Path | None = None

    def open(self) -> None:
        """Make the directory and lock it. Raises `HubDirInUse` and `HubDirUnusable`."""
        try:
            for folder in (self.path, self.path / "logs", self.path / "state"):
                folder.mkdir(mode=MODE, parents=True, exist_ok=True)
            lock = os.open(self.path / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise HubDirUnusable(f"a hub's state can't be kept in {self.path}: {error}; take another --dir") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.read(lock, 20).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise HubDirInUse(
                f"another `tensorhub up` (process {pid}) uses {self.path}: stop it, or give this one another --dir"
            ) from None
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        self._lock = lock

    def close(self) -> None:
        """Give the directory free. The lock's file stays: to remove it would let two lock two files of one name."""
        if self._sockets is not None and not self._sockets.is_relative_to(self.path):
            shutil.rmtree(self._sockets, ignore_errors=True)
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def free_segments(self, shm: Path) -> None:
        """Give back the agents' memory in the memory file system `shm`; a worker keeps what it maps until it ends.

        An agent leaves its segments for the next one of its name, which suits a restart. A process that was killed
        leaves them too, and the next one in this directory takes them back.
        """
        for path in shm.glob(f"{segment_beginning(self.path)}*"):
            with contextlib.suppress(OSError):
                path.unlink()

    @property
    def is_open(self) -> bool:
        """Whether this process holds the directory."""
        return self._lock is not None

    def nats(self, nodes: int) -> list[Path]:
        """Return where each embedded server keeps its files. Raises `OtherNodes`.

        A cluster's node that finds streams which its cluster doesn't know removes them, so a store is used only by as
        many nodes as made it.
        """
        folder = self.path / "nats"
        found = 1 if (folder / _STORE).exists() else len(list(folder.glob(f"node-*/{_STORE}")))
        if found not in (0, nodes):
            raise OtherNodes(
                f"the logs in {self.path} are those of a hub with {found} NATS node(s), and {nodes} are wanted: start "
                f"it with --nats-nodes {found}, or take another --dir"
            )
        return [folder] if nodes == 1 else [folder / f"node-{index}" for index in range(nodes)]

    @property
    def credentials(self) -> Path:
        """Where the keys of this hub's users stand."""
        return self.path / "credentials"

    def log(self, name: str) -> Path:
        """Return where the child of this name writes."""
        return self.path / "logs" / f"{name}.log"

    def state(self, agent: str) -> Path:
        """Return where the agent keeps what outlives it."""
        return self.path / "state" / agent

    def socket(self, agent: str) -> Path:
        """Return where the agent listens: here, or in a short folder where this path is too long for a socket."""
        if self._sockets is None:
            self._sockets = self._make_sockets()
        return self._sockets / f"{agent}.sock"

    def socket_path(self, agent: str) -> Path:
        """Return the same for a process that does not own the directory, which need not be there yet."""
        return self._sockets_folder() / f"{agent}.sock"

    def _sockets_folder(self) -> Path:
        sockets = self.path / "agents"
        if len(os.fsencode(sockets / _LONGEST_SOCKET)) > SOCKET_PATH_BYTES_MAX:
            mark = hashlib.blake2b(os.fsencode(self.path), digest_size=6).hexdigest()
            sockets = Path(tempfile.gettempdir()) / f"tensorhub-{os.getuid()}-{mark}"
        return sockets

    def _make_sockets(self) -> Path:
        sockets = self._sockets_folder()
        sockets.mkdir(mode=MODE, exist_ok=True)
        found = sockets.lstat()
        if found.st_uid != os.getuid() or sockets.is_symlink():
            raise TensorHubError(f"{sockets} belongs to somebody else: remove it, or choose a shorter --dir")
        return sockets
