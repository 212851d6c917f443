"""Questions by NATS request and reply, and the beat. Nothing here changes the catalog.

`ask.<what>` in a job is answered by the registry, except `ask.plan`, which is the planner's, and `ask.activity`, which
every process answers for itself. A reply is one JSON object: the answer, or an `QueryError`.
"""

from enum import StrEnum
from typing import Final

import msgspec

from tensorhub_common.protocol.log.events import AnyEvent

OUTCOMES_KEPT_MAX: Final = 65_536
"""The registry answers `ask.outcome` for this many of the last commands."""

STORY_LINES_MAX: Final = 2_000
"""A story is cut to its last lines."""


class QueryError(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """The question could not be answered. `error` is the name of the error class."""

    error: str
    message: str


class Ping(msgspec.Struct, frozen=True, kw_only=True):
    """Who are you? On the process's own subject of the hub."""


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag="pong"):
    """A process that is ready to serve."""

    id: str
    role: str
    pid: int
    protocol: int
    release: str = ""
    """The version of tensorhub that it runs; empty: a release that does not say so."""
    level: int = 0
    """Of a registry or planner: up to which level it folds a job (`levels.py`)."""


class OpenAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Open the job; an empty body asks the same. `level`: and raise it to this level, if it is below."""

    level: int = 0


class JobOpened(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """The job's stream exists."""

    job: str
    level: int = 0
    """The job's level, in the answer to who asked for one."""


class JobForgotten(msgspec.Struct, frozen=True, kw_only=True, tag="forgotten"):
    """Nothing is left of the deleted job, and its name is free."""

    job: str


class OutcomeAsk(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the command at this log sequence (the number in JetStream's acknowledgement)?"""

    seq: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """The command's whole group of events; empty while it is not decided."""

    seq: int
    events: tuple[AnyEvent, ...]


class ModelAsk(msgspec.Struct, frozen=True, kw_only=True):
    """About one model."""

    model: str


class VersionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A version as users see it."""

    model: str
    version: int
    state: str
    publisher: str
    published_at: float
    holders: tuple[str, ...]
    retained: bool = False
    """It is among the last versions that are kept, or pinned."""
    gone: str = ""
    """Why the last holder left, while the version is unavailable: "lost", "unpublished", "replaced" or "released"."""


class Versions(msgspec.Struct, frozen=True, kw_only=True, tag="versions"):
    """Oldest first."""

    versions: tuple[VersionInfo, ...]


class ShardInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A shard as users see it."""

    shard: int
    state: str
    version: int | None
    agent: str
    host: str
    live: bool
    nbytes: int
    layout: str
    lost_at: float = 0.0
    """When its agent was lost, in seconds since the epoch; 0 while that is live, and where it is not known."""


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as users see it. `version` is what all of its shards hold, ready."""

    model: str
    replica: str
    version: int | None
    shards: int
    spot: bool
    mapped: bool = False
    """It maps the memory of a holder, and is none itself."""
    round: int | None
    members: tuple[ShardInfo, ...]


class Replicas(msgspec.Struct, frozen=True, kw_only=True, tag="replicas"):
    """In the order of their registration."""

    replicas: tuple[ReplicaInfo, ...]


class AgentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An agent as users see it."""

    agent: str
    host: str
    site: str
    live: bool
    incarnation: int
    shards: int
    draining: bool = False
    """It takes no new shard: somebody drains it for maintenance."""
    may_stop: bool = False
    """It drains, and no retained version has its last counting copy there."""
    rack: str = ""
    """Empty: none is known."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model in short."""

    model: str
    last: int | None
    replicas: int
    retain: int = 0
    pins: tuple[int, ...] = ()


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """A job in short."""

    job: str
    seq: int
    registry: str
    term: int
    models: tuple[ModelInfo, ...]
    agents: tuple[AgentInfo, ...]
    level: int = 0
    """Which transitions its folders use (docs/design/protocol/releases.md)."""


HEALTH_JOBS_MAX: Final = 1_000
"""An answer about the whole hub names at most this many jobs; `Health.ailing` counts all."""


class JobState(StrEnum):
    """Whether a registry or a planner goes on with a job."""

    WELL = "well"
    """It has folded the log to its end, or is about to."""
    WAITING = "waiting"
    """The log can't be read or written just now. Nothing is wrong with the job, and it goes on by itself."""
    SET_ASIDE = "set-aside"
    """It can't go on from what the log holds. The others go on; this one is tried again at `again_at`, and stays in
    this state until it has got on."""


class JobHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How a registry or a planner gets on with one job."""

    job: str
    state: str
    """One of `JobState`; a later release may know more."""
    why: str = ""
    """One sentence, empty where all is well."""
    advice: str = ""
    """What to do about it."""
    seq: int = 0
    """The last entry of the log that was folded."""
    since: float = 0.0
    """Since when it has been so, in seconds since the epoch; 0 where all is well."""
    again_at: float = 0.0
    """When a job that was set aside is tried again, in seconds since the epoch; 0: it is not set aside. A time that has
    passed: its try is due or under way."""


class Health(msgspec.Struct, frozen=True, kw_only=True, tag="health"):
    """How one process gets on with its jobs. In a job that one, however it is; of the hub all that are not well.

    `ask.health.registry` is answered by the leading registry, also about a job that it has set aside, and
    `ask.health.planner` by a planner.
    """

    id: str
    role: str
    ailing: int
    """How many of all its jobs are not well."""
    jobs: tuple[JobHealth, ...]


class StoryAsk(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a model, or to one version of it?"""

    model: str
    version: int | None = None


class Story(msgspec.Struct, frozen=True, kw_only=True, tag="story"):
    """A line per event."""

    lines: tuple[str, ...]


class VersionState(StrEnum):
    """Whether a version can be read."""

    AVAILABLE = "available"
    UNAVAILABLE = "unavailable"
    RETIRED = "retired"
