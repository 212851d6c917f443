"""StreamRL's allocation (arXiv 2504.15930, section 4.4): how many units generate, and how many train. Pure.

A unit is what comes and goes as one, such as a machine. `generation` and `training` say how long a step takes with a
number of units, in seconds; both fall, or stay, as units come. With streams, and one step of asynchrony, the slower
side decides how long a step takes.
"""

from collections.abc import Callable

import msgspec

SecondsWith = Callable[[int], float]
"""How long a step takes, by the number of units."""


class Allocation(msgspec.Struct, frozen=True):
    """How many units generate and how many train, and how long a step takes then, in seconds."""

    generation: int
    training: int
    seconds: float


def one_site(units: int, generation: SecondsWith, training: SecondsWith) -> Allocation:
    """Return the division of at most `units` of one site with the shortest step; of equal ones, the smallest.

    Raises `ValueError` with fewer than two units: each side needs one.
    """
    if units <= 1:
        raise ValueError(f"{units} unit(s) can't both generate and train: two are needed")
    found = min((_at(x, units - x, generation, training) for x in range(1, units)), key=lambda each: each.seconds)
    # Units that make nothing faster are left out.
    return _at(
        _fewest(found.generation, found.seconds, generation),
        _fewest(found.training, found.seconds, training),
        generation,
        training,
    )


def two_sites(generating: int, trainable: int, generation: SecondsWith, training: SecondsWith) -> Allocation:
    """Return what is used of two sites with a budget each: the slower side keeps all, the other matches it.

    The faster side gets the number of units that brings its time nearest to the slower side's; of equal ones, fewer.
    """
    slow_s, other_s = generation(generating), training(trainable)
    if slow_s < other_s:
        return _at(_nearest(generating, other_s, generation), trainable, generation, training)
    return _at(generating, _nearest(trainable, slow_s, training), generation, training)


def wants_one_more(generation_s: float, training_s: float, with_one_more_s: float) -> bool:
    """Tell whether generation gets one more unit: the gap to training has reached what that unit would win (delta)."""
    won_s = generation_s - with_one_more_s
    return won_s > 0 and generation_s - training_s >= won_s


def wants_one_less(generation_s: float, training_s: float, with_one_less_s: float) -> bool:
    """Tell whether generation gives one unit back: with one less it is still no slower than training.

    The paper grows generation alone. What gives back here never takes again at once, nor the other way round.
    """
    return with_one_less_s <= training_s and with_one_less_s >= generation_s


def _at(generating: int, trainable: int, generation: SecondsWith, training: SecondsWith) -> Allocation:
    return Allocation(generating, trainable, max(generation(generating), training(trainable)))


def _fewest(units: int, within_s: float, seconds: SecondsWith) -> int:
    """Return the fewest units with which a step takes no longer than `within_s`."""
    return next(count for count in range(1, units + 1) if seconds(count) <= within_s)


def _nearest(units: int, to_s: float, seconds: SecondsWith) -> int:
    return min(range(1, units + 1), key=lambda count: (abs(seconds(count) - to_s), count))
