"""One source of a read: which pieces are with it, what counts of it, and how fast it is taken to be."""

from dataclasses import replace

import pytest
from tests.unit.agent.transfer.driver import share

from tensorhub_agent.transfer.balancing import fill_window
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_common.protocol.ranges import Range
from tensorhub_common.protocol.worker import EncodedBytes

PIECES = 12
NBYTES = [10] * PIECES


def source(*queue: Range, there: tuple[Range, ...] | None = None, partials: int = 0) -> Source:
    """Return a source that has these pieces waiting; with `there` it is half-filled, and says what it promises."""
    made = Source(1, share("a", transport="ucxx"), SourcePhase.OPEN, 10.0, partials=partials)
    if there is not None:
        made.fills(PIECES, there, 10.0, promises=True)
    made.give(queue)
    return made


def test_the_last_pieces_are_taken_and_the_others_wait_in_their_order() -> None:
    made = source((8, 4), (0, 4))
    assert (made.take_back(2, None), list(made.queue)) == ([(2, 2)], [(8, 4), (0, 2)])
    made = source((0, 3))
    assert (made.take_back(1, bytearray([1, 0, 1])), list(made.queue)) == ([(2, 1)], [(0, 2)])


def test_a_half_filled_source_has_shown_its_part_with_the_last_piece_that_was_awaited() -> None:
    made = source((0, 3), there=((0, 1),))
    for now, piece, shown_at in ((11.0, 1, None), (12.0, 9, None), (13.0, 2, 13.0), (14.0, 10, 13.0)):
        made.available([(piece, 1)], now)
        assert made.shown_at == shown_at


def test_what_was_not_promised_is_given_up_when_its_time_is_over() -> None:
    made = source((0, 3), there=())
    made.promises([(1, 1)])
    over = 20.0 + DEFAULT_LIMITS.unpromised_wait_s
    assert [made.give_up_unpromised(now) for now in (20.0, over - 0.1, over)] == [[], [], [(0, 1), (2, 1)]]
    assert made.awaiting_source == [(1, 1)]


def test_each_byte_makes_it_faster_once_and_what_has_come_is_not_left() -> None:
    made = source((2, 1))
    pace = replace(made.pace)
    for batch in (7, 8):
        made.asked(batch, ((batch - 7, 1),), 10, 20.0)
    for now, told, came, seconds in ((21.0, 1, 1, 1.0), (23.0, 12, 12, 2.0), (24.0, 500, 7, 1.0), (25.0, 1, 0, 0.0)):
        made.progressed(told, now)
        if came:
            pace.record(came, seconds)
        assert made.pace == pace
        silent_s = now - made.last_progress_at
        assert made.remaining_s(now) == pace.remaining_s(20 - made.early_bytes, silent_s)
        assert made.left_s(NBYTES, now) == pace.remaining_s(10 + 20 - made.early_bytes, silent_s)
    assert (made.early_bytes, made.last_progress_at) == (20, 24.0)
    for batch, left_bytes in ((7, 10), (8, 0)):
        made.answered(batch, 26.0)
        pace.record(0, 2.0 if left_bytes else 0.0)
        assert (made.pace, made.early_bytes, made.in_flight_bytes) == (pace, left_bytes, left_bytes)


def test_the_word_on_what_had_come_counts_that_alone() -> None:
    """Also of partials, of which the next ones may be asked for once these are proven."""
    made = source(partials=3)
    made.asked(7, ((0, 3),), 30, 20.0)
    made.answered(7, 21.0)
    made.unconfirmed, made.unconfirmed_bytes = [(0, 1), (3, 1)], 20
    made.check_early()
    made.unconfirmed, made.unconfirmed_bytes = [*made.unconfirmed, (1, 2)], 40
    assert made.confirmed() == [(0, 1), (3, 1)]
    assert (made.got_bytes, made.unconfirmed_bytes, made.partials_outstanding) == (20, 20, 2)
    assert made.confirmed() == [(1, 2)]
    assert (made.got_bytes, made.unconfirmed_bytes, made.partials_outstanding) == (40, 0, 0)


@pytest.mark.parametrize("head", [[(0, 3), (3, 2)], [(0, 1), (3, 3), (1, 2)]], ids=["all partials", "one of them"])
def test_partials_come_in_batches_of_their_own_and_values_are_not_kept_back_by_them(head: list[Range]) -> None:
    made, asked = source(*head, partials=3), list[tuple[Range, ...]]()
    for ranges, nbytes in fill_window(made, NBYTES, 1000, 1000, relayed=False):
        asked.append(ranges)
        made.asked(len(asked), ranges, nbytes, 20.0)
    assert asked == [(run,) for run in head[:2]], "the next partials come once these are confirmed"
    assert made.partials_outstanding == head[0][1]


def test_all_that_waits_for_folds_is_looked_at_once_however_many_shares_it_came_in() -> None:
    made = source()
    made.by_amax, made.unknown = bytearray(b"\x01" * PIECES), bytearray(b"\x01" * PIECES)
    for run in ((6, 2), (3, 1)):
        made.give([run])
    assert [made.take_new_awaiting_fold() for _ in range(2)] == [[(6, 2), (3, 1)], []]


def test_what_came_by_an_encoding_is_added_up_and_the_last_reason_stands() -> None:
    made = source()
    for nbytes, wire_bytes, why in ((10, 7, "slow"), (20, 3, "slower")):
        made.decoded([EncodedBytes(how="zstd", nbytes=nbytes, wire_bytes=wire_bytes, why=why)], 11.0)
    assert made.encoded == {"zstd": EncodedBytes(how="zstd", nbytes=30, wire_bytes=10, why="slower")}
