"""What one seed's world is like."""

import random
from dataclasses import dataclass, replace
from typing import Final

from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.leases.table import LeaseLimits
from tensorhub_agent.rates.source_rate import BatchLimits
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_planner.primitives.limits import PlanLimits as PlannerLimits
from tensorhub_planner.primitives.limits import Rates
from tensorhub_simulator.faultsim.models.layouts import Cuttings, quantised_cuttings, unlike_cuttings

SCALED: Final = CoreConfig(
    transfer=TransferLimits(
        batches=BatchLimits(local_bytes=16, ucxx_bytes=8, least_bytes=1),  # A read of a few pieces has several batches.
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

MODELS = ("policy", "critic")

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
    deleted_after_s: float
    """When somebody deletes the job; 0: nobody does."""
    cuttings: Cuttings | None = None
    """How each replica is cut; None: all alike."""


def draw_config(seed: int, *, calm: bool) -> WorldConfig:
    """Draw a seed's setting; `calm` without any fault."""
    rng = random.Random(seed * 7919 + 1)
    apart = random.Random(seed * 49979687 + 1)
    cut = random.Random(seed * 86028121 + 1)
    ruled = random.Random(seed * 104729 + 1)
    far = random.Random(seed * 15485863 + 1)
    calm = calm or rng.random() < 0.1  # noqa: PLR2004 (odds)
    digests = rng.random() < 0.75  # noqa: PLR2004 (odds)
    setting = WorldConfig(
        beside=None,
        digests=digests,
        models=MODELS[: 1 if apart.random() < 0.8 else 2],  # noqa: PLR2004 (odds)
        agents=rng.randint(2, 5),
        trainers=1 if rng.random() < 0.8 else 2,  # noqa: PLR2004 (odds)
        rollouts=rng.choice((1, 2, 3, 3)),
        shards=rng.choice((1, 1, 2, 2, 3)),
        pieces=rng.choice((1, 2, 3, 4, 6, 12)),
        registries=rng.choice((1, 2, 2)),
        loss_odds=0.0 if calm else rng.choice((0.0, 0.0, 0.01, 0.05)),
        late_odds=0.0 if calm else rng.choice((0.0, 0.0, 0.02)),
        window_s=rng.choice((0.5, 2.0, 120.0)),
        append_attempt_s=rng.choice((0.3, 0.6)),
        # Without digests all hangs on leases, so readers are slow enough to lose them.
        slowness=rng.choice((0.5, 0.5, 5.0, 30.0) if digests else (5.0, 30.0)),
        lost_after_s=rng.choice((1.5, 2.5)),
        troubles=0 if calm else rng.randint(1, 10),
        trouble_s=rng.choice((6.0, 9.0, 12.0)),
        slow_agents=0.0 if calm else rng.choice((0.0, 0.3)),
        late_agents=rng.random() < 0.25,  # noqa: PLR2004 (odds)
        upgrade=apart.random() < 0.2,  # noqa: PLR2004 (odds)
        skewed=not calm and rng.random() < 0.5,  # noqa: PLR2004 (odds)
        limits=replace(
            SCALED,
            digests=digests,
            transfer=replace(
                SCALED.transfer, window_bytes=rng.choice((8, 16, 64, 1024)), stall_s=rng.choice((0.5, 2.0))
            ),
            refill_drain_s=rng.choice((0.0, 0.0, 0.3)),
            cache_bytes=100_000,
        ),
        planner=rng.choice((PlannerLimits(), STRIPED, STRIPED)),
        retain=ruled.choice((0, 1, 1, 2)) if digests else 0,
        rewinds=ruled.choice((0.0, 0.0, 0.1)),
        spot=ruled.choice((0.0, 0.5)),
        sites=far.random() < 0.3,  # noqa: PLR2004 (odds)
        deleted_after_s=0.0,
    )
    if cut.random() < UNLIKE:
        cuttings = unlike_cuttings(cut, setting.trainers, setting.rollouts)
        if setting.sites and cut.random() < MATES:
            cuttings = Cuttings(cuttings.trainers, cuttings.rollouts[:1] * setting.rollouts)
        setting = replace(setting, cuttings=cuttings)
    fp8 = random.Random(seed * 217645199 + 1)
    if fp8.random() < QUANTISED:
        setting = replace(setting, cuttings=quantised_cuttings(fp8, setting.trainers, setting.rollouts))
    if apart.random() < 0.85:  # noqa: PLR2004 (odds)
        return setting
    beside = replace(setting, cuttings=None, models=MODELS[:1], trainers=1, rollouts=1, upgrade=False)
    return replace(setting, beside=replace(beside, deleted_after_s=apart.choice((0.0, 0.0, 2.0, 4.0))))
