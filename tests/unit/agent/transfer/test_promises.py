"""Readers of one site exchange what each brings over: whoever waits, waits for what is promised, and no more."""

import msgspec
import pytest
from tests.unit.agent.transfer.driver import LIST, PIECES, Driven, source_id

from tensorhub_agent.leases.lease import LeaseState
from tensorhub_agent.leases.table import LeaseTable, PromiseChange
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_agent.transfer.transfer import TransferPhase
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.plans import Plan, ReadPriority, Refusal, Share, SourceId
from tensorhub_common.protocol.ranges import Range

KEY = ShardKey("policy", "rollout-1", 0)
TURN = ReadPriority(10, 3)
MINE: tuple[Range, ...] = ((0, 2),)
ITS: tuple[Range, ...] = ((2, 4),)
RENEWED_S = 1.0


def ask(turn: ReadPriority, *, promises: bool) -> LeaseRequest:
    return LeaseRequest(
        job="j",
        model="policy",
        source=SourceId("agent-1", 1, "rollout-1", 0),
        version=7,
        root="root",
        reader=SourceId("agent-2", 1, "rollout-2", 0),
        turn=turn,
        promises=promises,
    )


@pytest.fixture
def table() -> LeaseTable:
    table = LeaseTable()
    table.begin_fill(KEY, 7, "root", TURN, 6)
    table.set_digests(KEY, bytes(6 * PIECE_DIGEST_BYTES))
    return table


@pytest.mark.parametrize("turn", [ReadPriority(10, 2), ReadPriority(10, 4), ReadPriority(9, 1)])
def test_who_counts_on_promises_may_have_any_turn(table: LeaseTable, turn: ReadPriority) -> None:
    granted = table.grant(ask(turn, promises=True), "one", "ticket", "here", 0.0)
    assert isinstance(granted, LeaseGrant)
    assert granted.filling
    assert granted.promises
    assert table.counts_on_promises(KEY)


def test_who_does_not_waits_for_earlier_turns_alone(table: LeaseTable) -> None:
    assert isinstance(table.grant(ask(ReadPriority(10, 2), promises=False), "one", "t-1", "here", 0.0), LeaseRefusal)
    granted = table.grant(ask(ReadPriority(10, 4), promises=False), "two", "t-2", "here", 0.0)
    assert isinstance(granted, LeaseGrant)
    assert not granted.promises
    assert not table.counts_on_promises(KEY)


def test_a_reader_hears_of_promises_and_of_their_end_once(table: LeaseTable) -> None:
    table.grant(ask(TURN, promises=True), "one", "ticket", "here", 0.0)
    table.promise(KEY, [(0, 1)], [])
    lease = table.redeem("ticket", 0.0)
    assert lease is not None
    assert lease.state is LeaseState.OPEN
    assert lease.promised() == ((0, 1),), "what was promised before it came"
    assert table.promise(KEY, [(0, 2)], [(5, 1)]) == PromiseChange(("one",), ((1, 1),), ())
    assert table.promise(KEY, [(0, 2)], [(5, 1)]) is None
    assert table.promise(KEY, [], []) is None, "what is loose for a moment is promised on"
    assert table.promise(KEY, [], [(1, 3)]) == PromiseChange(("one",), (), ((1, 1),))
    assert lease.promised() == ((0, 1),)


def test_others_hear_nothing_of_promises(table: LeaseTable) -> None:
    table.grant(ask(TURN, promises=True), "one", "t-1", "here", 0.0)
    table.grant(ask(ReadPriority(11, 1), promises=False), "two", "t-2", "here", 0.0)
    lease = table.redeem("t-2", 0.0)
    assert lease is not None
    news = table.promise(KEY, [(0, 2)], [])
    assert news is not None
    assert news.leases == ()
    assert lease.promised() == ()


# The reader.


def share(name: str, pieces: tuple[Range, ...], *, far: bool = False, streams: int = 1) -> Share:
    return Share(
        source=source_id(name),
        transport="ucxx",
        pieces=pieces,
        nbytes=0,
        why="",
        far=far,
        streams=streams,
        crosses=not far,
    )


