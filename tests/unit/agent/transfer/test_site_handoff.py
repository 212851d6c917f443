"""Readers of one site exchange what each brings over; who is slow hands a part over, and whoever lives is awaited."""

from collections.abc import Callable
from unittest import mock

import msgspec
import pytest
from tests.unit.agent.transfer.driver import ALL, SILENCE, Driven, planning, running, share, source_id
from tests.unit.agent.transfer.site import LOST_AFTER_S, PIECE_BYTES, Site, lease_request

from tensorhub_agent.core.effects import AvailabilityReceived, SendAvailability
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.leases.lease import LeaseState
from tensorhub_agent.leases.table import LeaseTable, PromiseChange
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.primitives.lease_messages import HAVE_RANGES_MAX, PiecesAvailable, PiecesHandedOff, split_update
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS, TransferLimits
from tensorhub_agent.transfer.site_handoff import Handoff, hand_off
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.protocol.log.events import AgentLost
from tensorhub_common.protocol.plans import Plan, ReadPriority, Refusal, SourceId
from tensorhub_common.protocol.ranges import Range
from tensorhub_simulator.drivers.agent import OneAgent, pair

FAST_BPS = 8.0 * PIECE_BYTES
SITE_PIECES = 256
MATES = 4
ALONE_S = SITE_PIECES / MATES * PIECE_BYTES / FAST_BPS
"""All are as fast as each other: 8 s."""
PART_BYTES = SITE_PIECES // MATES * PIECE_BYTES


# A site in virtual time.


def site(*slow_bps: float, limits: TransferLimits = DEFAULT_LIMITS) -> Site:
    return Site([*slow_bps, *[FAST_BPS] * (MATES - len(slow_bps))], SITE_PIECES, limits)


@pytest.mark.parametrize(
    ("times", "limits", "took"),
    [
        ((), DEFAULT_LIMITS, (1.0, 1.1)),
        ((4,), DEFAULT_LIMITS, (1.0, 3.0)),
        ((16,), DEFAULT_LIMITS, (1.0, 3.0)),
        ((4, 8), DEFAULT_LIMITS, (1.0, 3.0)),
        ((4,), TransferLimits(handoff_gain_s=1e9), (4.0, 4.2)),
    ],
    ids=["all fast", "one slow", "one very slow", "two slow", "without handing over"],
)
def test_what_slow_ones_have_not_asked_for_is_brought_by_others_and_crosses_once(
    times: tuple[int, ...], limits: TransferLimits, took: tuple[float, float]
) -> None:
    """What is handed over is so by agreement; without that all wait for the slow one."""
    found = site(*(FAST_BPS / each for each in times), limits=limits)
    found.run(120)
    assert all(mate.is_done for mate in found.mates)
    assert found.crossed == 1
    assert took[0] <= found.now / ALONE_S <= took[1]
    hands_over = bool(times) and limits is DEFAULT_LIMITS
    assert all((mate.crossed_bytes < PART_BYTES) is hands_over for mate in found.mates[: len(times)])
    assert hands_over or {mate.crossed_bytes for mate in found.mates} == {PART_BYTES}


def test_one_that_is_killed_is_replaced_and_what_it_had_shown_does_not_cross_again() -> None:
    found = site()
    found.run(ALONE_S / 2)
    dead = found.mates[0]
    found.kill(dead)
    found.run(60, but=(dead,))
    assert all(mate.is_done for mate in found.mates[1:])
    assert found.crossed < 1 + 0.02


@pytest.mark.parametrize("is_lost", [True, False])
def test_one_that_is_stopped_is_waited_for_until_the_log_has_lost_it(is_lost: bool) -> None:  # noqa: FBT001
    """It costs what it had not shown once more at most. Its connections stand, and it goes on when it wakes."""
    found = site()
    found.run(2.0)
    stopped = found.mates[0]
    stopped.stopped_until = found.now + 10.0
    left = PART_BYTES - stopped.crossed_bytes
    found.run(2.0 + LOST_AFTER_S)
    if is_lost:
        found.lose(stopped)
    found.run(60)
    assert all(mate.is_done for mate in found.mates)
    assert found.crossed <= (1 + left / (SITE_PIECES * PIECE_BYTES) + 0.05 if is_lost else 1)


