"""How many instances beside the trainer's own are worth having. Pure.

Open requests need as many instances as serve them at the batch size from which an engine is not faster (`plateau`). How
many that is changes from step to step: while a trainer trains, it may be none. So the wish follows a higher need at
once, and a lower one only after `window_s` in which no more were needed. RLBoost's N_prem (NSDI'26, Algorithm 1), where
the trainer seeds, is a cap: more would wait for the trainer. While anything is open, one is wished for.
"""

import math

import msgspec


class ScaleLimits(msgspec.Struct, frozen=True):
    """The settings of scale; times in seconds."""

    window_s: float = 120.0
    """So long no more may have been needed before fewer are wished for: longer than most steps of a trainer."""
    peaks_max: int = 64
    """Limit of the earlier needs that are remembered; of more, the lowest count as the next higher one."""


class Peak(msgspec.Struct, frozen=True):
    """How many instances were needed at a time, and no more since."""

    at: float
    instances: int


class ScaleState(msgspec.Struct, frozen=True):
    """The needs of the window: later ones are lower."""

    peaks: tuple[Peak, ...] = ()


class ScaleWish(msgspec.Struct, frozen=True):
    """How many instances are wished for, and why."""

    instances: int
    reason: str


def wish(
    state: ScaleState,
    open_: int,
    batch: int,
    cap: int | None,
    limits: ScaleLimits,
    now: float,
    *,
    held_back: int = 0,
) -> tuple[ScaleWish, ScaleState]:
    """Return what is wished for now, and the state after it.

    `open_`: how many open requests an instance could run. `batch`: how many of them one instance serves at its best, at
    least 1. `cap`: N_prem; None: it is not known. `held_back`: how many more are open and may not begin, for want of
    room for what they make: further instances would have none of them.
    """
    least = 1 if open_ or held_back else 0
    needed = max(least, math.ceil(open_ / batch))
    higher = [each for each in state.peaks if each.instances > needed and now - each.at < limits.window_s]
    peaks = (*higher, Peak(now, needed))
    if len(peaks) > limits.peaks_max:
        # The two latest become one: as late as the later, as high as the higher.
        peaks = (*peaks[:-2], Peak(now, peaks[-2].instances))
    highest = peaks[0].instances
    if cap is not None and cap < highest:
        found = ScaleWish(max(cap, least), f"the trainer keeps up with {cap}; {highest} would have requests")
    elif highest > needed:
        found = ScaleWish(highest, f"{highest} had requests within {limits.window_s:g} s; {needed} have now")
    else:
        some = f"{open_} requests are open" + (f", and {held_back} wait for room in payloads" if held_back else "")
        found = ScaleWish(needed, f"{some}; an instance serves {batch} at its best")
    return found, ScaleState(peaks)
