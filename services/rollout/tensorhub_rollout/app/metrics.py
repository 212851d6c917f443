"""A rollout manager's metrics, read when the metrics page is requested; docs/operate/metrics.md lists them.

The functions here run in a thread of the page's while the event loop goes on, so they only read, and copy a table
before they walk through it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from opentelemetry import metrics as api
from opentelemetry.metrics import Meter

from tensorhub_common.observability.metrics import METER, Sample, observe, unlabelled
from tensorhub_rollout.answers.status import state_of
from tensorhub_rollout.app.service import RolloutManager
from tensorhub_rollout.core.leader_counts import DiscardReason
from tensorhub_rollout.jobs.job import RolloutJob


def watch(manager: RolloutManager, meter: Meter | None = None) -> None:
    """Have a manager's metrics read from here on; once in a process."""
    meter = meter or api.get_meter(METER)

    def of_jobs(name: str, read: Callable[[RolloutJob], float | None]) -> None:
        def samples() -> Iterator[Sample]:
            for job in list(manager.jobs.values()):
                value = read(job)
                if value is not None:
                    yield value, {"job": job.name}

        observe(meter, name, samples)

    def of_parts(name: str, read: Callable[[RolloutJob], Iterator[Sample]]) -> None:
        def samples() -> Iterator[Sample]:
            for job in list(manager.jobs.values()):
                for value, labels in read(job):
                    yield value, {"job": job.name, **labels}

        observe(meter, name, samples)

    observe(meter, "tensorhub.rollout.leads", unlabelled(lambda: manager.leads))
    observe(meter, "tensorhub.rollout.jobs.stopped", unlabelled(lambda: manager.stopped))
    observe(meter, "tensorhub.rollout.stale", unlabelled(lambda: manager.stale))
    of_parts("tensorhub.rollout.requests", _requests)
    of_parts("tensorhub.rollout.instances", _instances)
    of_parts("tensorhub.rollout.responses", lambda job: _by("reason", job.counts.responses))
    of_parts("tensorhub.rollout.tokens.done", _done_by_age)
    of_parts("tensorhub.rollout.tokens.discarded", lambda job: _by("why", job.counts.discarded(job.leader)))
    of_jobs("tensorhub.rollout.response.tokens", lambda job: job.counts.response_tokens)
    of_jobs("tensorhub.rollout.tokens", lambda job: job.counts.tokens(job.leader))
    of_jobs("tensorhub.rollout.attempts", lambda job: job.counts.attempts(job.leader))
    of_jobs("tensorhub.rollout.instances.lost", lambda job: job.counts.instances_lost(job.leader))
    of_jobs("tensorhub.rollout.payloads.used", lambda job: job.state.payload_bytes)
    of_jobs("tensorhub.rollout.payloads.limit", lambda job: job.payload_bytes_max or None)
    of_jobs("tensorhub.rollout.folded", lambda job: job.state.seq)


def _requests(job: RolloutJob) -> Iterator[Sample]:
    leader = job.leader
    if leader is None:
        return
    waiting = sum(each.is_waiting for each in list(leader.requests.values()))
    consumers = list(leader.state.consumers.values())
    ended = sum(len(each) for consumer in consumers for each in list(consumer.ended.values()))
    for state, count in (("waiting", waiting), ("placed", leader.state.open - waiting), ("ended", ended)):
        yield count, {"state": state}


def _instances(job: RolloutJob) -> Iterator[Sample]:
    instances = [] if job.leader is None else list(job.leader.instances.values())
    found = Counter((each.model, state_of(each)) for each in instances)
    for (model, state), count in found.items():
        yield count, {"model": model, "state": state}


def _done_by_age(job: RolloutJob) -> Iterator[Sample]:
    for age, count in list(job.ages.tokens.items()):
        yield count, {"age": str(age)}


def _by(label: str, counts: Mapping[str, int] | Mapping[DiscardReason, int]) -> Iterator[Sample]:
    for value, count in list(counts.items()):
        yield count, {label: value}
