"""What the agent's jobs share: one memory, one pool of threads, one connection, the same transports."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.core.config import Limits
from tensorhub_agent.jobs.read_counts import ReadCounts
from tensorhub_agent.leases.delta_store import DeltaBook
from tensorhub_agent.observability.registry_watch import RegistryWatch
from tensorhub_agent.primitives.ids import Key
from tensorhub_agent.rates.link_rates import Measured
from tensorhub_agent.sources.source_watch import SourcesSeen
from tensorhub_agent.storage.copy_allocator import CopyMaker
from tensorhub_agent.storage.incarnation import Incarnation
from tensorhub_agent.storage.shard_store import Shelves
from tensorhub_agent.transports.registry import Transports
from tensorhub_common.bus.connection import Bus
from tensorhub_common.jetstream.blob_store import Blobs
from tensorhub_common.runtime.peer_status import Counterpart

if TYPE_CHECKING:
    from tensorhub_agent.jobs.driver import JobAgent


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
