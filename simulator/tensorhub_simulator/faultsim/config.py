"""What one seed's world is like."""

from dataclasses import dataclass

from tensorhub_agent.core.config import CoreConfig
from tensorhub_common.layout.layout import Layout
from tensorhub_planner.primitives.limits import PlanLimits as PlannerLimits
from tensorhub_planner.primitives.limits import Rates

STRIPED = PlannerLimits(network=Rates(ingest_bps=1e6, source_bps=10.0, setup_s=0.0))
"""With these the planner reads even a few bytes from all the sources that there are."""


Cutting = tuple[Layout, ...]
"""The layouts of a replica's shards."""


@dataclass(frozen=True, slots=True)
class Cuttings:
    """How the replicas of a world are cut, trainers without overlap; both by number."""

    trainers: tuple[Cutting, ...]
    rollouts: tuple[Cutting, ...]


@dataclass(frozen=True, slots=True)
class Crowd:
    """All replicas read one version at once, and its holder is stopped in the middle and woken."""

    stop_s: float
    stop_at: float
    """The holder is stopped when this part of the readers has the version."""


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """All that is drawn before the world begins."""

    beside: "WorldConfig | None"
    """Of another job of the same processes."""
    digests: bool
    models: tuple[str, ...]
    agents: int
    trainers: int
    rollouts: int
    shards: int
    pieces: int
    registries: int
    loss_odds: float
    late_odds: float
    window_s: float
    append_attempt_s: float
    slowness: float
    """How much slower than a message half a piece is copied."""
    lost_after_s: float
    troubles: int
    trouble_s: float
    slow_agents: float
    """How likely it is that an agent sends slowly all the time."""
    late_agents: bool
    skewed: bool
    """Whether the processes' clocks differ."""
    upgrade: bool
    """Whether registries and planner are upgraded, one by one."""
    limits: CoreConfig
    planner: PlannerLimits
    retain: int
    """So many of the last versions are retained, from early on."""
    rewinds: float
    """How likely a trainer is to go back, each time that it is told what to do."""
    spot: float
    """How likely each rollout replica is to be one that may vanish."""
    sites: bool
    """Whether the trainers stand in one site and all others in another one."""
    one_rack: bool
    """Whether all hosts name one rack."""
    deleted_after_s: float
    """When somebody deletes the job; 0: nobody does."""
    cuttings: Cuttings | None = None
    """How each replica is cut; None: all alike."""
    crowd: Crowd | None = None
    check_steps: int = 1
    """The world is looked at every so many steps. Each look at a crowd costs as much as there are readers."""
