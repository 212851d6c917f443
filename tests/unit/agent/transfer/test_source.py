"""One source of a read: which pieces are with it, and until when it may go on as it does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_agent.primitives.deadlines import NEVER
from tensorhub_agent.primitives.ranges import total_count
from tensorhub_agent.rates.source_rate import SourceRate
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS as LIMITS
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_agent.transfer.timeouts import deadline_of
from tensorhub_common.protocol.plans import Share, SourceId
from tensorhub_common.protocol.ranges import Range

STALL_S = 5.0
MIB = 1024 * 1024


def source(*queue: Range, phase: SourcePhase = SourcePhase.OPEN, since: float = 10.0) -> Source:
    share = Share(source=SourceId("agent", 1, "trainer", 0), transport="ucxx", pieces=(), nbytes=0, why="")
    made = Source(1, share, phase, since)
    made.queue.extend(queue)
    return made


def half_filled(*there: Range, queue: tuple[Range, ...] = (), pieces: int = 20) -> Source:
    made = source(*queue)
    made.fills(pieces, there, 10.0)
    return made


def pieces(ranges: list[Range]) -> list[int]:
    return sorted(piece for first, count in ranges for piece in range(first, first + count))


# Time.


def test_a_source_that_is_opened_has_its_bound_and_one_that_is_closed_has_none() -> None:
    assert deadline_of(source(phase=SourcePhase.OPENING)) == 10.0 + LIMITS.open_s_max
    assert deadline_of(source(phase=SourcePhase.CLOSING)) == NEVER
    assert deadline_of(source(phase=SourcePhase.CLOSED)) == NEVER
    assert deadline_of(source()) == NEVER, "nothing is asked of it"


def test_a_source_that_is_asked_has_its_patience_and_for_its_word_the_whole() -> None:
    made = source()
    made.pace.record(1000 * MIB, 1.0)
    made.asked(7, ((0, 1),), MIB, 20.0)
    assert deadline_of(made) == 20.0 + LIMITS.stall_min_s
    made.confirming = True
    assert deadline_of(made) == 20.0 + STALL_S


def test_a_half_filled_source_may_be_silent_so_long_and_have_nothing_new_for_longer() -> None:
    made = half_filled()
    made.give([(0, 2)])
    assert deadline_of(made) == 10.0 + LIMITS.waiting_silent_s
    for second in range(11, 25):
        made.available([], float(second))
    assert deadline_of(made) == 10.0 + LIMITS.starved_times * STALL_S
    made.available([(5, 1)], 25.0)
    assert deadline_of(made) == 25.0 + LIMITS.waiting_silent_s


def test_a_half_filled_source_that_brings_something_is_not_judged_by_what_it_lacks() -> None:
    made = half_filled((0, 1))
    made.give([(0, 2)])
    assert deadline_of(made) == NEVER, "a piece of it is to be asked for first"
    ranges, nbytes = made.cut_batch([10] * 20, MIB)
    made.asked(7, ranges, nbytes, 12.0)
    assert deadline_of(made) == 12.0 + STALL_S
    made.available([], 14.0)
    assert deadline_of(made) == 12.0 + STALL_S, "that it lives says nothing of what is under way"


@pytest.mark.parametrize(
    ("mib_in_s", "mib", "limit_s"),
    [(1000, 1, LIMITS.stall_min_s), (5, 2, LIMITS.stall_times * 0.4), (1, 5000, STALL_S), (0, 1, STALL_S)],
)
def test_a_source_may_be_silent_for_some_times_what_is_in_flight_should_take(
    mib_in_s: int, mib: int, limit_s: float
) -> None:
    made = source()
    made.pace.record(mib_in_s * MIB, 1.0)
    made.asked(7, ((0, 1),), mib * MIB, 20.0)
    assert deadline_of(made) == pytest.approx(20.0 + limit_s)
    made.is_readmitted = True
    assert deadline_of(made) == 20.0 + STALL_S


# Pieces that are taken away.


@given(
    st.lists(st.booleans(), min_size=20, max_size=20), st.sets(st.integers(0, 19)), st.integers(0, 22), st.booleans()
)
def test_no_piece_is_lost_or_doubled_when_some_are_taken(
    marks: list[bool],
    mine: set[int],
    wanted: int,
    whole: bool,  # noqa: FBT001 (drawn)
) -> None:
    made = half_filled((0, 7), (13, 2))
    made.give([(piece, 1) for piece in sorted(mine)])
    able = mine if whole else {piece for piece in mine if marks[piece]}
    taken = made.take_back(wanted, None if whole else bytearray(marks))
    assert total_count(taken) == min(wanted, len(able))
    assert set(pieces(taken)) <= able
    left = [*made.queue, *made.awaiting_source]
    assert pieces([*taken, *left]) == sorted(mine)
    assert all(count > 0 for _, count in [*taken, *left])
    lacked = {piece for piece in mine if not (piece < 7 or piece in (13, 14))}
    assert set(pieces(made.awaiting_source)) <= lacked


# Batches.


def test_a_batch_ends_with_the_piece_that_fills_it() -> None:
    made = source((0, 4), (9, 3))
    sizes = [300_000] * 20
    ranges, nbytes = made.cut_batch(sizes, 2 * MIB)
    assert (ranges, nbytes) == (((0, 4),), 1_200_000)
    assert list(made.queue) == [(9, 3)]
    assert made.cut_batch(sizes, MIB) == (((9, 2),), 600_000)
    assert list(made.queue) == [(11, 1)]
    assert made.cut_batch(sizes, MIB) == (((11, 1),), 300_000)
    assert made.cut_batch(sizes, MIB) == ((), 0)


@given(st.lists(st.integers(0, MIB), min_size=20, max_size=20), st.integers(2, 4 * MIB))
def test_batches_bring_all_pieces_in_order_and_their_bytes(sizes: list[int], share_bytes: int) -> None:
    made, cut = source((8, 12), (0, 3)), []
    largest = made.pace.batch_bytes(share_bytes)
    while made.queue:
        ranges, nbytes = made.cut_batch(sizes, share_bytes)
        batch = [piece for first, count in ranges for piece in range(first, first + count)]
        assert nbytes == sum(sizes[piece] for piece in batch)
        assert nbytes - sizes[batch[-1]] < largest, "the piece before filled it already"
        assert nbytes >= largest or not made.queue
        cut += batch
    assert cut == [*range(8, 20), *range(3)]


# What comes.


def test_what_came_early_is_not_counted_again() -> None:
    made = source()
    made.asked(7, ((0, 1),), 100, 20.0)
    made.asked(8, ((1, 1),), 100, 20.0)
    made.progressed(130, 22.0)
    assert (made.early_bytes, made.last_progress_at, made.pace.rate) == (130, 22.0, 130 / 2.0)
    assert made.remaining_s(22.0) == pytest.approx(70 / 65.0)
    made.progressed(500, 23.0)
    assert made.early_bytes == 200
    made.progressed(1, 50.0)
    assert made.last_progress_at == 23.0, "there is nothing that could have come"
    assert made.answered(7, 24.0) == (((0, 1),), 100)
    assert made.early_bytes == 100
    made.answered(8, 25.0)
    assert (made.early_bytes, made.in_flight_bytes) == (0, 0)


def test_each_byte_makes_its_source_faster_once() -> None:
    """What was told as progress is not brought again by the answer, and the rest of the batch is."""
    made, pace = source(), SourceRate()
    made.asked(7, ((0, 1),), 100, 20.0)
    made.asked(8, ((1, 1),), 100, 20.0)
    made.progressed(130, 22.0)
    pace.record(130, 2.0)
    made.answered(7, 24.0)
    pace.record(0, 2.0)
    made.answered(8, 25.0)
    pace.record(70, 1.0)
    assert made.pace == pace


def test_what_counts_and_what_is_read_again_is_told() -> None:
    made = source((0, 2))
    made.asked(7, ((4, 3),), 30, 11.0)
    made.unconfirmed, made.unconfirmed_bytes = [(8, 1)], 10
    assert [pieces(list(place)) for place in made.places()] == [[0, 1], [], [], [8], [4, 5, 6]]
    assert made.confirmed() == [(8, 1)]
    assert (made.got_pieces, made.got_bytes, made.unconfirmed, made.unconfirmed_bytes) == (1, 10, [], 0)
    made.unconfirmed, made.unconfirmed_bytes, made.early_bytes = [(9, 2)], 20, 5
    assert pieces(made.give_up()) == [0, 1, 4, 5, 6, 9, 10]
    assert (made.retried, made.wasted_bytes) == (5, 50)
    assert (made.in_flight, made.unconfirmed, made.unconfirmed_bytes, made.early_bytes) == ({}, [], 0, 0)
    assert made.waiting == 0
