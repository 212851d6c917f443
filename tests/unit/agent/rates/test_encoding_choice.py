"""Which way pieces come: patches and packed pieces where they are sooner there, on lines that are known."""

import pytest

from tensorhub_agent.rates.encoding_choice import (
    PACK_RATE,
    PATCH_RATE,
    RATE_GUESSED,
    SLOW_BATCHES_MIN,
    TOUCH_RATE,
    LineEstimate,
    awaits_patches,
    takes_patches,
)

MB = 1_000_000
MOST = PATCH_RATE * (1 / RATE_GUESSED - 1 / TOUCH_RATE)
"""Of a source that is not known patches are taken as long as applying them is as fast as a usual link."""


@pytest.mark.parametrize(
    ("share", "rate", "expected"),
    [
        (0.012, None, True),
        (0.012, 25 * MB, True),
        (0.012, 3000 * MB, True),
        (0.05, 3000 * MB, False),
        (0.001, 3000 * MB, True),
        # Each piece is copied and hashed once more, however little changed in it.
        (0.001, 10_000 * MB, False),
        (0.012, 40_000 * MB, False),
        (0.4, 25 * MB, True),
        (0.4, None, False),
        (1.0, 1 * MB, False),
        (MOST - 1e-7, None, True),
        (MOST + 1e-7, None, False),
    ],
)
def test_patches_are_taken_where_they_and_the_work_take_less_time(
    share: float,
    rate: float | None,
    expected: bool,  # noqa: FBT001
) -> None:
    assert takes_patches(100 * MB, int(share * 100 * MB), rate) is expected


@pytest.mark.parametrize(
    ("rate", "far", "expected"),
    [(25 * MB, False, True), (25 * MB, True, True), (3000 * MB, True, False), (None, True, True), (None, False, False)],
)
def test_patches_are_waited_for_where_that_takes_less_time(rate: float | None, far: bool, expected: bool) -> None:  # noqa: FBT001
    assert awaits_patches(rate, far=far) is expected


def line(rate: float, known: float | None = None) -> LineEstimate:
    """Return a line by which enough came in this read to know it; `known`: what earlier reads got."""
    seen = LineEstimate(known=known)
    for number in range(SLOW_BATCHES_MIN):
        assert not seen.prefers_compressed, "one slow batch, or what other reads got, is no reason"
        seen.asked(10.0 + number)
        seen.came(int(rate), 11.0 + number)
    return seen


@pytest.mark.parametrize(
    ("rate", "known", "expected"),
    [(25 * MB, None, True), (100 * MB, None, True), (0.95 * PACK_RATE, None, False), (25 * MB, 600 * MB, False)],
)
def test_packed_pieces_are_for_slow_lines_of_which_this_read_has_seen_enough(
    rate: float,
    known: float | None,
    expected: bool,  # noqa: FBT001
) -> None:
    """What comes packed does not measure a line: one that has become fast would stay slow for ever."""
    assert line(rate, known).prefers_compressed is expected


def test_what_other_reads_got_is_believed_until_this_one_knows() -> None:
    known = LineEstimate(known=25 * MB)
    known.asked(0.0)
    known.came(0, 1.0)
    assert (known.rate, known.best_rate, known.prefers_compressed) == (None, 25 * MB, False), "nothing has come"
    known.asked(1.0)
    known.came(10 * MB, 2.0)
    assert known.best_rate == pytest.approx(10 * MB)


def test_what_has_not_shrunk_is_not_packed_any_more() -> None:
    slow = line(25 * MB)
    slow.packed(100, 95)
    assert not slow.prefers_compressed
    slow.packed(1000, 300)
    assert slow.prefers_compressed


def test_what_comes_at_a_time_shares_the_line() -> None:
    """Four batches of 10 MB that were asked for together and came within a second: 40 MB/s, not 10."""
    known = LineEstimate()
    for _ in range(4):
        known.asked(0.0)
    for number in range(4):
        known.came(10 * MB, 0.25 * (number + 1))
    assert known.rate == pytest.approx(40 * MB)
