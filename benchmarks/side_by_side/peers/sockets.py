"""Plain TCP over loopback: a reader asks with one byte, and a thread of the source's sends it everything.

How: `send` copies into the socket; `sendfile` lends the source's pages to it, so that only the reader copies.
"""

import os
import socket
import threading
from typing import Final

from benchmarks.side_by_side.arena import READERS, Arena
from benchmarks.side_by_side.peers.program import Crew, Peer, Read, main

LISTEN: Final = "127.0.0.1"
SOCKET_BYTES: Final = 4 * 1024 * 1024
"""Asked for as each socket's buffer; the kernel grants what its limits allow."""

ASK: Final = b"?"
SENDFILE_BYTES_MAX: Final = 1 << 30
"""One call takes less than 2 GiB."""


class Sockets(Peer):
    """The source: one thread for each reader."""

    def __init__(self, arena: Arena, how: str) -> None:
        super().__init__(arena)
        self._how = how
        with socket.create_server((LISTEN, 0)) as server:
            _enlarge(server)
            self._crew = Crew(prepare, arena.paths, server.getsockname()[1])
            for _ in range(READERS):
                to, _address = server.accept()
                threading.Thread(target=self._serve, args=(to,), daemon=True).start()
        self._crew.wait_ready()

    def run(self, readers: int) -> float:
        """Let the readers ask."""
        return self._crew.run(readers)

    def close(self) -> None:
        """End the readers."""
        self._crew.close()

    def _serve(self, to: socket.socket) -> None:
        while to.recv(1):
            if self._how == "send":
                to.sendall(self.arena.source.bytes.data)
                continue
            sent = 0
            while sent < self.arena.nbytes:
                wanted = min(self.arena.nbytes - sent, SENDFILE_BYTES_MAX)
                sent += os.sendfile(to.fileno(), self.arena.fd(0), sent, wanted)


def prepare(arena: Arena, number: int, port: int) -> Read:
    """Connect one reader."""
    source = socket.socket()
    _enlarge(source)
    source.connect((LISTEN, port))
    into = arena.destination(number).bytes.data

    def read(_: int) -> None:
        source.sendall(ASK)
        at = 0
        while at < arena.nbytes:
            came = source.recv_into(into[at:])
            if not came:
                raise ConnectionError("the source has closed the connection")
            at += came

    return read


def _enlarge(each: socket.socket) -> None:
    each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)


if __name__ == "__main__":
    main(Sockets)
