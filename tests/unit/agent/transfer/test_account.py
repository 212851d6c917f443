"""What a read tells of itself: what counted and what was in vain, and when things happened."""

from tests.unit.agent.transfer.driver import (
    ALL,
    PIECE_BYTES,
    PIECES,
    WRONG,
    planning,
    reading,
    running,
    share,
    source_id,
)

from tensorhub_agent.rates.link_rates import SAMPLE_BYTES_LEAST
from tensorhub_agent.rates.source_rate import BatchLimits
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_agent.transfer.transfer import TransferPhase


def test_without_digests_what_a_source_did_not_confirm_is_wasted_and_asked_for_again() -> None:
    driven, [number] = reading(verify=False)
    while driven.source(number).in_flight:
        driven.brings(number)
    assert driven.actions.confirm == [number]
    assert (driven.transfer.done_bytes(), driven.counts()) == (60, (0, 0, 0))
    driven.confirmed(number, holds=False)
    assert driven.source(number).lost == "its lease did not hold to the end"
    assert driven.closed(number).plan == (ALL, (source_id("a"),))
    assert (driven.transfer.done_bytes(), driven.counts()) == (0, (0, 60, PIECES))


def test_words_that_come_twice_or_too_late_change_nothing() -> None:
    driven, [number] = reading(transport="local")
    [batch, later] = driven.source(number).in_flight
    driven.brings(number)
    driven.done(number, driven.right[0], batch)
    driven.opened(number)
    driven.confirmed(number, holds=False)
    assert driven.lost(number).close == [number]
    driven.transfer.progressed(number, 5, driven.now)
    assert driven.source(number).early_bytes == 0
    assert driven.lost(number, "gone again").close == []
    driven.closed(number)
    driven.closed(number)
    driven.done(number, driven.right[1], later)
    assert driven.counts() == (10, 20, 2)
    assert driven.source(number).lost == "gone"


def test_what_waits_for_its_sources_word_is_told_as_come() -> None:
    limits = TransferLimits(batches=BatchLimits(memory_bytes=20))
    driven, [number] = running(share("a", *ALL), verify=False, limits=limits)
    for came, confirms in ((20, []), (40, []), (60, [number])):
        assert driven.brings(number).confirm == confirms
        assert driven.transfer.done_bytes() == came
    driven.confirmed(number, holds=True)
    source = driven.source(number)
    assert (driven.phase(), source.got_bytes, source.unconfirmed_bytes) == (TransferPhase.DONE, 60, 0)


def test_what_a_source_brought_in_vain_is_added_up() -> None:
    driven, [number] = reading(window_bytes=20)
    for batches in (1, 2):
        driven.done(number, WRONG)
        assert driven.counts() == (0, batches * PIECE_BYTES, batches)


def test_the_time_of_a_link_is_that_in_which_anything_is_under_way_on_it() -> None:
    driven, [number] = reading(share("a", (0, 2), link="wire"), pieces=2, sizes=[SAMPLE_BYTES_LEAST] * 2)
    assert len(driven.source(number).in_flight) == 2
    for _ in range(2):
        driven.brings(number, 1.0)
    [sample] = driven.transfer.pool.meters.take(10.0)
    assert (sample.nbytes, sample.seconds) == (2 * SAMPLE_BYTES_LEAST, 2.0)


def test_when_things_happened_is_kept() -> None:
    driven = planning(window_bytes=20)
    read = driven.transfer
    driven.now = 0.5
    [number] = driven.planned(share("a", *ALL))
    driven.now = 2.0
    driven.opened(number)
    assert (read.planned_at, read.leased_at) == (0.5, 2.0)
    driven.now = 3.0
    driven.start()
    for driven.now in (3.5, 4.0):
        driven.brings(number)
    assert (read.started, read.first_at, read.last_at) == (3.0, 3.5, 4.0)
    driven.is_gone(number)
    [other] = driven.planned(share("b", *ALL))
    assert read.planned_at == 0.5, "a plan in mid-read is not the one that the read began with"
    driven.opened(other)
    while driven.phase() is TransferPhase.RUNNING:
        driven.brings(other)
    assert read.ended == driven.now
