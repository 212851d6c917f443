"""NIXL with its UCX backend: each reader's agent reads the source agent's registered memory.

UCX's own variables choose the transport: by default what its UCX finds best on one machine, or TCP alone.
"""

import time
from typing import Any, Final

from nixl_cu13._api import nixl_agent, nixl_agent_config

from benchmarks.side_by_side.arena import Arena, Region
from benchmarks.side_by_side.peers.program import Crew, Peer, Read, main

BACKENDS: Final = ["UCX"]
KIND: Final = "DRAM"
DEVICE: Final = 0
SOURCE: Final = "source"
POLL_S: Final = 0.0005
"""NIXL's own thread moves the bytes; to ask without a pause would take a core from it."""


class Nixl(Peer):
    """The source's agent."""

    def __init__(self, arena: Arena, _how: str) -> None:
        super().__init__(arena)
        self._agent = agent_with(SOURCE, arena.source)
        self._crew = Crew(prepare, arena.paths, self._agent.get_agent_metadata(), arena.source.address)
        self._crew.wait_ready()

    def run(self, readers: int) -> float:
        """Let the readers read; the source itself does nothing."""
        return self._crew.run(readers)

    def close(self) -> None:
        """End the readers."""
        self._crew.close()


def prepare(arena: Arena, number: int, metadata: bytes, address: int) -> Read:
    """Connect a reader's agent, and prepare its one transfer."""
    region = arena.destination(number)
    agent = agent_with(f"reader-{number}", region)
    source = agent.add_remote_agent(metadata)
    here = agent.get_xfer_descs([(region.address, region.nbytes, DEVICE)], KIND)
    there = agent.get_xfer_descs([(address, arena.nbytes, DEVICE)], KIND)
    transfer = agent.initialize_xfer("READ", here, there, source)

    def read(_: int) -> None:
        state = agent.transfer(transfer)
        while state == "PROC":
            time.sleep(POLL_S)
            state = agent.check_xfer_state(transfer)
        if state != "DONE":
            raise ConnectionError(f"the transfer ended as {state}")

    return read


def agent_with(name: str, region: Region) -> Any:  # noqa: ANN401 (NIXL brings no types)
    """Return an agent that has registered this memory."""
    agent = nixl_agent(name, nixl_agent_config(backends=BACKENDS))
    agent.register_memory([(region.address, region.nbytes, DEVICE, "")], KIND)
    return agent


if __name__ == "__main__":
    main(Nixl)
