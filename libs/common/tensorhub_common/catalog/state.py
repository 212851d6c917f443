"""What the catalog knows. Plain data: the handlers beside this file change it, `check` says what always holds.

Nothing here may depend on anything but the commands folded so far, in their order, and JetStream's time of each: two
folders of one log hold equal catalogs at equal sequence numbers.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from tensorhub_common.catalog.transitions import AgentState, RoundState, ShardState
from tensorhub_common.protocol.log.commands import VersionRequest
from tensorhub_common.protocol.queries import VersionState

VERSIONS_KEPT_MAX: Final = 64
"""Limit of a model's unavailable versions that are remembered; beyond it the oldest is retired."""

REPLICAS_MAX: Final = 4096
"""Limit of a model's replicas."""

MODELS_MAX: Final = 1024
"""Limit of a job's models."""

AGENTS_MAX: Final = 8192
"""Limit of the agents that a job knows, live and lost."""

LANES_MAX: Final = 1024
"""Limit of an agent's lanes; each costs the catalog one remembered outcome."""

HUB_LANES_MAX: Final = 16
"""Limit of the hub's own lanes that are remembered; all registries use one."""

ATTEMPTS_MAX: Final = 64
"""A round is planned again at most so often before it fails."""


SUPERSEDED_MAX: Final = 4
"""A round takes up a newer version so often instead of the one that it was decided for; then it reads to the end, so
that a trainer which publishes faster than this replica reads can't starve it."""

SHUN_S: Final = 30.0
"""For so long after an agent has failed to hold a copy of a version, no copy of that is placed on it."""


LOST_KEPT_S: Final = 24 * 3600.0
"""A lost agent is remembered for so long, with its shards: one that comes back finds its versions by then."""

SPOT_KEPT_S: Final = 3600.0
"""The same for an agent that has no shards but those of spot replicas."""


@dataclass(slots=True)
class Shard:
    """One worker's part of a replica. `version` and `root` are what it holds while ready or draining."""

    index: int
    agent: str
    layout: str
    nbytes: int
    state: ShardState = ShardState.EMPTY
    version: int | None = None
    root: str | None = None
    leaving: bool = False
    """It is being unpublished, and held back because the replica is the last counting copy of a retained version."""
    aside: bool = False
    """Its agent has this part of a copy, and takes it back only when it starts anew: not filled, not served."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One shard's part in a publication that waits for its siblings."""

    version: int | None
    root: str


@dataclass(slots=True)
class Round:
    """One replicate or update of a whole replica. `number` is the sequence of the command that opened it."""

    number: int
    state: RoundState = RoundState.JOINING
    wants: dict[int, VersionRequest] = field(default_factory=dict)
    patient: dict[int, bool] = field(default_factory=dict)
    attempt: int = 0
    decided: int = 0
    """The number of the command that decided it last; 0 in a snapshot of a release that did not keep it."""
    version: int | None = None
    started: bool = False
    """It was started once: memory was overwritten, so "go on with what you hold" is no answer any more."""
    granted: set[int] = field(default_factory=set)
    filled: set[int] = field(default_factory=set)
    staged: dict[int, str | None] = field(default_factory=dict)
    """Shards that are filled beside what they hold, and swap when all are filled: the root, once it is filled."""
    supersede: bool = False
    """All of its shards have said that they know of superseding."""
    superseded: int = 0
    """How often a newer version was taken up instead."""
    began_with: int | None = None
    """What the replica held when the round was opened."""
    held: bool = False
    """It waits for another copy of what the replica holds now: all leases are granted, or all is filled beside it."""

    def leave(self, index: int) -> None:
        """Forget a shard's wish."""
        del self.wants[index]
        del self.patient[index]
        self.staged.pop(index, None)


@dataclass(slots=True)
class Replica:
    """A group of shards that together hold the model. `version` is what all of them hold ready, else None."""

    name: str
    shards: int
    spot: bool
    members: dict[int, Shard] = field(default_factory=dict)
    version: int | None = None
    offers: dict[int, Offer] = field(default_factory=dict)
    round: Round | None = None
    cache: int | None = None
    """A cache replica, placed by the fold: the retained version that it is for."""
    mapped: bool = False
    """It maps what a holder on its host has: it is neither a holder nor a source nor a copy."""

    def missing(self, present: Container[int]) -> tuple[int, ...]:
        """Name the shards that are not in `present`."""
        return tuple([index for index in range(self.shards) if index not in present])


