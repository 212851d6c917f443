"""The metrics of the hub: one table of them, and how a service gives them their values.

A value is read when a scrape or push asks for it: a service hands over a function for each of its metrics, which is
called at each scrape or push, in a thread of its own. So a metric costs nothing between them. Only durations and ages
are recorded as they occur, once for each read, plan or response.

Always true: a metric that is not in the table can't be given values, and docs/operate/metrics.md is written from the
table.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, NamedTuple, Protocol

from opentelemetry.metrics import CallbackOptions, Meter, Observation

METER: Final = "tensorhub"

MetricRole = Literal["every", "agent", "registry", "planner", "rollout", "runner"]
MetricKind = Literal["counter", "gauge", "histogram"]

Sample = tuple[float, Mapping[str, str]]
"""A number and the labels that tell it from the metric's others."""
ReadSamples = Callable[[], Iterable[Sample]]

VERSIONS_BUCKETS: Final = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
SECONDS_BUCKETS: Final = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_log: Final = logging.getLogger(__name__)


class Metric(NamedTuple):
    """One row. `unit` is UCUM's, as OpenTelemetry has it; what is in braces is no part of the name."""

    role: MetricRole
    name: str
    kind: MetricKind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()


_ROWS: Final = (
    Metric(
        "every",
        "tensorhub.spans.dropped",
        "counter",
        "{span}",
        "Finished spans that `tensorhub trace` won't find: they came too fast, or could not be written.",
    ),
    Metric(
        "every",
        "tensorhub.spans.cpu",
        "counter",
        "s",
        "Processor time that finished spans took, after everybody had been answered; without that of an OTLP exporter.",
    ),
    Metric(
        "every",
        "tensorhub.faults",
        "counter",
        "{fault}",
        "Errors that escaped from a task, timer, callback or thread. Each is a bug: the log has its traceback.",
        ("owner",),
    ),
    Metric("agent", "tensorhub.agent.read", "counter", "By", "Weights that this agent brought in.", ("transport",)),
    Metric(
        "agent",
        "tensorhub.agent.encoded",
        "counter",
        "By",
        "Bytes of pieces that were received as a delta or packed, so that fewer bytes crossed the wire.",
        ("encoding",),
    ),
    Metric(
        "agent",
        "tensorhub.agent.served",
        "counter",
        "By",
        "Weights that were read from here. On the local transport readers say so at their end.",
        ("transport",),
    ),
    Metric(
        "agent",
        "tensorhub.agent.pieces.retried",
        "counter",
        "{piece}",
        "Pieces that were asked for once more, since their source was lost or their digest was wrong.",
    ),
    Metric(
        "agent",
        "tensorhub.agent.reads",
        "counter",
        "{read}",
        "Reads of a shard that ended: `done`, `put-off` (an update that is to be called again), or the name of the "
        "error that the caller got.",
        ("outcome",),
    ),
    Metric(
        "agent",
        "tensorhub.agent.read.duration",
        "histogram",
        "s",
        "From the log's first decision to a ready replica, less waits. Reads that fetched nothing don't count.",
    ),
    Metric(
        "agent",
        "tensorhub.agent.read.wait",
        "histogram",
        "s",
        "Of the same reads, while nothing was decided: a publisher or another shard was waited for.",
    ),
    Metric(
        "agent",
        "tensorhub.agent.reads.late",
        "counter",
        "{read}",
        "Reads of a shard that got no byte for `TENSORHUB_STALL_S` (`stalled`), or took long for their bytes (`slow`). "
        "The log has a line for each.",
        ("kind",),
    ),
    Metric("agent", "tensorhub.agent.leases", "gauge", "{lease}", "Readers of this agent's shards.", ("state",)),
    Metric("agent", "tensorhub.agent.sources", "gauge", "{source}", "Sources that are read from now.", ("transport",)),
    Metric(
        "agent",
        "tensorhub.agent.connections",
        "gauge",
        "{connection}",
        "Connections of readers, and over ucxx those to sources as well; idle ones count.",
        ("transport",),
    ),
    Metric("agent", "tensorhub.agent.segments.used", "gauge", "By", "Memory that the agent's segments take."),
    Metric("agent", "tensorhub.agent.segments.limit", "gauge", "By", "How much they may take."),
    Metric(
        "agent",
        "tensorhub.agent.device.segments.used",
        "gauge",
        "By",
        "Memory that the agent's segments take of each GPU, by its UUID.",
        ("device",),
    ),
    Metric(
        "agent", "tensorhub.agent.device.segments.limit", "gauge", "By", "How much they may take of it.", ("device",)
    ),
    Metric("agent", "tensorhub.agent.deltas.used", "gauge", "By", "Memory that the deltas take which the agent keeps."),
    Metric("agent", "tensorhub.agent.disk.used", "gauge", "By", "What copies of retained versions take on its disk."),
    Metric("agent", "tensorhub.agent.disk.limit", "gauge", "By", "How much they may take there."),
    Metric("agent", "tensorhub.agent.workers", "gauge", "{worker}", "Connections of trainers and engines."),
    Metric(
        "agent",
        "tensorhub.agent.refused",
        "counter",
        "{refusal}",
        "What strangers were refused: other users, tickets that are not good, bytes beyond a grant, what is no frame.",
        ("reason",),
    ),
    Metric(
        "registry",
        "tensorhub.registry.commands",
        "counter",
        "{command}",
        "Commands that came while this registry was leading, by the event that each led to, and by its error where it"
        " was refused.",
        ("outcome", "error"),
    ),
    Metric(
        "registry",
        "tensorhub.registry.events",
        "counter",
        "{event}",
        "Events that those commands led to.",
    ),
    Metric(
        "registry",
        "tensorhub.registry.leads",
        "gauge",
        "",
        "1 where this registry is the one that speaks, else 0.",
    ),
    Metric(
        "registry",
        "tensorhub.registry.passed_over",
        "counter",
        "{entry}",
        "Entries on events' subjects that are none: somebody has JetStream answer there (docs/operate/security.md).",
    ),
    Metric(
        "registry",
        "tensorhub.registry.unpublished",
        "gauge",
        "{command}",
        "Commands that were folded and whose outcome is not known to be in the log yet.",
        ("job",),
    ),
    Metric(
        "registry",
        "tensorhub.registry.jobs.stopped",
        "gauge",
        "{job}",
        "Jobs that this registry has set aside, since it can't go on from what their log says. They are tried again.",
    ),
    Metric(
        "registry",
        "tensorhub.registry.agents",
        "gauge",
        "{agent}",
        "Agents by state.",
        ("job", "state"),
    ),
    Metric(
        "registry",
        "tensorhub.registry.versions",
        "gauge",
        "{version}",
        "Versions that can be read now.",
        ("job", "model"),
    ),
    Metric("planner", "tensorhub.planner.plans", "counter", "{plan}", "Questions that were answered with a plan."),
    Metric(
        "planner",
        "tensorhub.planner.refusals",
        "counter",
        "{plan}",
        "Questions that were not, by the error that the reader got.",
        ("error",),
    ),
    Metric(
        "planner",
        "tensorhub.planner.plan.duration",
        "histogram",
        "s",
        "From a question to its answer, with the wait for the log.",
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.leads",
        "gauge",
        "",
        "1 where this rollout manager is the one that leads, else 0.",
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.jobs.stopped",
        "gauge",
        "{job}",
        "Jobs that this manager has set aside, since it can't go on from what their log says. They are tried again.",
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.requests",
        "gauge",
        "{request}",
        "Responses that are wanted: `waiting` for an instance, `placed` on one, or `ended` and not done. "
        "By the leader alone.",
        ("job", "state"),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.responses",
        "counter",
        "{response}",
        "Responses that ended, by how.",
        ("job", "reason"),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.response.tokens",
        "counter",
        "{token}",
        "Tokens of the responses that ended.",
        ("job",),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.tokens",
        "counter",
        "{token}",
        "Tokens that came from instances, with those that were sent twice.",
        ("job",),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.tokens.done",
        "counter",
        "{token}",
        "Tokens of responses that are done, by how many newer versions were published then, 16 and more as 16. "
        "What ended before this manager led is left out, here and in the next two.",
        ("job", "age"),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.response.age",
        "histogram",
        "{version}",
        "Of each response that is done: how many newer versions than that of its oldest token were published then.",
        ("job",),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.group.age",
        "histogram",
        "{version}",
        "Of each group: how many versions were published from its submission until all of its responses were done.",
        ("job",),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.tokens.discarded",
        "counter",
        "{token}",
        "Tokens that are made again: `restart` (new weights, as the trainer asked for), `age` (older than `max_age` "
        "allows), `rewind` (the trainer went back behind their version).",
        ("job", "why"),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.attempts",
        "counter",
        "{attempt}",
        "Placements of responses on instances. More than responses: some were moved, or begun anew.",
        ("job",),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.instances",
        "gauge",
        "{instance}",
        "Engines with their runners: `serving`, `loading` weights, or `leaving`. By the leader alone.",
        ("job", "model", "state"),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.instances.lost",
        "counter",
        "{instance}",
        "Instances that were taken for lost. The log has a line for each, with the reason.",
        ("job",),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.payloads.used",
        "gauge",
        "By",
        "What prompts and tokens of responses take that are not done.",
        ("job",),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.payloads.limit",
        "gauge",
        "By",
        "How much they may take. From 70 % on no further group begins.",
        ("job",),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.folded",
        "gauge",
        "{entry}",
        "The last entry of the rollout log that this manager has folded; shown by all managers.",
        ("job",),
    ),
    Metric(
        "rollout",
        "tensorhub.rollout.stale",
        "counter",
        "{message}",
        "Words of runners and questions of trainers that were too old when their turn came: the manager is overloaded.",
    ),
    Metric("runner", "tensorhub.runner.steps", "counter", "{step}", "Steps of the engine."),
    Metric("runner", "tensorhub.runner.busy", "counter", "s", "Time that these steps took."),
    Metric("runner", "tensorhub.runner.tokens", "counter", "{token}", "Tokens that the engine made."),
    Metric(
        "runner",
        "tensorhub.runner.recomputed",
        "counter",
        "{token}",
        "Tokens that responses had when the engine began with them, or went on behind new weights: it computes their "
        "cache anew.",
    ),
    Metric(
        "runner",
        "tensorhub.runner.attempts",
        "gauge",
        "{attempt}",
        "Responses at this runner: `running` in the engine, `waiting` for a slot or for their prefix; `stopped` and "
        "`finished` ones are held until the leader has them.",
        ("state",),
    ),
    Metric("runner", "tensorhub.runner.slots", "gauge", "{attempt}", "How many may run at once."),
    Metric(
        "runner",
        "tensorhub.runner.version",
        "gauge",
        "",
        "The version in the engine's memory; absent before the first, and while it changes.",
    ),
    Metric("runner", "tensorhub.runner.frames", "counter", "{frame}", "Messages with new tokens, to the leader."),
    Metric(
        "runner",
        "tensorhub.runner.frames.unanswered",
        "gauge",
        "{frame}",
        "Those that no leader has answered yet. Eight, for long: no leader takes tokens.",
    ),
    Metric(
        "runner",
        "tensorhub.runner.load.pause",
        "histogram",
        "s",
        "How long the engine stood still for new weights, once for each version.",
    ),
    Metric(
        "runner",
        "tensorhub.runner.load.wait",
        "histogram",
        "s",
        "Before that: from a version that is here to the pause, while responses end that must end on theirs.",
    ),
)

