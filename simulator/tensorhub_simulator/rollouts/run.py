"""One seed: a job under faults, to its end."""

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tensorhub_common.protocol.rollout.entries import PolicyName
from tensorhub_common.protocol.rollout.messages import OnUpdate
from tensorhub_simulator.rollouts.faults import GROUPS, Faults
from tensorhub_simulator.rollouts.invariants import check
from tensorhub_simulator.rollouts.world import Chances, RolloutWorld

END_S: Final = 120.0
"""Within so much virtual time every job is over: nothing hangs."""
POLICIES: Final[Mapping[int, PolicyName]] = {0: "streamrl", 1: "rlboost", 3: "rlboost", 5: "rlboost"}
"""Which policy places, by a seed's place in `POLICIES_EVERY`; the default one in all others."""
POLICIES_EVERY: Final = 7
POISONED_EVERY: Final = 9
"""In each so many seeds one, the first group kills each engine that begins it."""
BOUNDED_EVERY: Final = 5
"""In one seed of this number, payloads have a limit."""
MAPPED_EVERY: Final = 4
"""In one seed of this number, the runners map what the trainer has, and so follow the newest version alone."""
MEMORIES_MAX: Final = 2
"""In half of these, the trainer has one memory, which they have to let go of before it is overwritten."""
AGED_EVERY: Final = 11
"""In one seed of this number, a response begins anew once a second version is published behind its oldest token."""
PINNED_EVERY: Final = 6
"""In one seed of this number, nearly all groups are for one version alone."""
HELD_EVERY: Final = 11
"""In the second half of so many seeds, the manager has the hub hold the versions that requests are for alone."""
RELEASED_S: Final = 40.0
"""So long after the last request has ended nothing is held any more."""
PAYLOAD_BYTES_MAX: Final = 5_000
"""Room for three groups at once, of six."""
MODES: Final[tuple[OnUpdate, ...]] = ("continue", "restart", "finish", "keep")


def run(seed: int) -> RolloutWorld:
    """Run a job to its end. Raises AssertionError where something does not hold."""
    poisoned = int(seed % POISONED_EVERY == 0)
    round_ = seed // len(MODES)
    memories = 1 + round_ // MAPPED_EVERY % MEMORIES_MAX if round_ % MAPPED_EVERY == 0 else 0
    world = RolloutWorld(
        seed,
        groups=GROUPS,
        poisoned=poisoned,
        on_update=MODES[seed % len(MODES)],
        age_max=None if seed % AGED_EVERY else 1,
        payload_bytes_max=0 if seed % BOUNDED_EVERY else PAYLOAD_BYTES_MAX,
        chances=_chances(seed),
        # Of each mode some.
        mapped_memories=memories,
        policy=POLICIES.get(seed % POLICIES_EVERY, "arrival"),
    )
    Faults(world, seed)
    world.run(lambda: world.is_over, END_S)
    world.run(lambda: not world.hub.hold.versions, RELEASED_S)
    check(world)
    return world


def _chances(seed: int) -> Chances:
    holds = seed % HELD_EVERY > HELD_EVERY // 2
    return Chances(holds=holds) if seed % PINNED_EVERY else Chances(pinned=0.8, holds=holds)


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that does not hold, and why."""

    seed: int
    why: str


def first_failure(seeds: Iterable[int]) -> Failure | None:
    """Return the first seed that fails; None where all hold."""
    for seed in seeds:
        try:
            run(seed)
        except Exception as why:  # noqa: BLE001 (a core that raises is a finding like any other)
            where = traceback.extract_tb(why.__traceback__)[-1]
            return Failure(seed, str(why) or f"{where.name}: {where.line}")
    return None