@dataclass(slots=True)
class Version:
    """A published version. `roots` by `root_key`: what a shard of that place and layout must hold."""

    number: int
    time: float
    publisher: str
    roots: dict[str, str]
    state: VersionState = VersionState.AVAILABLE
    holders: int = 0
    gone: str = ""
    """Why the last holder left, while the version is unavailable."""
    kept: bool = False
    """It is retained, and a replica that may not vanish holds it."""
    shunned: dict[str, float] = field(default_factory=dict)
    """Agents that have failed to hold a copy of it, and when."""


@dataclass(frozen=True, slots=True)
class VersionHold:
    """What one holder holds of a model. `until`: JetStream's time at which it ends unless it is stated again."""

    term: int
    n: int
    versions: tuple[int, ...]
    until: float


@dataclass(slots=True)
class Model:
    """A model of the job. `waiting` names the replicas whose round waits for a decision, in their order."""

    name: str
    last: int | None = None
    versions: dict[int, Version] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    waiting: dict[str, None] = field(default_factory=dict)
    retain: int = 0
    """The number of last versions that are retained."""
    pins: dict[int, None] = field(default_factory=dict)
    holds: dict[str, VersionHold] = field(default_factory=dict)
    """By holder."""


@dataclass(slots=True)
class AgentRecord:
    """An agent as the log knows it; its shards by (model, replica, shard)."""

    name: str
    incarnation: int
    host: str
    site: str
    state: AgentState = AgentState.UNKNOWN
    shards: dict[tuple[str, str, int], None] = field(default_factory=dict)
    cache_bytes: int = 0
    """The bytes of copies of retained versions that it takes in at most."""
    cached_bytes: int = 0
    """The bytes of these that are taken."""
    draining: bool = False
    drained: bool = False
    rack: str = ""
    """Empty: none is known."""
    lost_at: float = 0.0
    """JetStream's time of its loss, while it is lost."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The last command of a lane and its outcome."""

    incarnation: int
    n: int
    seq: int
    outcome: str
    error: str | None
    message: str | None


@dataclass(slots=True)
class Catalog:
    """A whole job. `seq` is the last command folded."""

    job: str
    seq: int = 0
    time: float = 0.0
    term: int = 0
    agents: dict[str, AgentRecord] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    lanes: dict[str, Remembered] = field(default_factory=dict)
    quota_bytes: int = 0
    """The limit of bytes of all shards together; 0 means none."""
    tended: dict[str, None] = field(default_factory=dict)
    """Models of which something is retained, rewound or copied: what `retention.settle` looks at."""
    leaving: dict[str, None] = field(default_factory=dict)
    """Agents that are drained for maintenance."""
    deleted: int = 0
    """The command that deleted the job, after which none counts; 0: it goes on."""
    deleted_at: float = 0.0
    """JetStream's time of that."""
    level: int = 0
    """Which transitions count (`levels.py`)."""


def root_key(shards: int, shard: int, layout: str) -> str:
    """Name the place that a root belongs to: equal keys mean equal bytes at equal versions."""
    return f"{shards}.{shard}.{layout}"


def newest(model: Model) -> int | None:
    """Return the newest version that can be read now."""
    able = [number for number, version in model.versions.items() if version.state is VersionState.AVAILABLE]
    return max(able, default=None)


def known_root(model: Model, replica: Replica, shard: Shard, version: int) -> str | None:
    """Return the root that this shard must have at `version`, or None when no holder had its layout."""
    record = model.versions.get(version)
    return None if record is None else record.roots.get(root_key(replica.shards, shard.index, shard.layout))


def is_retired(model: Model, version: int | None) -> bool:
    """Tell whether the model was rewound below this version."""
    record = None if version is None else model.versions.get(version)
    return record is not None and record.state is VersionState.RETIRED


def holds(model: Model, replica: Replica, index: int, version: int) -> bool:
    """Tell whether the shard is ready at `version`."""
    shard = replica.members.get(index)
    return (
        shard is not None and shard.state is ShardState.READY and shard.version == version and version in model.versions
    )
