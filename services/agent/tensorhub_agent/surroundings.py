"""What the agent's jobs share: one memory, one pool of threads, one connection, the same transports."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorhub_agent.cache_making import CopyMaker
from tensorhub_agent.copying import CopyPool
from tensorhub_agent.effects import Key
from tensorhub_agent.encodings.deltas import DeltaBook
from tensorhub_agent.incarnation import Incarnation
from tensorhub_agent.limits import Limits
from tensorhub_agent.measured import Measured
from tensorhub_agent.read_counts import ReadCounts
from tensorhub_agent.registry_watch import RegistryWatch
from tensorhub_agent.shelf import Shelves
from tensorhub_agent.sources_seen import SourcesSeen
from tensorhub_agent.transports import Transports
from tensorhub_common.bus.blobs import Blobs
from tensorhub_common.bus.connection import Bus
from tensorhub_common.counterpart import Counterpart

if TYPE_CHECKING:
    from tensorhub_agent.job_agent import JobAgent


@dataclass(slots=True)
class Surroundings:
    """Handed to each `JobAgent`."""

    agent: str
    host: str
    site: str
    rack: str
    bus: Bus
    blobs: Blobs
    pool: CopyPool
    transports: Transports
    limits: Limits
    measured: Measured
    incarnation: Incarnation
    shelves: Shelves
    deltas: DeltaBook
    copies: CopyMaker
    planner: Counterpart
    registry: RegistryWatch
    sources: SourcesSeen
    reads: ReadCounts
    joined: Callable[[int], None]
    """Called with the incarnation that the log has taken."""
    tell_holds: Callable[[int, str, Key, int | None, str], None]
    """(worker's number, job, shard, version): the shard's replica holds something else now."""
    fenced: Callable[[], None]
    """Another process has this agent's name: end."""
    fault: Callable[[str], None]
    """Something failed that can't fail: end, and let the next process take back what stands in memory."""
    set_aside: Callable[["JobAgent"], None]
    """A job has failed: serve the others, and keep its memory for the next process."""
