"""Mooncake's transfer engine over TCP: each reader's engine reads the source engine's registered memory."""

from typing import Any, Final

from mooncake.engine import TransferEngine

from benchmarks.side_by_side.arena import Arena, Region
from benchmarks.side_by_side.peers.program import Crew, Peer, Read, main

LISTEN: Final = "127.0.0.1"
NO_METADATA_SERVER: Final = "P2PHANDSHAKE"


class Mooncake(Peer):
    """The source's engine."""

    def __init__(self, arena: Arena, _how: str) -> None:
        super().__init__(arena)
        self._engine = engine_with(arena.source)
        self._crew = Crew(prepare, arena.paths, f"{LISTEN}:{self._engine.get_rpc_port()}", arena.source.address)
        self._crew.wait_ready()

    def run(self, readers: int) -> float:
        """Let the readers read; the source's engine answers them."""
        return self._crew.run(readers)

    def close(self) -> None:
        """End the readers."""
        self._crew.close()


def prepare(arena: Arena, number: int, source: str, address: int) -> Read:
    """Start a reader's engine."""
    region = arena.destination(number)
    engine = engine_with(region)

    def read(_: int) -> None:
        status = engine.transfer_sync_read(source, region.address, address, region.nbytes)
        if status != 0:
            raise ConnectionError(f"the transfer ended with status {status}")

    return read


def engine_with(region: Region) -> Any:  # noqa: ANN401 (Mooncake brings no types)
    """Return an engine that has registered this memory."""
    engine = TransferEngine()
    for what, status in (
        ("start", engine.initialize(LISTEN, NO_METADATA_SERVER, "tcp", "")),
        ("register its memory", engine.register_memory(region.address, region.nbytes)),
    ):
        if status != 0:
            raise RuntimeError(f"the engine could not {what}: status {status}")
    return engine


if __name__ == "__main__":
    main(Mooncake)
