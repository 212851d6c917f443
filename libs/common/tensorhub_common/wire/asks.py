"""Questions by NATS request and reply, and the beat. Nothing here changes the catalog.

`ask.<what>` in a job is answered by the registry, except `ask.plan`, which is the planner's. A reply is one JSON
object: the answer, or an `Error`.
"""

from enum import StrEnum
from typing import Final

import msgspec

from tensorhub_common.wire.events.any_event import AnyEvent
from tensorhub_common.wire.transfer import Transport

OUTCOMES_KEPT_MAX: Final = 65_536
"""The registry answers `ask.outcome` for so many of the last commands."""

STORY_LINES_MAX: Final = 2_000
"""A story is cut to its last lines."""


class Error(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
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


class JobOpened(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """The job's stream stands."""

    job: str


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


HEALTH_JOBS_MAX: Final = 1_000
"""An answer about the whole hub names so many jobs at most; `Health.ailing` counts all."""


class JobState(StrEnum):
    """Whether a registry or a planner goes on with a job."""

    WELL = "well"
    """It has folded the log to its end, or is about to."""
    WAITING = "waiting"
    """The log can't be read or written just now. Nothing is wrong with the job, and it goes on by itself."""
    SET_ASIDE = "set-aside"
    """It can't go on from what stands in the log. The others go on; this one is tried again at `again_at`."""


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
    """When a job that was set aside is tried again, in seconds since the epoch; 0: it is not set aside."""


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


SERVED_MAX: Final = 128
"""A beat names so many readers of each transport at most; of the others it tells how many there are."""


class Served(msgspec.Struct, frozen=True, array_like=True):
    """A shard that reads from an agent, and how many bytes it was planned to read there.

    `decided` is the place in the job's log where its round was decided for what it reads: when the log says after that
    that the read is over, or decides anew, then this word is over too, however late it is heard.
    """

    job: str
    model: str
    replica: str
    shard: int
    decided: int
    nbytes: int


class Serving(msgspec.Struct, frozen=True, array_like=True):
    """How many shards read from an agent over a transport, and how many bytes these were planned to read there."""

    transport: Transport
    readers: int
    nbytes: int
    served: tuple[Served, ...] = ()
    """Some of them by name; an agent of an earlier release names none."""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """An agent is alive. Sent on `beat.<agent>`, for all jobs at once."""

    agent: str
    incarnation: int
    serving: tuple[Serving, ...] = ()
    """Who reads from it just now; a transport without readers is left out."""