def exchanging() -> tuple[Driven, int, int]:
    """Return a read that has begun, and its sources: one far away, and a mate that crosses the rest."""
    driven = Driven(transport="ucxx")
    driven.tick()
    driven.transfer.planned(Plan(version=3, shares=(share("far", MINE, far=True), share("mate", ITS)), why=""), 0.0)
    (far, _), (mate, _) = driven.take().open
    driven.opened(far)
    assert driven.phase() is TransferPhase.LEASED, "a mate may come later"
    driven.transfer.opened(mate, LIST, driven.now, (), promises=True)
    driven.transfer.start(driven.now)
    driven.take()
    return driven, far, mate


def keep_alive(driven: Driven, mate: int, seconds: float) -> None:
    """Let time pass in which the mate says that it lives."""
    end = driven.now + seconds
    while driven.now < end:
        driven.wait_exactly(min(RENEWED_S, end - driven.now))
        driven.transfer.available(mate, (), driven.now)


def test_what_is_promised_is_awaited() -> None:
    driven, far, mate = exchanging()
    driven.transfer.promised(mate, ITS)
    driven.brings(far)
    keep_alive(driven, mate, 2 * DEFAULT_LIMITS.unpromised_wait_s)
    assert driven.actions.plan is None
    assert driven.transfer.pool.awaiting_others() == [*ITS]
    assert driven.transfer.pool.committed() == []


def test_what_is_not_promised_is_planned_again_after_a_while() -> None:
    driven, far, mate = exchanging()
    driven.transfer.promised(mate, ((2, 1),))
    driven.brings(far)
    keep_alive(driven, mate, DEFAULT_LIMITS.unpromised_wait_s / 2)
    assert driven.actions.plan is None
    keep_alive(driven, mate, DEFAULT_LIMITS.unpromised_wait_s / 2 + RENEWED_S)
    assert list(driven.transfer.pool.site_peers.not_bringing) == [source_id("mate")]
    assert driven.transfer.pool.awaiting_others() == [(2, 1)], "what is promised stays"
    assert driven.transfer.plan_requests.count == 2


def test_what_is_retracted_is_planned_again_at_once() -> None:
    driven, _, mate = exchanging()
    driven.transfer.promised(mate, ITS)
    driven.transfer.retracted(mate, ((4, 9),), driven.now)
    assert driven.take().plan is None, "no such pieces"
    driven.transfer.retracted(mate, ((4, 2),), driven.now)
    actions = driven.take()
    assert actions.plan == (((4, 2),), ())
    assert list(driven.transfer.pool.site_peers.not_bringing) == [source_id("mate")]
    assert actions.close == [], "it is good for what it has"


def nobody_else(*, is_held: bool) -> Refusal:
    return Refusal(error="VersionUnavailable", reason="no source is left", is_held=is_held)


def alone_with_mate() -> tuple[Driven, int]:
    """Return a read whose far source has gone, and its mate, of which pieces were awaited in vain."""
    driven, far, mate = exchanging()
    driven.brings(far)
    driven.transfer.lost(far, "its drain is over", driven.now)
    driven.transfer.closed(far, driven.now)
    driven.take()
    keep_alive(driven, mate, DEFAULT_LIMITS.unpromised_wait_s / 2)
    keep_alive(driven, mate, DEFAULT_LIMITS.unpromised_wait_s / 2 + RENEWED_S)
    assert driven.transfer.plan_requests.waiting
    return driven, mate


def test_what_no_mate_has_or_promises_ends_the_read_where_the_log_counts_no_holder() -> None:
    """Two mates that lack the same pieces would else wait for each other until both calls end."""
    driven, _ = alone_with_mate()
    driven.transfer.planned(nobody_else(is_held=False), driven.now)
    assert driven.phase() is TransferPhase.FAILED
    assert driven.transfer.error is not None
    assert driven.transfer.error[0] == "VersionUnavailable"


def test_what_a_doubted_mate_has_or_promises_by_then_it_is_asked_for() -> None:
    driven, mate = alone_with_mate()
    driven.transfer.available(mate, ((2, 3),), driven.now)
    driven.transfer.promised(mate, ((5, 1),))
    driven.transfer.planned(nobody_else(is_held=False), driven.now)
    driven.take()
    assert driven.phase() is TransferPhase.RUNNING
    assert driven.transfer.pool.loose == []