def test_an_heir_that_is_stopped_before_it_hears_is_not_waited_for() -> None:
    found = site(FAST_BPS / 8)
    while not any(mate.transfer.pool.committed() == [] for mate in found.mates[1:]):
        found.run(found.now + 0.1)
    for mate in found.mates[1:3]:
        mate.stopped_until = found.now + 10.0
    found.run(120)
    assert all(mate.is_done for mate in found.mates)
    assert found.crossed <= 1.25


# Whom a part is handed over to, and how much of it.

HEIR = SourceId("agent-3", 1, "rollout-3", 0)
UNEVEN = [1000, *[PIECE_BYTES] * 99]
"""Bytes of the pieces that a far source is to bring yet; the first one is tiny."""


def mate(name: str, nbytes: int, shown_at: float) -> Source:
    """Return a mate which has shown `nbytes` of its own by then."""
    made = Source(0, msgspec.structs.replace(share(name, crosses=True), nbytes=nbytes), SourcePhase.OPEN, 0.0)
    made.shown_at, made.has = shown_at, bytearray(len(UNEVEN))
    return made


def slow(bps: float, limits: TransferLimits = DEFAULT_LIMITS) -> Source:
    """Return a far source of this rate, of which everything is to be asked for yet."""
    made = Source(0, share("far", far=True), SourcePhase.OPEN, 0.0)
    made.limits = limits
    made.pace.record(int(bps), 1.0)
    made.give([(0, len(UNEVEN))])
    return made


def test_a_part_is_handed_over_where_all_comes_sooner_by_more_than_the_gain() -> None:
    """Two that are equally fast end together in half of the time, which is the gain."""
    left_s = sum(UNEVEN) / FAST_BPS
    for gain_s, is_ceded in ((left_s / 2 * 1.01, False), (left_s / 2 * 0.99, True)):
        far, new_owner = slow(FAST_BPS, TransferLimits(handoff_gain_s=gain_s)), mate("a", int(FAST_BPS), 1.0)
        ceded = hand_off([far, new_owner], UNEVEN, began=0.0, now=0.0)
        assert [each.new_owner.agent for each in ceded] == ["a"] * is_ceded
        assert list(far.queue) == ([(0, 51)] if is_ceded else [(0, len(UNEVEN))])
        assert new_owner.awaiting_source == ([(51, 49)] if is_ceded else [])


def test_heirs_get_the_end_by_how_fast_they_were_and_no_more_than_their_bytes() -> None:
    """Each by what it has shown since the read began; the first piece stays, however many there are."""
    far = slow(FAST_BPS)
    far.last_progress_at = 20.0
    new_owners = [mate("a", int(2 * FAST_BPS), 12.0), mate("b", int(FAST_BPS), 11.0)]
    ceded = hand_off([far, *new_owners], UNEVEN, began=10.0, now=20.0)
    whole = sum(UNEVEN) / 3
    for each in ceded:
        [(first, count)] = each.pieces
        nbytes = sum(UNEVEN[first : first + count])
        assert nbytes <= whole < nbytes + PIECE_BYTES
    assert [each.new_owner.agent for each in ceded] == ["a", "b"]
    assert sum(ceded[0].pieces[0]) == len(UNEVEN), "from the end on"
    [everything] = hand_off([slow(1.0), mate("a", 10**12, 0.0)], UNEVEN, began=0.0, now=0.0)
    assert everything.pieces == ((1, len(UNEVEN) - 1),)


