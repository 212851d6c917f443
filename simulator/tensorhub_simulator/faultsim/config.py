"""What one seed's world is like."""

from dataclasses import dataclass, replace
from typing import Final, TypeVar

from tensorhub_agent.core.config import CoreConfig
from tensorhub_planner.primitives.limits import PlanLimits as PlannerLimits
from tensorhub_planner.primitives.limits import Rates
from tensorhub_simulator.engine.streams import Streams
from tensorhub_simulator.faultsim.models.layouts import Cuttings, quantised_cuttings, unlike_cuttings

STRIPED = PlannerLimits(network=Rates(ingest_bps=1e6, source_bps=10.0, setup_s=0.0))
"""With these the planner reads even a few bytes from all the sources that there are."""

T = TypeVar("T")

MODELS = ("policy", "critic")

CALM: Final = 0.1
"""The share of the seeds without any fault."""
ONE_RACK: Final = 0.33
UNLIKE = 0.4
"""In so many worlds replicas are cut otherwise than others."""


QUANTISED: Final = 0.05
"""And in so many rollouts read fp8."""
MATES = 0.7
"""In so many of those where these stand in another site than the trainers they are cut alike, and share out."""


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


def draw_config(seed: int, *, calm: bool) -> WorldConfig:
    """Draw a seed's configuration, each field from a stream of its own; `calm` without any fault."""
    streams = Streams(seed)

    def drawn(field: str, *among: T) -> T:
        return streams.of("config", field).choice(among)

    def happens(field: str, odds: float) -> bool:
        return streams.of("config", field).random() < odds

    calm = happens("calm", CALM) or calm
    digests = happens("digests", 0.75)
    sites = happens("sites", 0.3)
    trainers = 2 if happens("trainers", 0.2) else 1
    rollouts = drawn("rollouts", 1, 2, 3, 3)
    config = WorldConfig(
        beside=None,
        digests=digests,
        models=MODELS if happens("models", 0.2) else MODELS[:1],
        agents=drawn("agents", 2, 3, 4, 5),
        trainers=trainers,
        rollouts=rollouts,
        shards=drawn("shards", 1, 1, 2, 2, 3),
        pieces=drawn("pieces", 1, 2, 3, 4, 6, 12),
        registries=drawn("registries", 1, 2, 2),
        loss_odds=0.0 if calm else drawn("loss_odds", 0.0, 0.0, 0.01, 0.05),
        late_odds=0.0 if calm else drawn("late_odds", 0.0, 0.0, 0.02),
        window_s=drawn("window_s", 0.5, 2.0, 120.0),
        append_attempt_s=drawn("append_attempt_s", 0.3, 0.6),
        # Without digests all hangs on leases, so readers are slow enough to lose them.
        slowness=drawn("slowness", 0.5, 0.5, 5.0, 30.0) if digests else drawn("slowness", 5.0, 30.0),
        lost_after_s=drawn("lost_after_s", 1.5, 2.5),
        troubles=0 if calm else drawn("troubles", *range(1, 11)),
        trouble_s=drawn("trouble_s", 6.0, 9.0, 12.0),
        slow_agents=0.0 if calm else drawn("slow_agents", 0.0, 0.3),
        late_agents=happens("late_agents", 0.25),
        upgrade=happens("upgrade", 0.2),
        skewed=not calm and happens("skewed", 0.5),
        limits=CoreConfig(
            digests=digests,
            window_bytes=drawn("window_bytes", 8, 16, 64, 1024),
            stall_s=drawn("stall_s", 0.5, 2.0),
            refill_drain_s=drawn("refill_drain_s", 0.0, 0.0, 0.3),
            cache_bytes=100_000,
        ),
        planner=drawn("planner", PlannerLimits(), STRIPED, STRIPED),
        retain=drawn("retain", 0, 1, 1, 2) if digests else 0,
        rewinds=drawn("rewinds", 0.0, 0.0, 0.1),
        spot=drawn("spot", 0.0, 0.5),
        sites=sites,
        one_rack=happens("one_rack", ONE_RACK),
        deleted_after_s=0.0,
        cuttings=_cuttings(streams, trainers, rollouts, sites=sites),
    )
    if not happens("beside", 0.15):
        return config
    beside = replace(config, cuttings=None, models=MODELS[:1], trainers=1, rollouts=1, upgrade=False)
    return replace(config, beside=replace(beside, deleted_after_s=drawn("deleted_after_s", 0.0, 0.0, 2.0, 4.0)))


def _cuttings(streams: Streams, trainers: int, rollouts: int, *, sites: bool) -> Cuttings | None:
    """Draw how the replicas are cut; None: all alike."""
    fp8, unlike = streams.of("config", "fp8"), streams.of("config", "cuttings")
    if fp8.random() < QUANTISED:
        return quantised_cuttings(fp8, trainers, rollouts)
    if unlike.random() >= UNLIKE:
        return None
    cuttings = unlike_cuttings(unlike, trainers, rollouts)
    if sites and unlike.random() < MATES:
        return Cuttings(cuttings.trainers, cuttings.rollouts[:1] * rollouts)
    return cuttings