def test_while_the_log_counts_a_holder_what_no_mate_has_is_asked_for_again() -> None:
    driven, mate = alone_with_mate()
    driven.transfer.planned(nobody_else(is_held=True), driven.now)
    assert driven.phase() is TransferPhase.RUNNING
    assert driven.transfer.pool.loose == [*ITS]
    count = driven.transfer.plan_requests.count
    keep_alive(driven, mate, RENEWED_S)
    assert driven.transfer.plan_requests.count == count + 1


def test_a_far_source_takes_nothing_over_from_a_mate() -> None:
    driven, far, mate = exchanging()
    driven.transfer.promised(mate, ITS)
    driven.brings(far)
    assert driven.tick().post == [], "it is idle, and the mate has brought nothing"
    driven.transfer.available(mate, ITS, driven.now)
    assert [number for number, _, _ in driven.take().post] == [mate]


def test_whoever_has_no_mate_left_brings_everything_over() -> None:
    driven, far, mate = exchanging()
    driven.brings(far)
    driven.transfer.lost(mate, "killed", driven.now)
    actions = driven.take()
    assert actions.close == [mate]
    assert [(number, ranges) for number, _, ranges in actions.post] == [(far, ITS)]


def test_what_somebody_nearby_has_does_not_cross_again() -> None:
    driven = Driven(transport="ucxx")
    driven.tick()
    shares = (share("far", MINE, far=True), share("dies", ((2, 2),)), share("lives", ((4, 2),)))
    driven.transfer.planned(Plan(version=3, shares=shares, why=""), 0.0)
    far, dies, lives = (number for number, _ in driven.take().open)
    driven.opened(far)
    for mate in (dies, lives):
        driven.transfer.opened(mate, LIST, driven.now, ((4, 1),) if mate == lives else (), promises=True)
    driven.transfer.start(driven.now)
    driven.take()
    driven.transfer.available(lives, ((2, 1),), driven.now)
    driven.take()
    driven.transfer.lost(dies, "killed", driven.now)
    actions = driven.take()
    assert actions.plan == (((3, 1),), (source_id("dies"),)), "the other has piece 2"
    assert [number for number, _, _ in actions.post] == [lives]


def test_a_mate_has_longer_to_open() -> None:
    driven = Driven(transport="ucxx")
    driven.tick()
    driven.transfer.planned(Plan(version=3, shares=(share("far", MINE, far=True), share("mate", ITS)), why=""), 0.0)
    (far, _), (mate, _) = driven.take().open
    driven.opened(far)
    assert driven.wait(DEFAULT_LIMITS.open_s_max + 1) == []
    assert driven.wait(DEFAULT_LIMITS.crosser_open_s_max) == [mate]


def test_a_read_with_mates_alone_waits_for_one_of_them() -> None:
    driven = Driven(transport="ucxx")
    driven.tick()
    driven.transfer.planned(Plan(version=3, shares=(share("mate", ((0, PIECES),)),), why=""), 0.0)
    ((mate, _),) = driven.take().open
    assert driven.phase() is TransferPhase.LEASING
    driven.transfer.opened(mate, LIST, driven.now, (), promises=True)
    assert driven.phase() is TransferPhase.LEASED


def test_a_far_share_is_carried_by_several_sessions() -> None:
    driven = Driven(transport="ucxx")
    driven.tick()
    whole = share("far", ((0, PIECES),), far=True, streams=4)
    driven.transfer.planned(Plan(version=3, shares=(whole,), why=""), 0.0)
    opened = driven.take().open
    assert [each.source for _, each in opened] == [source_id("far")] * 4
    queues = [list(driven.transfer.sources[number].queue) for number, _ in opened]
    assert queues == [[(0, 2)], [(2, 2)], [(4, 1)], [(5, 1)]]
    assert msgspec.structs.asdict(opened[0][1])["streams"] == 4


def test_a_mate_may_be_silent_for_longer_than_the_middle_of_a_chain() -> None:
    """Its part would cross once more; of one that is killed the connection ends."""
    driven, far, mate = exchanging()
    driven.transfer.promised(mate, ITS)
    driven.brings(far)
    assert driven.wait(DEFAULT_LIMITS.crosser_silent_s - 1) == []
    assert driven.wait(2) == [mate]
