"""An agent's metrics: where each figure stands, read when somebody looks; docs/metrics.md lists them.

The functions here run in a thread of the page's while the event loop goes on, so they only read, and copy a table
before they walk through it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from opentelemetry import metrics as api
from opentelemetry.metrics import Meter

from tensorhub_agent.jobs.driver import JobAgent
from tensorhub_agent.jobs.read_counts import ReadCounts
from tensorhub_agent.jobs.worker_server import WorkerServer
from tensorhub_agent.leases.delta_store import DeltaBook
from tensorhub_agent.leases.lease import LeaseState
from tensorhub_agent.runtime.rejections import REFUSED
from tensorhub_agent.storage.segments import SegmentStore
from tensorhub_agent.transports.registry import Transports
from tensorhub_common.observability.metrics import METER, by, observe, one


def watch(
    jobs: Mapping[str, JobAgent],
    read_counts: ReadCounts,
    store: SegmentStore,
    disk: SegmentStore | None,
    workers: WorkerServer,
    transports: Transports,
    deltas: DeltaBook,
    *,
    meter: Meter | None = None,
) -> None:
    """Have an agent's metrics read from here on; once in a process."""
    meter = meter or api.get_meter(METER)

    def all_jobs() -> list[JobAgent]:
        return list(jobs.values())

    def read_bytes() -> Counter[str]:
        return _sum(dict(job.sources.read_bytes) for job in all_jobs())

    def encoded() -> Counter[str]:
        return _sum(dict(job.sources.encoded_bytes) for job in all_jobs())

    def reads() -> Counter[str]:
        return Counter(dict(read_counts.ended))

    def late() -> Counter[str]:
        return Counter(dict(read_counts.late))

    def retried() -> int:
        return read_counts.retried

    def sources() -> Counter[str]:
        return _sum(Counter(job.sources.transports()) for job in all_jobs())

    def leases() -> Counter[str]:
        states = Counter({str(state): 0 for state in (LeaseState.GRANTED, LeaseState.OPEN)})
        for job in all_jobs():
            states.update(job.core.table.states())
        return states

    observe(meter, "tensorhub.agent.read", by("transport", read_bytes))
    observe(meter, "tensorhub.agent.encoded", by("encoding", encoded))
    observe(meter, "tensorhub.agent.served", by("transport", transports.served_bytes))
    observe(meter, "tensorhub.agent.pieces.retried", one(retried))
    observe(meter, "tensorhub.agent.reads", by("outcome", reads))
    observe(meter, "tensorhub.agent.reads.late", by("kind", late))
    observe(meter, "tensorhub.agent.leases", by("state", leases))
    observe(meter, "tensorhub.agent.sources", by("transport", sources))
    observe(meter, "tensorhub.agent.connections", by("transport", transports.connections))
    observe(meter, "tensorhub.agent.segments.used", one(lambda: store.total_bytes))
    observe(meter, "tensorhub.agent.segments.limit", one(lambda: store.bytes_max))
    observe(meter, "tensorhub.agent.deltas.used", one(lambda: deltas.nbytes))
    observe(meter, "tensorhub.agent.disk.used", one(lambda: 0 if disk is None else disk.total_bytes))
    observe(meter, "tensorhub.agent.disk.limit", one(lambda: 0 if disk is None else disk.bytes_max))
    observe(meter, "tensorhub.agent.workers", one(lambda: workers.connections))
    observe(meter, "tensorhub.agent.refused", by("reason", lambda: Counter(REFUSED.counts)))


def _sum(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total
