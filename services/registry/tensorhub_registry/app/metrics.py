"""A registry's metrics, read when the metrics page is requested; docs/operate/metrics.md lists them.

The functions here run in a thread of the page's while the event loop goes on, so they only read, and copy a table
before they walk through it.
"""

from collections import Counter
from collections.abc import Iterator

from opentelemetry import metrics as api
from opentelemetry.metrics import Meter

from tensorhub_common.catalog.transitions import AgentState
from tensorhub_common.observability.metrics import METER, Sample, observe, unlabelled
from tensorhub_common.protocol.queries import VersionState
from tensorhub_registry.app.service import Registry
from tensorhub_registry.jobs.job import Job


def watch(registry: Registry, meter: Meter | None = None) -> None:
    """Have a registry's metrics read from here on; once in a process."""
    meter = meter or api.get_meter(METER)

    def jobs() -> list[Job]:
        return list(registry.jobs.values())

    def unpublished() -> Iterator[Sample]:
        for job in jobs():
            yield job.fold.unpublished, {"job": job.name}

    observe(meter, "tensorhub.registry.commands", lambda: _commands(jobs()))
    observe(meter, "tensorhub.registry.events", unlabelled(lambda: sum(job.counts.events for job in jobs())))
    observe(
        meter,
        "tensorhub.registry.passed_over",
        unlabelled(lambda: sum(job.counts.passed_over for job in jobs())),
    )
    observe(meter, "tensorhub.registry.leads", unlabelled(lambda: registry.leads))
    observe(meter, "tensorhub.registry.unpublished", unpublished)
    observe(
        meter,
        "tensorhub.registry.jobs.stopped",
        unlabelled(lambda: sum(job.failure is not None for job in jobs())),
    )
    observe(meter, "tensorhub.registry.agents", lambda: _agents(jobs()))
    observe(meter, "tensorhub.registry.versions", lambda: _versions(jobs()))


def _commands(jobs: list[Job]) -> Iterator[Sample]:
    total: Counter[tuple[str, str]] = Counter()
    for job in jobs:
        total.update(dict(job.counts.commands))
    for (outcome, error), count in total.items():
        yield count, {"outcome": outcome, "error": error}


def _agents(jobs: list[Job]) -> Iterator[Sample]:
    for job in jobs:
        states = Counter({AgentState.LIVE: 0, AgentState.LOST: 0})
        states.update(agent.state for agent in list(job.fold.catalog.agents.values()))
        for state, count in states.items():
            yield count, {"job": job.name, "state": str(state)}


def _versions(jobs: list[Job]) -> Iterator[Sample]:
    for job in jobs:
        for model in list(job.fold.catalog.models.values()):
            versions = list(model.versions.values())
            count = sum(version.state is VersionState.AVAILABLE for version in versions)
            yield count, {"job": job.name, "model": model.name}