METRICS: Final[Mapping[str, Metric]] = {row.name: row for row in _ROWS}
"""Every metric by its name."""


def observe(meter: Meter, name: str, read: ReadSamples) -> None:
    """Have `read` called whenever somebody looks at this metric. What it raises costs this metric alone, this time."""
    row = METRICS[name]

    def callback(_: CallbackOptions) -> list[Observation]:
        try:
            return [Observation(value, dict(labels)) for value, labels in read()]
        except Exception:  # noqa: BLE001 (it reads what another thread changes; the next look may well succeed)
            _log.debug("%s could not be read", name, exc_info=True)
            return []

    make = {"counter": meter.create_observable_counter, "gauge": meter.create_observable_gauge}[row.kind]
    make(row.name, callbacks=[callback], unit=row.unit, description=row.meaning)


class Record(Protocol):
    """Records a number, with the labels that tell it from the metric's others."""

    def __call__(self, amount: float, attributes: Mapping[str, str] | None = None, /) -> None:
        """Record it."""


def recorder(meter: Meter, name: str) -> Record:
    """Return what records a duration, or an age in versions."""
    row = METRICS[name]
    assert row.kind == "histogram", f"{name} is read, not recorded"
    buckets = SECONDS_BUCKETS if row.unit == "s" else VERSIONS_BUCKETS
    histogram = meter.create_histogram(
        row.name, unit=row.unit, description=row.meaning, explicit_bucket_boundaries_advisory=buckets
    )
    return histogram.record


def unlabelled(read: Callable[[], float]) -> ReadSamples:
    """Make a metric without labels of a number."""
    return lambda: [(read(), {})]


def labelled(label: str, read: Callable[[], Mapping[str, float]]) -> ReadSamples:
    """Make a metric with one label of a table. It is copied at once, since another thread may change it."""
    return lambda: [(value, {label: key}) for key, value in list(read().items())]