HANDS_NOTHING_OVER: dict[str, Callable[[Source, Source], object]] = {
    "heir awaits pieces": lambda _, heir: heir.give([(3, 1)]),
    "heir doubted": lambda _, heir: heir.mark_suspect(),
    "heir closed": lambda _, heir: heir.closes("gone"),
    "heir has not shown its part": lambda _, heir: setattr(heir, "shown_at", None),
    "heir crosses nothing": lambda _, heir: setattr(heir, "share", share("a")),
    "giver is near": lambda far, _: setattr(far, "share", share("near")),
    "giver is asked for its word": lambda far, _: far.asks_to_confirm(0.0),
    "giver is asked for everything": lambda far, _: far.asked(1, tuple(far.take_all_back()), sum(UNEVEN), 0.0),
    "giver of unknown rate": lambda far, _: setattr(far.pace, "_bytes", 0.0),
}
"""Changes of the giver and of its heir."""


@pytest.mark.parametrize("change", HANDS_NOTHING_OVER.values(), ids=HANDS_NOTHING_OVER)
def test_only_who_has_shown_its_part_inherits_and_only_a_far_source_hands_over(
    change: Callable[[Source, Source], object],
) -> None:
    far, heir = slow(FAST_BPS), mate("a", int(FAST_BPS), 1.0)
    change(far, heir)
    assert hand_off([far, heir], UNEVEN, began=0.0, now=1.0) == []


def test_the_slowest_hands_over() -> None:
    givers = [slow(FAST_BPS), slow(FAST_BPS / 2)]
    hand_off([*givers, mate("a", int(FAST_BPS), 1.0)], UNEVEN, began=0.0, now=1.0)
    assert [sum(count for _, count in each.queue) < len(UNEVEN) for each in givers] == [False, True]


# What the agent does with it.


def reading() -> tuple[OneAgent, Transfer]:
    """Return an agent that reads, with its source open, and a reader that counts on what it promises."""
    _, reader, key = pair()
    reader.read(key)
    reader.begin_filling(key, "a")
    operation = reader.core.shards[key].operation
    assert isinstance(operation, ReadOperation)
    assert operation.transfer is not None
    reader.open_lease(key, 1, operation.transfer.root, reader=HEIR, turn=ReadPriority(1, 1), promises=True)
    return reader, operation.transfer


def test_what_is_ceded_is_promised_no_more_and_all_that_count_on_it_hear_whose_it_is() -> None:
    reader, transfer = reading()
    [key] = reader.core.shards
    reader.do(reader.core.on_outcome(AvailabilityReceived(key, 10**6, PiecesAvailable()), reader.now))
    assert reader.core.leases.coming[key].promised.count(1) == 3
    transfer.take_actions()
    transfer.pool.actions.ceded.append(Handoff(HEIR, ((1, 2),)))
    reader.seen.clear()
    reader.do(reader.core.on_outcome(AvailabilityReceived(key, 10**6, PiecesAvailable()), reader.now))
    assert PiecesHandedOff(((1, 2),), HEIR) in [
        each.update for each in reader.seen if isinstance(each, SendAvailability)
    ]


def test_the_log_s_word_that_an_agent_is_lost_reaches_the_reads_that_wait_for_it() -> None:
    reader, transfer = reading()
    [source] = transfer.sources.values()
    for agent, incarnation, is_lost in (("another", 1, False), ("elsewhere", 0, False), ("elsewhere", 1, True)):
        reader.do(reader.core.on_event(AgentLost(agent=agent, incarnation=incarnation, term=1), reader.now))
        assert source.is_lost is is_lost


def test_a_word_of_many_ranges_comes_in_frames_that_each_name_the_heir() -> None:
    many = tuple((2 * number, 1) for number in range(HAVE_RANGES_MAX + 1))
    frames = split_update(PiecesHandedOff(many, HEIR))
    assert [len(each.pieces) for each in frames] == [HAVE_RANGES_MAX, 1]
    assert all(isinstance(each, PiecesHandedOff) and each.new_owner == HEIR for each in frames)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(frames[1]), type=PiecesHandedOff) == frames[1]


