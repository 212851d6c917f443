"""Monarch's RDMA buffer: the source makes one over its memory, and actors read it into theirs.

Without RDMA hardware Monarch refuses, unless it is told to fall back to TCP: so it is, and what it then uses is told as
its backend.
"""

import time
from typing import Any, Final

import monarch
from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer

from benchmarks.side_by_side.arena import READERS, Arena
from benchmarks.side_by_side.peers.program import Peer, main

ANSWER_S: Final = 60


class Reader(Actor):  # type: ignore[misc, unused-ignore]
    """One reader, an actor with a process of its own."""

    def __init__(self, paths: list[str], number: int) -> None:
        monarch.configure(rdma_allow_tcp_fallback=True)
        self._into = Arena.open(paths).destination(number).bytes.data

    @endpoint  # type: ignore[untyped-decorator, unused-ignore]
    async def read(self, source: Any) -> None:  # noqa: ANN401 (Monarch's own class, which mypy does not see here)
        """Read all of it."""
        await source.read_into(self._into, timeout=ANSWER_S)


class Monarch(Peer):
    """The source, and the readers' processes."""

    def __init__(self, arena: Arena, _how: str) -> None:
        super().__init__(arena)
        monarch.configure(rdma_allow_tcp_fallback=True)
        self._meshes = [this_host().spawn_procs() for _ in range(READERS)]
        self._readers = [
            mesh.spawn(f"reader_{number}", Reader, arena.paths, number) for number, mesh in enumerate(self._meshes)
        ]
        self._source = RDMABuffer(arena.source.bytes.data)

    def run(self, readers: int) -> float:
        """Let the actors read."""
        begin = time.perf_counter()
        reading = [reader.read.call_one(self._source) for reader in self._readers[:readers]]
        for each in reading:
            each.get(timeout=ANSWER_S)
        return time.perf_counter() - begin

    def close(self) -> None:
        """End the readers' processes."""
        for mesh in self._meshes:
            mesh.stop().get(timeout=ANSWER_S)


if __name__ == "__main__":
    main(Monarch)
