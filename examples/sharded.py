"""Shards: two trainer ranks hold half of a matrix each, by rows; an engine takes both halves.

Here all of them are threads of one process; in a real job each is a process, on a machine of its own.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

import tensorhub
from tensorhub import TensorSpec

RANKS = 2
ROWS, COLUMNS = 4, 3


def rows(rank: int) -> TensorSpec:
    """Say which rows of the whole matrix a rank holds."""
    height = ROWS // RANKS
    return TensorSpec((height, COLUMNS), torch.float32, global_shape=(ROWS, COLUMNS), offset=(height * rank, 0))


def main() -> None:
    """Publish from two ranks, read into two shards."""
    with tensorhub.connect() as hub, ThreadPoolExecutor(RANKS) as ranks:
        trainers = [
            hub.register("matrix", {"w": rows(rank)}, replica="trainer", shard=rank, shards=RANKS)
            for rank in range(RANKS)
        ]
        for rank, trainer in enumerate(trainers):
            trainer.tensors["w"].fill_(rank)
        # A publication is complete when every shard has joined it, so no rank returns before the others are there.
        version = max(ranks.map(lambda trainer: trainer.publish(), trainers))

        engines = [
            hub.register("matrix", {"w": rows(rank)}, replica="engine", shard=rank, shards=RANKS)
            for rank in range(RANKS)
        ]
        # One answer for all: "latest" is the same version for every shard, whatever is published meanwhile.
        print(f"published {version}, replicated", *ranks.map(lambda engine: engine.replicate("latest"), engines))
        print(torch.cat([engine.tensors["w"] for engine in engines]))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except tensorhub.TensorHubError as error:
        sys.exit(f"sharded.py: {error}")