@pytest.mark.parametrize("promises", [True, False])
def test_a_reader_that_counts_on_promises_hears_of_them_and_of_their_end_once(promises: bool) -> None:  # noqa: FBT001
    key, table = ShardKey("policy", "rollout-1", 0), LeaseTable()
    table.begin_fill(key, 1, "root", ReadPriority(1, 0), 6)
    table.set_digests(key, bytes(6 * PIECE_DIGEST_BYTES))
    ask = lease_request(SourceId("agent-1", 1, "rollout-1", 0), HEIR, "root", model="policy", promises=promises)
    granted = table.grant(ask, "one", "ticket", "here", 0.0)
    assert isinstance(granted, LeaseGrant)
    assert (granted.filling, granted.promises, table.counts_on_promises(key)) == (True, promises, promises)
    table.promise(key, [(0, 1)], [])
    lease = table.redeem("ticket", 0.0)
    assert lease is not None
    assert lease.state is LeaseState.OPEN
    assert lease.promised() == (((0, 1),) if promises else ()), "what was promised before it came"
    told = ("one",) if promises else ()
    assert table.promise(key, [(0, 2)], [(5, 1)]) == PromiseChange(told, ((1, 1),), ())
    assert table.promise(key, [(0, 2)], [(5, 1)]) is None
    assert table.promise(key, [], []) is None, "what is loose for a moment is promised on"
    assert table.promise(key, [], [(1, 3)]) == PromiseChange(told, (), ((1, 1),))
    assert lease.promised() == (((0, 1),) if promises else ())


# The reader.

MINE: tuple[Range, ...] = ((0, 2),)
ITS: tuple[Range, ...] = ((2, 4),)
RENEWED_S = 1.0
UNPROMISED_S = DEFAULT_LIMITS.unpromised_wait_s
FAR_SHARE, MATE_SHARE = share("far", *MINE, far=True), share("mate", *ITS, crosses=True)


def exchanging() -> tuple[Driven, int, int]:
    """Return a read that has begun, and its sources: one far away, and a mate that crosses the rest."""
    driven, [far, mate_one] = running(FAR_SHARE, MATE_SHARE, there={"mate": ()}, promises=True, transport="ucxx")
    return driven, far, mate_one


def promised(*pieces: Range) -> tuple[Driven, int]:
    """Return a read whose far source has brought its part, and its mate, which has promised these."""
    driven, far, mate_one = exchanging()
    driven.transfer.promised(mate_one, pieces)
    driven.brings(far)
    return driven, mate_one


def keep_alive(driven: Driven, mate: int, seconds: float) -> None:
    """Let time pass in which the mate says that it lives."""
    end = driven.now + seconds
    while driven.now < end:
        driven.wait_exactly(min(RENEWED_S, end - driven.now))
        driven.transfer.available(mate, (), driven.now)


def test_what_is_promised_is_awaited_and_what_is_not_is_planned_again_after_a_while() -> None:
    driven, waits_at = promised(*ITS)
    keep_alive(driven, waits_at, 2 * UNPROMISED_S)
    assert driven.transfer.plan_requests.count == 1
    assert (driven.transfer.pool.awaiting_others(), driven.transfer.pool.committed()) == ([*ITS], [])
    driven, waits_at = promised((2, 1))
    keep_alive(driven, waits_at, UNPROMISED_S / 2)
    assert driven.transfer.plan_requests.count == 1
    keep_alive(driven, waits_at, UNPROMISED_S / 2 + RENEWED_S)
    assert list(driven.transfer.pool.site_peers.not_bringing) == [source_id("mate")]
    assert driven.transfer.pool.awaiting_others() == [(2, 1)], "what is promised stays"
    assert driven.transfer.plan_requests.count == 2
    driven.refused(SILENCE)
    assert driven.pieces_of(waits_at) == {2, 5}, "without a planner it has to bring its part"


