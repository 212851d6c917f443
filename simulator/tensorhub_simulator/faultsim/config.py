"""What one seed's world is like."""

from dataclasses import dataclass
from typing import Final

from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.leases.table import LeaseLimits
from tensorhub_agent.rates.source_rate import BatchLimits
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_common.layout.layout import Layout
from tensorhub_planner.primitives.limits import PlanLimits as PlannerLimits
from tensorhub_planner.primitives.limits import Rates

SCALED: Final = CoreConfig(
    transfer=TransferLimits(
        batches=BatchLimits(
            memory_bytes=16, wire_bytes=8, least_bytes=1
        ),  # A read of a few pieces has several batches.
        transports_max=2,  # Of a handful of sources some wait for others to leave.
        crosser_open_s_max=3.0,
        stall_min_s=0.3,
        waiting_silent_s=1.5,  # Three renewals of the modelled transport.
        crosser_silent_s=4.0,
        crosser_starved_s=6.0,
        far_bps_min=20,
        far_silent_s=4.0,
        unpromised_wait_s=0.5,
        slow_min_s=0.15,  # A read takes a few tenths of a second.
        switch_s=0.03,
        trial_s=0.05,
        trial_bytes=8,
        relayed_bytes=8,
        relayed_far_bytes=4,
        handoff_gain_s=0.03,
    ),
    leases=LeaseLimits(ticket_s=1.5, silence_s_max=2.5),  # A reader that is stopped for long has lost its lease.
    wish_s_max=3.0,  # A requested publication that not all shards have received ends within the world's time.
    read_finish_s=0.05,
    copy_read_s_max=3.0,
    copy_again_s=0.3,
)
"""An agent's limits in a world of a few bytes and seconds."""

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
    """This many of the last versions are retained, from early on."""
    rewinds: float
    """How likely a trainer is to go back, each time that it is told what to do."""
    spot: float
    """How likely each rollout replica is to be one that may vanish."""
    sites: bool
    """Whether the trainers stand in one site and all others in another one."""
    one_rack: bool
    """Whether all hosts name one rack."""
    deleted_after_s: float
    """When the job is deleted; 0: never."""
    cuttings: Cuttings | None = None
    """How each replica is cut; None: all alike."""
    crowd: Crowd | None = None
    check_steps: int = 1
    """The world is looked at every this many steps. Each look at a crowd costs as much as there are readers."""
