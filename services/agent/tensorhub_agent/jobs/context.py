"""What the agent's jobs share: one memory, one pool of threads, one connection, the same transports."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.jobs.read_counts import ReadCounts
from tensorhub_agent.leases.delta_store import DeltaStore
from tensorhub_agent.observability.registry_watch import RegistryWatch
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.rates.link_rates import LinkRates
from tensorhub_agent.sources.source_watch import SourceWatch
from tensorhub_agent.storage.copy_allocator import CopyAllocator
from tensorhub_agent.storage.incarnation import IncarnationCounter
from tensorhub_agent.storage.shard_store import ShardStores
from tensorhub_agent.transports.registry import TransportRegistry
from tensorhub_common.bus.connection import Bus
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.runtime.peer_status import PeerStatus

if TYPE_CHECKING:
    from tensorhub_agent.jobs.driver import JobDriver


@dataclass(slots=True)
class AgentContext:
    """Handed to each `JobDriver`."""

    agent: str
    host: str
    site: str
    rack: str
    bus: Bus
    blobs: BlobStore
    pool: CopyPool
    transports: TransportRegistry
    config: CoreConfig
    measured: LinkRates
    incarnation: IncarnationCounter
    stores: ShardStores
    deltas: DeltaStore
    copies: CopyAllocator
    planner: PeerStatus
    registry: RegistryWatch
    sources: SourceWatch
    reads: ReadCounts
    joined: Callable[[int], None]
    """Called with the incarnation that the log has taken."""
    tell_holds: Callable[[int, str, ShardKey, int | None, str], None]
    """(worker's number, job, shard, version): the shard's replica holds something else now."""
    fenced: Callable[[], None]
    """Another process has this agent's name: end."""
    fault: Callable[[str], None]
    """Something failed that can't fail: end, and let the next process take back what stands in memory."""
    set_aside: Callable[["JobDriver"], None]
    """A job has failed: serve the others, and keep its memory for the next process."""
