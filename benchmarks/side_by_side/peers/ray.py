"""Ray's object store: the source puts the bytes into it, and readers on the same machine get them.

How: `copy` also copies what was got into the reader's own memory, as an engine that keeps its tensors in place must;
`view` only maps it, read-only, and touches nothing.
"""

import time
from typing import Any, Final

import numpy as np
import ray

from benchmarks.side_by_side.arena import READERS, Arena
from benchmarks.side_by_side.peers.program import Peer, main

STORE_PAYLOADS: Final = 3
"""The object store holds so many times the payload, so that what was put last may still be on its way out."""

STORE_BYTES_MIN: Final = 256 * 1024 * 1024
ANSWER_S: Final = 60.0


class Reader:
    """One reader, an actor with a process of its own."""

    def __init__(self, paths: list[str], number: int, how: str) -> None:
        self._arena = Arena.open(paths)
        self._into = self._arena.destination(number).bytes if how == "copy" else None

    def read(self, of: list[Any]) -> int:
        """Get the object; of a list, so that Ray does not get it for us before the call."""
        got = ray.get(of[0])
        if self._into is not None:
            np.copyto(self._into, got)
        return int(got.nbytes)

    def is_equal(self, of: list[Any]) -> bool:
        """Compare a view with the source."""
        return bool(np.array_equal(ray.get(of[0]), self._arena.source.bytes))


class RayStore(Peer):
    """The source, and Ray's own processes."""

    def __init__(self, arena: Arena, how: str) -> None:
        super().__init__(arena)
        self._how = how
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=max(STORE_PAYLOADS * arena.nbytes, STORE_BYTES_MIN),
        )
        actor = ray.remote(num_cpus=0)(Reader)
        self._readers = [actor.remote(arena.paths, number, how) for number in range(READERS)]

    def run(self, readers: int) -> float:
        """Put once, get everywhere."""
        begin = time.perf_counter()
        put = ray.put(self.arena.source.bytes)
        stands = time.perf_counter()
        ray.get([reader.read.remote([put]) for reader in self._readers[:readers]], timeout=ANSWER_S)
        end = time.perf_counter()
        self.besides = {"get": end - stands}
        return end - begin

    def is_equal(self) -> bool:
        """Compare what the readers copied, or what they see."""
        if self._how == "copy":
            return super().is_equal()
        put = ray.put(self.arena.source.bytes)
        return all(ray.get([reader.is_equal.remote([put]) for reader in self._readers], timeout=ANSWER_S))

    def close(self) -> None:
        """End Ray's processes."""
        ray.shutdown()


if __name__ == "__main__":
    main(RayStore)
