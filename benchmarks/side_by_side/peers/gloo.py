"""torch.distributed with gloo over TCP: the source is rank 0, each reader a rank of its own.

How: `send` sends to each reader by itself, all at the same time; `broadcast` is one collective of source and readers.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.side_by_side.arena import READERS, Arena, Region
from benchmarks.side_by_side.peers.program import Crew, Peer, Read, main

SOURCE: Final = 0

Groups = dict[int, Any]


class Gloo(Peer):
    """Rank 0."""

    def __init__(self, arena: Arena, how: str) -> None:
        super().__init__(arena)
        self._how = how
        self._folder = tempfile.TemporaryDirectory(prefix="tensorhub-gloo-")
        store = str(Path(self._folder.name) / "store")
        self._crew = Crew(prepare, arena.paths, how, store)
        self._groups = join(SOURCE, store)
        self._tensor = tensor_of(arena.source)
        self._crew.wait_ready()

    def run(self, readers: int) -> float:
        """Send while the readers receive."""
        self._crew.begin(readers)
        if self._how == "broadcast":
            dist.broadcast(self._tensor, SOURCE, group=self._groups[readers])
        else:
            for sending in [dist.isend(self._tensor, 1 + reader) for reader in range(readers)]:
                assert sending is not None
                sending.wait()
        return self._crew.finish(readers)

    def close(self) -> None:
        """End the readers."""
        self._crew.close()
        self._folder.cleanup()


def prepare(arena: Arena, number: int, how: str, store: str) -> Read:
    """Be a reader's rank."""
    groups = join(1 + number, store)
    tensor = tensor_of(arena.destination(number))

    def read(readers: int) -> None:
        if how == "broadcast":
            dist.broadcast(tensor, SOURCE, group=groups[readers])
        else:
            dist.recv(tensor, SOURCE)

    return read


def join(rank: int, store: str) -> Groups:
    """Join all ranks, and make the groups that a broadcast may have: of the first reader, and of all."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=1 + READERS)
    return {readers: dist.new_group(list(range(1 + readers))) for readers in (1, READERS)}


def tensor_of(region: Region) -> torch.Tensor:
    """Return a region as a tensor of the model's kind."""
    return torch.from_numpy(region.bytes).view(torch.bfloat16)


if __name__ == "__main__":
    main(Gloo)
