"""What lies in a GPU's memory passes through the host's on its way over UCX.

UCX is not ordered with a GPU's streams, its wheel has no RDMA, and memory made by the driver's virtual memory calls
falls back to slow copies in it without a word. Host memory goes at the speed of the wire.
"""

from collections.abc import Sequence

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_agent.transports.ucxx.protocol.gather_plan import starts


async def on_host(
    pool: CopyPool, region: MemoryRegion, origin: Sequence[int], nbytes: Sequence[int]
) -> tuple[memoryview, Sequence[int]]:
    """Return memory of the host with these ranges of a region, and where in it each range begins.

    Host memory is returned as it is, and nothing is copied.
    """
    if isinstance(region, memoryview):
        return region, origin
    at = starts(nbytes)
    copied = memoryview(bytearray(sum(nbytes)))
    await pool.copy_and_digest(copied, region, Spans(at, origin, nbytes), digests=False).done()
    return copied, at
