"""RLBoost's adaptive seeding (NSDI'26, Algorithm 1): how long the trainer's own engines generate in a step. Pure.

After each step, with a gain eta:

    T_seed += (t_train_wait - t_remote_wait) / eta        and never below 0
    N_prem  = ceil((t_remote * n_prem + T_seed * N_resv) / t_train)      with the new T_seed

Where the number of instances did not change within the step, M[n] = T_seed. Before the next step, with n instances,
T_seed = M[n] where that is known. At first T_seed = T_init and N_prem = N_resv. Instances count in units of the local
engines' GPUs.
"""

import math
from typing import Final

import msgspec

from tensorhub_common.protocol.rollout.questions import SeedingState

_ROUNDING: Final = 1e-9
"""What is a whole number but for rounding is not one more."""


class SeedingSettings(msgspec.Struct, frozen=True):
    """The settings of seeding; times in seconds."""

    gain: float = 3.0
    """Eta: the higher, the slower T_seed follows."""
    initial_s: float = 150.0
    """T_init."""
    remembered_max: int = 1024
    """Limit of the counts of instances that are remembered, the latest."""


class StepTimes(msgspec.Struct, frozen=True):
    """What was measured of one step, which ends at the trainer's publish; times in seconds.

    `train_wait_s`: how long the trainer was blocked in `batches()`. `train_s`: the step less waits and seeding.
    `remote_s`: from the step's beginning to the last remote token. `remote_wait_s`: from there to the step's end.
    """

    train_wait_s: float
    train_s: float
    remote_s: float
    remote_wait_s: float
    remote_units: float
    """n_prem: remote instances, in units of the local engines' GPUs."""
    is_steady: bool
    """Whether no instance came or went within the step."""


def first(settings: SeedingSettings, reserved_units: int) -> SeedingState:
    """Return the state before the first step. `reserved_units`: the trainer's own instances."""
    return SeedingState(settings.initial_s, reserved_units)


def after_step(
    state: SeedingState, times: StepTimes, settings: SeedingSettings, reserved_units: int, next_units: float
) -> SeedingState:
    """Return the state for the next step, which begins with `next_units` of remote instances; `version` stays."""
    seed_s = max(0.0, state.seed_s + (times.train_wait_s - times.remote_wait_s) / settings.gain)
    remote_max = state.remote_max
    if times.train_s > 0:
        wanted = (times.remote_s * times.remote_units + seed_s * reserved_units) / times.train_s
        remote_max = math.ceil(wanted - _ROUNDING)
    remembered = dict(state.remembered)
    if times.is_steady:
        remembered.pop(times.remote_units, None)
        remembered[times.remote_units] = seed_s
        if len(remembered) > settings.remembered_max:
            del remembered[next(iter(remembered))]
    return SeedingState(remembered.get(next_units, seed_s), remote_max, tuple(remembered.items()), state.version)
