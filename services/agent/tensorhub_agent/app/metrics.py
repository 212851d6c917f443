"""An agent's metrics: where each figure is read, at the time of a scrape; docs/operate/metrics.md lists them.

The functions here run in a thread of the page's while the event loop goes on, so they only read, and copy a table
before they walk through it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from opentelemetry import metrics as api
from opentelemetry.metrics import Meter

from tensorhub_agent.jobs.driver import JobDriver
from tensorhub_agent.jobs.read_counts import ReadCounts
from tensorhub_agent.jobs.worker_server import WorkerServer
from tensorhub_agent.leases.delta_store import DeltaStore
from tensorhub_agent.leases.lease import LeaseState
from tensorhub_agent.runtime.rejections import REJECTIONS
from tensorhub_agent.storage.byte_account import ByteAccount
from tensorhub_agent.storage.device_segments import DeviceStores
from tensorhub_agent.storage.shard_store import ShardStores
from tensorhub_agent.transports.registry import TransportRegistry
from tensorhub_common.observability.metrics import METER, labelled, observe, unlabelled


def watch(
    jobs: Mapping[str, JobDriver],
    read_counts: ReadCounts,
    stores: ShardStores,
    workers: WorkerServer,
    transports: TransportRegistry,
    deltas: DeltaStore,
    *,
    meter: Meter | None = None,
) -> None:
    """Have an agent's metrics read from here on; once in a process."""
    meter = meter or api.get_meter(METER)
    store, disk, devices = stores.store, stores.disk, stores.devices

    def all_jobs() -> list[JobDriver]:
        return list(jobs.values())

    def read_bytes() -> Counter[str]:
        return _sum(job.stats().read_bytes for job in all_jobs())

    def encoded() -> Counter[str]:
        return _sum(job.stats().encoded_bytes for job in all_jobs())

    def reads() -> Counter[str]:
        return Counter(dict(read_counts.ended))

    def late() -> Counter[str]:
        return Counter(dict(read_counts.late))

    def retried() -> int:
        return read_counts.retried

    def sources() -> Counter[str]:
        return _sum(job.stats().sources for job in all_jobs())

    def leases() -> Counter[str]:
        states = Counter({str(state): 0 for state in (LeaseState.GRANTED, LeaseState.OPEN)})
        for job in all_jobs():
            states.update(job.stats().leases)
        return states

    observe(meter, "tensorhub.agent.read", labelled("transport", read_bytes))
    observe(meter, "tensorhub.agent.encoded", labelled("encoding", encoded))
    observe(meter, "tensorhub.agent.served", labelled("transport", transports.served_bytes))
    observe(meter, "tensorhub.agent.pieces.retried", unlabelled(retried))
    observe(meter, "tensorhub.agent.reads", labelled("outcome", reads))
    observe(meter, "tensorhub.agent.reads.late", labelled("kind", late))
    observe(meter, "tensorhub.agent.leases", labelled("state", leases))
    observe(meter, "tensorhub.agent.sources", labelled("transport", sources))
    observe(meter, "tensorhub.agent.connections", labelled("transport", transports.connections))
    observe(meter, "tensorhub.agent.segments.used", unlabelled(lambda: store.account.total_bytes))
    observe(meter, "tensorhub.agent.segments.limit", unlabelled(lambda: store.account.bytes_max))
    observe(
        meter,
        "tensorhub.agent.device.segments.used",
        labelled("device", lambda: _by_device(devices, lambda each: each.total_bytes)),
    )
    observe(
        meter,
        "tensorhub.agent.device.segments.limit",
        labelled("device", lambda: _by_device(devices, lambda each: each.bytes_max)),
    )
    observe(meter, "tensorhub.agent.deltas.used", unlabelled(lambda: deltas.nbytes))
    observe(meter, "tensorhub.agent.disk.used", unlabelled(lambda: 0 if disk is None else disk.account.total_bytes))
    observe(meter, "tensorhub.agent.disk.limit", unlabelled(lambda: 0 if disk is None else disk.account.bytes_max))
    observe(meter, "tensorhub.agent.workers", unlabelled(lambda: workers.connections))
    observe(meter, "tensorhub.agent.refused", labelled("reason", lambda: Counter(REJECTIONS.counts)))


def _by_device(devices: DeviceStores | None, read: Callable[[ByteAccount], int]) -> dict[str, int]:
    return {} if devices is None else {uuid: read(account) for uuid, account in devices.accounts().items()}


def _sum(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total