def test_what_is_retracted_is_planned_again_at_once() -> None:
    driven, _, waits_at = exchanging()
    driven.transfer.promised(waits_at, ITS)
    for pieces, plan in ((((4, 9),), None), (((4, 2),), (((4, 2),), ()))):
        driven.transfer.retracted(waits_at, pieces, driven.now)
        assert driven.take().plan == plan
    assert list(driven.transfer.pool.site_peers.not_bringing) == [source_id("mate")]
    assert driven.actions.close == [], "it is good for what it has"


@pytest.mark.parametrize(
    ("heir", "waits_at"), [(source_id("lives"), 1), (source_id("elsewhere"), None)], ids=["open here", "not open here"]
)
def test_what_is_ceded_to_another_one_is_awaited_there(heir: SourceId, waits_at: int | None) -> None:
    shares = (MATE_SHARE, share("lives", *MINE, crosses=True))
    driven, mates = running(*shares, there={"mate": (), "lives": ()}, promises=True, transport="ucxx")
    for number, pieces in zip(mates, (ITS, MINE), strict=True):
        driven.transfer.promised(number, pieces)
    driven.transfer.ceded(mates[0], ((4, 2),), heir, driven.now)
    assert driven.take().plan == (None if waits_at is not None else (((4, 2),), ()))
    assert driven.pieces_of(mates[0]) == {2, 3}
    assert driven.pieces_of(mates[1]) == {0, 1, *((4, 5) if waits_at is not None else ())}


@pytest.mark.parametrize("is_far_open", [True, False])
def test_what_was_ceded_to_this_reader_it_brings_over_itself(is_far_open: bool) -> None:  # noqa: FBT001
    """Where it has no far source open it asks for a plan of that by itself."""
    driven, far, giver = exchanging()
    if not is_far_open:
        driven.is_gone(far)
    driven.transfer.promised(giver, ITS)
    driven.transfer.plan_requests.waiting = False
    driven.transfer.inherited(giver, ((4, 2),), driven.now)
    actions = driven.take()
    assert driven.pieces_of(giver) == {2, 3}
    assert (driven.pieces_of(far) == {0, 1, 4, 5}) is is_far_open
    assert (actions.plan is None) is is_far_open
    assert actions.plan is None or actions.plan[0] == ((4, 2),)
    driven.transfer.has_promised_readers, ceded = True, list[float]()
    with mock.patch.object(driven.transfer.pool, "cede", lambda _, now: ceded.append(now)):
        for seconds in (0.0, DEFAULT_LIMITS.handoff_pause_s - 0.01, 0.01):
            driven.tick(seconds)
    assert ceded == [driven.now], "what it has just taken over it hands over to nobody for a while"


@pytest.mark.parametrize(
    ("has_it", "is_held", "phase"),
    [
        (False, False, TransferPhase.FAILED),
        (False, True, TransferPhase.RUNNING),
        (True, False, TransferPhase.RUNNING),
    ],
)
def test_what_no_mate_has_or_promises_ends_the_read_where_the_log_counts_no_holder(
    *, has_it: bool, is_held: bool, phase: TransferPhase
) -> None:
    """Two mates that lack the same pieces would else wait for each other until both calls end.

    What a doubted mate has or promises by then it is asked for; while there is a holder the rest is asked for again.
    """
    driven, far, waits_at = exchanging()
    driven.brings(far)
    driven.is_gone(far)
    keep_alive(driven, waits_at, UNPROMISED_S / 2)
    keep_alive(driven, waits_at, UNPROMISED_S / 2 + RENEWED_S)
    assert driven.transfer.plan_requests.waiting
    if has_it:
        driven.available(waits_at, (2, 3))
        driven.transfer.promised(waits_at, ((5, 1),))
    driven.refused(Refusal(error="VersionUnavailable", reason="no source is left", is_held=is_held))
    assert driven.phase() is phase
    assert (driven.transfer.error is None) is (phase is TransferPhase.RUNNING)
    count = driven.transfer.plan_requests.count
    keep_alive(driven, waits_at, RENEWED_S)
    assert driven.transfer.plan_requests.count == count + is_held
    assert driven.transfer.pool.loose == ([*ITS] if not has_it else [])


