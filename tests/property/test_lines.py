"""Lines of any speed, with pauses at any time: packed pieces come over slow ones, a pause makes none slow for long."""

import heapq
from dataclasses import dataclass, field
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensorhub_agent.rates.encoding_choice import (
    LOOK_AFTER_MAX,
    PACK_GAIN,
    PACK_RATE,
    RATE_GUESSED,
    RATIO_GUESSED,
    SLOW_BATCHES_MIN,
    LineEstimate,
    takes_patches,
)
from tensorhub_agent.rates.source_rate import BATCHES_MIN

MB: Final = 1_000_000
BATCH: Final = 8 * MB
SLOWEST_FAST: Final = 3 * PACK_RATE
FASTEST_SLOW: Final = 0.6 * PACK_GAIN * PACK_RATE

Pause = tuple[float, float]
"""From when nothing gets on, and for how long."""


@dataclass
class Way:
    """A source that packs one batch after the other, and a line on which they come in the order of their readiness."""

    rate: float
    pauses: tuple[Pause, ...] = ()
    packed_at: float = 0.0
    free_at: float = 0.0

    def ready_at(self, now: float, *, packed: bool) -> float:
        if not packed:
            return now
        self.packed_at = max(now, self.packed_at) + BATCH / PACK_RATE
        return self.packed_at

    def comes_at(self, ready_at: float, nbytes: float) -> float:
        at = max(ready_at, self.free_at)
        end = at + nbytes / self.rate
        for start, lasts in sorted(self.pauses):
            if at < start + lasts and start < end:
                end += start + lasts - max(start, at)
        self.free_at = end
        return end


@dataclass
class Read:
    """What became of a read: which of its batches came packed, and when each was asked for."""

    packed: list[bool] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    ended: float = 0.0


def read(line: LineEstimate, way: Way, batches: int, depth: int) -> Read:
    done, now = Read(), 0.0
    flying: list[tuple[float, int, bool]] = []
    for number in range(batches):
        if len(flying) == depth:
            now = came(line, way, flying)
        packed = line.prefers_compressed and not line.probes_plain()
        done.packed.append(packed)
        done.asked.append(now)
        if not packed:
            line.asked(now)
        heapq.heappush(flying, (way.ready_at(now, packed=packed), number, packed))
    while flying:
        now = came(line, way, flying)
    done.ended = now
    return done


def came(line: LineEstimate, way: Way, flying: list[tuple[float, int, bool]]) -> float:
    ready_at, _, packed = heapq.heappop(flying)
    nbytes = int(RATIO_GUESSED * BATCH) if packed else BATCH
    now = way.comes_at(ready_at, nbytes)
    if packed:
        line.packed(BATCH, nbytes)
    else:
        line.came(BATCH, now)
    return now


pauses = st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 2)), max_size=4).map(tuple)


@given(rate=st.floats(SLOWEST_FAST, 20e9), stops=pauses, depth=st.integers(BATCHES_MIN, 8))
@example(rate=3e9, stops=((0.0, 0.3),), depth=2)
@example(rate=3e9, stops=((0.05, 0.3), (0.36, 0.3)), depth=2)
def test_a_fast_line_that_paused_is_taken_for_fast_again(rate: float, stops: tuple[Pause, ...], depth: int) -> None:
    """Only so many batches come packed after the last pause as it takes until the line is looked at again."""
    batches = 600
    it = read(LineEstimate(), Way(rate, stops), batches, depth)
    over = max((start + lasts for start, lasts in stops), default=0.0)
    after = [packed for packed, at in zip(it.packed, it.asked, strict=True) if at > over]
    assert sum(after) <= LOOK_AFTER_MAX + depth
    assert not any(after[LOOK_AFTER_MAX + 2 * depth :])


@pytest.mark.parametrize("nbytes", [512 << 20, 1 << 30])
@pytest.mark.parametrize("at_s", [0.0, 0.01, 0.1])
def test_one_pause_makes_nothing_come_packed(nbytes: int, at_s: float) -> None:
    """Of 0.3 s: that of a read of 512 MiB took 2.6 s instead of 0.7 s, since every piece after it came packed."""
    it = read(LineEstimate(), Way(800 * MB, ((at_s, 0.3),)), nbytes // BATCH, depth=2)
    assert not any(it.packed)
    assert it.ended == pytest.approx(0.3 + nbytes // BATCH * BATCH / (800 * MB))


@given(rate=st.floats(1 * MB, FASTEST_SLOW), depth=st.integers(BATCHES_MIN, 8))
def test_over_a_slow_line_nearly_all_comes_packed(rate: float, depth: int) -> None:
    it = read(LineEstimate(), Way(rate), 400, depth)
    first = it.packed.index(True)
    assert first <= SLOW_BATCHES_MIN + depth
    assert it.packed[first:].count(False) <= 0.05 * 400
    assert it.ended < 400 * BATCH / rate


@given(
    slow=st.floats(1 * MB, FASTEST_SLOW),
    fast=st.floats(SLOWEST_FAST, 20e9),
    turns=st.integers(1, 200),
    depth=st.integers(BATCHES_MIN, 4),
)
def test_a_line_that_becomes_fast_is_found_out(slow: float, fast: float, turns: int, depth: int) -> None:
    line = LineEstimate()
    read(line, Way(slow), turns, depth)
    it = read(line, Way(fast), 200, depth)
    assert not any(it.packed[LOOK_AFTER_MAX + 2 * depth :])


@given(rate=st.floats(1 * MB, 20e9), nbytes=st.integers(MB, 100 * MB), part=st.floats(0.0, 1.0))
def test_patches_that_a_usual_line_takes_too_are_no_reason_to_look_again(rate: float, nbytes: int, part: float) -> None:
    line = LineEstimate()
    line.asked(0.0)
    line.came(int(rate), 1.0)
    slowly = line.patches_for_slowness(nbytes, int(part * nbytes))
    if takes_patches(nbytes, int(part * nbytes), RATE_GUESSED):
        assert not slowly or rate > RATE_GUESSED
    if slowly:
        assert takes_patches(nbytes, int(part * nbytes), rate)
