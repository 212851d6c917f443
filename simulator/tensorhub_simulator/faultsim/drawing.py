"""What one seed's world is like: each field of its configuration is drawn from a stream of its own."""

from dataclasses import replace
from typing import Final, TypeVar

from tensorhub_planner.primitives.limits import PlanLimits as PlannerLimits
from tensorhub_simulator.engine.streams import Streams
from tensorhub_simulator.faultsim.config import SCALED, STRIPED, Crowd, Cuttings, WorldConfig
from tensorhub_simulator.faultsim.models.layouts import quantised_cuttings, unlike_cuttings

T = TypeVar("T")

MODELS: Final = ("policy", "critic")
CALM: Final = 0.1
"""The share of the seeds without any fault."""
ONE_RACK: Final = 0.33
UNLIKE: Final = 0.4
"""The share of the worlds with replicas that are cut unlike others."""
QUANTISED: Final = 0.05
"""The share of the worlds in which rollouts read fp8."""
MATES: Final = 0.7
"""The share of the worlds with two sites in which all rollouts are cut alike, so that they share what crosses."""

CROWD_SEEDS: Final = 25
"""One seed of this many is a crowd."""
CROWD_READERS: Final = (100, 100, 200, 400)
CROWD_CHECK_STEPS: Final = 200
CROWD_LOST_AFTER_S: Final = 100.0


def config_of(seed: int, *, calm: bool) -> WorldConfig:
    """Return the configuration of a seed."""
    config = draw_config(seed, calm=calm)
    return draw_crowd(Streams(seed), config) if is_crowd(seed) else config


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
        limits=replace(
            SCALED,
            digests=digests,
            transfer=replace(
                SCALED.transfer,
                window_bytes=drawn("window_bytes", 8, 16, 64, 1024),
                stall_s=drawn("stall_s", 0.5, 2.0),
            ),
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


def is_crowd(seed: int) -> bool:
    """Tell whether a seed's world is a crowd."""
    return seed % CROWD_SEEDS == 0


def draw_crowd(streams: Streams, setting: WorldConfig, readers: int | None = None) -> WorldConfig:
    """Make a crowd of what was drawn for a seed."""

    def drawn(field: str, *among: T) -> T:
        return streams.of("crowd", field).choice(among)

    return replace(
        setting,
        beside=None,
        digests=True,
        models=("policy",),
        agents=drawn("agents", 2, 3, 5),
        trainers=1,
        rollouts=readers or drawn("readers", *CROWD_READERS),
        shards=1,
        pieces=drawn("pieces", 1, 2, 4),
        registries=1,
        loss_odds=0.0,
        late_odds=0.0,
        window_s=120.0,
        slowness=drawn("slowness", 0.5, 5.0),
        lost_after_s=CROWD_LOST_AFTER_S,
        troubles=0,
        trouble_s=drawn("trouble_s", 1.0, 3.0),
        slow_agents=0.0,
        late_agents=False,
        skewed=False,
        upgrade=False,
        limits=replace(SCALED, transfer=replace(SCALED.transfer, window_bytes=64, stall_s=0.5)),
        planner=drawn("planner", PlannerLimits(), STRIPED),
        retain=0,
        rewinds=0.0,
        spot=0.0,
        sites=False,
        one_rack=False,
        deleted_after_s=0.0,
        cuttings=None,
        crowd=Crowd(drawn("stop_s", 0.5, 4.0, 8.0), drawn("stop_at", 0.0, 0.0, 0.2)),
        check_steps=CROWD_CHECK_STEPS,
    )