def test_a_far_source_takes_nothing_over_from_a_mate_and_everything_once_no_mate_is_left() -> None:
    driven, far, waits_at = exchanging()
    driven.transfer.promised(waits_at, ITS)
    driven.brings(far)
    assert driven.tick().post == [], "it is idle, and the mate has brought nothing"
    driven.available(waits_at, (2, 2))
    assert driven.posts == [(waits_at, ((2, 2),))]
    assert driven.lost(waits_at, "killed").close == [waits_at]
    assert driven.posts == [(far, ((4, 2),))]
    assert driven.closed(waits_at).plan == (((2, 2),), (source_id("mate"),)), "it is busy"


def test_what_somebody_nearby_has_does_not_cross_again() -> None:
    shares = (FAR_SHARE, share("dies", (2, 2), crosses=True), share("lives", (4, 2), crosses=True))
    there: dict[str, tuple[Range, ...]] = {"dies": (), "lives": ((4, 1),)}
    driven, [_, dies, lives] = running(*shares, there=there, promises=True, transport="ucxx")
    driven.available(lives, (2, 1))
    assert driven.lost(dies, "killed").plan == (((3, 1),), (source_id("dies"),)), "the other has piece 2"
    assert [number for number, _ in driven.posts] == [lives]


def test_a_mate_may_come_later_and_alone_it_is_waited_for() -> None:
    driven = planning(transport="ucxx")
    far, _ = driven.planned(FAR_SHARE, MATE_SHARE)
    driven.opened(far)
    assert driven.phase() is TransferPhase.LEASED
    driven = planning(transport="ucxx")
    [waits_at] = driven.planned(share("mate", *ALL, crosses=True))
    assert driven.phase() is TransferPhase.LEASING
    driven.opened(waits_at, there=(), promises=True)
    assert driven.phase() is TransferPhase.LEASED


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_part_is_handed_over_only_while_peers_wait_for_it(is_awaited: bool) -> None:  # noqa: FBT001
    pieces = 40
    far, near = share("far", (0, 30), far=True), share("mate", (30, 10), crosses=True)
    near = msgspec.structs.replace(near, nbytes=10 * PIECE_BYTES)
    driven, [crossing, mate_one] = running(
        far, near, there={"mate": ()}, promises=True, transport="ucxx", pieces=pieces, sizes=[PIECE_BYTES] * pieces
    )
    if is_awaited:
        driven.transfer.has_promised_readers = True
    driven.transfer.promised(mate_one, ((30, 10),))
    driven.available(mate_one, (30, 10))
    driven.brings(crossing, 1.0)
    assert bool(driven.tick().ceded) is is_awaited


def test_what_the_first_plan_says_of_who_crosses_stays() -> None:
    driven = planning(transport="ucxx")
    sites = [(source_id("a"), source_id("b")), (source_id("c"),)]
    for crossers, pieces in zip(sites, ((0, 3), (3, 3)), strict=True):
        plan = Plan(version=3, shares=(share("far", pieces, far=True),), why="", crossers=crossers)
        driven.transfer.planned(plan, driven.now)
        driven.take()
        assert driven.transfer.pool.site_peers.crossers == sites[0]


def test_a_far_share_is_carried_by_several_sessions() -> None:
    driven = planning(transport="ucxx")
    driven.planned(share("far", *ALL, far=True, streams=4))
    assert [(each.source, each.streams) for _, each in driven.actions.open] == [(source_id("far"), 4)] * 4
    queues = [list(driven.source(number).queue) for number, _ in driven.actions.open]
    assert queues == [[(0, 2)], [(2, 2)], [(4, 1)], [(5, 1)]]
