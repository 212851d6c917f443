"""A crosser that is slow hands a part over, one that is stopped is replaced, and whoever lives is waited for."""

import msgspec
import pytest
from tests.unit.agent.core.scene import MODEL, OneAgent
from tests.unit.agent.transfer.site import LOST_AFTER_S, PIECE_BYTES, Site

from tensorhub_agent.core.effects import AvailabilityReceived, SendAvailability
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.primitives.lease_messages import HAVE_RANGES_MAX, PiecesAvailable, PiecesHandedOff, split_update
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS, TransferLimits
from tensorhub_agent.transfer.site_handoff import Handoff, hand_off
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_agent.transfer.timeouts import deadline_of
from tensorhub_agent.transfer.transfer import Transfer
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRequest
from tensorhub_common.protocol.log.events import AgentLost
from tensorhub_common.protocol.plans import ReadPriority, Share, SourceId

FAST_BPS = 8.0 * PIECE_BYTES
PIECES = 256
MATES = 4
ALONE_S = PIECES / MATES * PIECE_BYTES / FAST_BPS
"""All are as fast as each other: 8 s."""


def site(*slow_bps: float, limits: TransferLimits = DEFAULT_LIMITS) -> Site:
    return Site([*slow_bps, *[FAST_BPS] * (MATES - len(slow_bps))], PIECES, limits)


def test_mates_as_fast_as_each_other_cross_once_and_cede_nothing() -> None:
    found = site()
    found.run(60)
    assert all(mate.is_done for mate in found.mates)
    assert found.crossed == 1
    assert {mate.crossed_bytes for mate in found.mates} == {PIECES // MATES * PIECE_BYTES}


@pytest.mark.parametrize("times", [4, 8, 16])
def test_what_a_slow_one_has_not_asked_for_is_brought_by_others_and_crosses_once(times: int) -> None:
    found = site(FAST_BPS / times)
    found.run(60)
    slow = found.mates[0]
    assert all(mate.is_done for mate in found.mates)
    assert found.crossed == 1, "what is handed over is so by agreement"
    assert slow.crossed_bytes < PIECES // MATES * PIECE_BYTES
    assert found.now < 3 * ALONE_S, "alone it would have taken so many times as long"


def test_without_handing_over_all_wait_for_the_slow_one() -> None:
    """So that the test above can fail."""
    found = site(FAST_BPS / 4, limits=TransferLimits(handoff_gain_s=1e9))
    found.run(120)
    assert found.crossed == 1
    assert found.now > 3 * ALONE_S


def test_two_slow_ones_hand_over_to_whoever_has_shown_all_of_its_part() -> None:
    found = site(FAST_BPS / 4, FAST_BPS / 8)
    found.run(60)
    assert all(mate.is_done for mate in found.mates)
    assert found.crossed == 1


def test_one_that_is_killed_is_replaced_and_what_it_had_shown_does_not_cross_again() -> None:
    found = site()
    found.run(ALONE_S / 2)
    dead = found.mates[0]
    found.kill(dead)
    found.run(60, but=(dead,))
    assert all(mate.is_done for mate in found.mates[1:])
    assert found.crossed < 1 + 0.02


def test_one_that_is_stopped_costs_what_it_had_not_shown_once_more_at_most() -> None:
    """Its connections stand. The log loses it, and then its mates leave it; it goes on when it wakes."""
    found = site()
    found.run(2.0)
    stopped = found.mates[0]
    stopped.stopped_until = found.now + 10.0
    shown = stopped.crossed_bytes
    found.run(2.0 + LOST_AFTER_S)
    found.lose(stopped)
    found.run(60)
    assert all(mate.is_done for mate in found.mates)
    part = PIECES / MATES * PIECE_BYTES
    assert found.crossed <= 1 + (part - shown) / (PIECES * PIECE_BYTES) + 0.05


def test_one_that_is_silent_and_that_the_log_has_not_lost_is_waited_for() -> None:
    """A busy machine: nobody else brings its part over."""
    found = site()
    found.run(2.0)
    found.mates[0].stopped_until = found.now + 10.0
    found.run(60)
    assert all(mate.is_done for mate in found.mates)
    assert found.crossed == 1


def test_an_heir_that_is_stopped_before_it_hears_is_not_waited_for() -> None:
    found = site(FAST_BPS / 8)
    while not any(mate.transfer.pool.committed() == [] for mate in found.mates[1:]):
        found.run(found.now + 0.1)
    for mate in found.mates[1:3]:
        mate.stopped_until = found.now + 10.0
    found.run(120)
    assert all(mate.is_done for mate in found.mates)
    assert found.crossed <= 1.25


# What the agent does with it.

HEIR = SourceId("agent-3", 1, "rollout-3", 0)


def reading() -> tuple[OneAgent, Transfer]:
    """Return an agent that reads, with its source open, and a reader that counts on what it promises."""
    trainer = OneAgent("elsewhere")
    trainer.join()
    trainer.register("trainer")
    reader = OneAgent("agent-1", catalog=trainer.catalog)
    reader.join()
    key = reader.register("rollout")
    trainer.publish(trainer.key("trainer"), "a")
    trainer.log()
    reader.read(key)
    reader.log()
    reader.plan(key)
    reader.opened(key, "a")
    reader.log()
    operation = reader.core.shards[key].operation
    assert isinstance(operation, ReadOperation)
    assert operation.transfer is not None
    ask = LeaseRequest(
        job="j",
        model=MODEL,
        source=SourceId("agent-1", 1, key.replica, key.shard),
        version=1,
        root=operation.transfer.root,
        reader=HEIR,
        turn=ReadPriority(1, 1),
        promises=True,
    )
    assert isinstance(reader.core.lease_asked(ask, "lease", "ticket", "here", reader.now), LeaseGrant)
    assert reader.core.redeemed("ticket", reader.now) is not None
    return reader, operation.transfer


def test_what_is_ceded_is_promised_no_more_and_all_that_count_on_it_hear_whose_it_is() -> None:
    reader, transfer = reading()
    (key,) = reader.core.shards
    reader.do(reader.core.on_outcome(AvailabilityReceived(key, 10**6, PiecesAvailable()), reader.now))
    promised = reader.core.leases.coming[key].promised
    assert promised.count(1) == 3
    transfer.take_actions()
    transfer.pool.actions.ceded.append(Handoff(HEIR, ((1, 2),)))
    reader.seen.clear()
    reader.do(reader.core.on_outcome(AvailabilityReceived(key, 10**6, PiecesAvailable()), reader.now))
    assert PiecesHandedOff(((1, 2),), HEIR) in [
        each.update for each in reader.seen if isinstance(each, SendAvailability)
    ]


def test_the_log_s_word_that_an_agent_is_lost_reaches_the_reads_that_wait_for_it() -> None:
    reader, transfer = reading()
    (source,) = transfer.sources.values()
    for agent, incarnation, is_lost in (("another", 1, False), ("elsewhere", 0, False), ("elsewhere", 1, True)):
        reader.do(reader.core.on_event(AgentLost(agent=agent, incarnation=incarnation, term=1), reader.now))
        assert source.is_lost is is_lost


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_silent_mate_has_long_until_the_log_has_lost_it(is_lost: bool) -> None:  # noqa: FBT001
    share = Share(source=HEIR, transport="ucxx", pieces=((0, 1),), nbytes=1, why="", crosses=True)
    source = Source(1, share, SourcePhase.OPEN, 0.0)
    source.is_lost = is_lost
    source.awaiting_source.append((0, 1))
    assert deadline_of(source) == (DEFAULT_LIMITS.waiting_silent_s if is_lost else DEFAULT_LIMITS.crosser_silent_s)
    source.queue.append((0, 1))
    source.asked(1, ((0, 1),), 1, 0.0)
    assert deadline_of(source) == (5.0 if is_lost else DEFAULT_LIMITS.crosser_silent_s)


def test_a_word_of_many_ranges_comes_in_frames_that_each_name_the_heir() -> None:
    many = tuple((2 * number, 1) for number in range(HAVE_RANGES_MAX + 1))
    frames = split_update(PiecesHandedOff(many, HEIR))
    assert [len(each.pieces) for each in frames] == [HAVE_RANGES_MAX, 1]
    assert all(isinstance(each, PiecesHandedOff) and each.new_owner == HEIR for each in frames)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(frames[1]), type=PiecesHandedOff) == frames[1]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_far_source_has_as_long_as_a_thin_line_takes_for_what_is_under_way(is_lost: bool) -> None:  # noqa: FBT001
    share = Share(source=HEIR, transport="ucxx", pieces=((0, 1),), nbytes=1, why="", far=True)
    source = Source(1, share, SourcePhase.OPEN, 0.0)
    source.is_lost = is_lost
    source.asked(1, ((0, 1),), 4 * DEFAULT_LIMITS.far_bps_min, 0.0)
    assert deadline_of(source) == (5.0 if is_lost else 9.0)
    source.asked(2, ((0, 1),), 1000 * DEFAULT_LIMITS.far_bps_min, 0.0)
    assert deadline_of(source) == (5.0 if is_lost else DEFAULT_LIMITS.far_silent_s)


UNEVEN = [1000, *[PIECE_BYTES] * 99]
"""Bytes of the pieces that a far source is to bring yet; the first one is tiny."""


def source(name: str, nbytes: int, *, far: bool = False, shown_at: float | None = None) -> Source:
    """Return an open source: a far one, or a mate which has shown `nbytes` of its own by then."""
    share = Share(
        source=SourceId(name, 1, name, 0), transport="ucxx", pieces=(), nbytes=nbytes, why="", far=far, crosses=not far
    )
    made = Source(0, share, SourcePhase.OPEN, 0.0)
    made.shown_at = shown_at
    if not far:
        made.has = bytearray(len(UNEVEN))
    return made


def slow(bps: float, limits: TransferLimits = DEFAULT_LIMITS) -> Source:
    """Return a far source of this rate, of which everything is to be asked for yet."""
    made = source("far", 0, far=True)
    made.limits = limits
    made.pace.record(int(bps), 1.0)
    made.give([(0, len(UNEVEN))])
    return made


def test_a_part_is_handed_over_where_all_comes_sooner_by_more_than_the_gain() -> None:
    """Two that are equally fast end together in half of the time, which is the gain."""
    left_s = sum(UNEVEN) / FAST_BPS
    for gain_s, is_ceded in ((left_s / 2 * 1.01, False), (left_s / 2 * 0.99, True)):
        far, new_owner = slow(FAST_BPS, TransferLimits(handoff_gain_s=gain_s)), source("a", int(FAST_BPS), shown_at=1.0)
        ceded = hand_off([far, new_owner], UNEVEN, began=0.0, now=0.0)
        assert [each.new_owner.agent for each in ceded] == ["a"] * is_ceded
        assert list(far.queue) == ([(0, 51)] if is_ceded else [(0, len(UNEVEN))])
        assert new_owner.awaiting_source == ([(51, 49)] if is_ceded else [])


def test_heirs_get_the_end_by_how_fast_they_were_and_no_more_than_their_bytes() -> None:
    """Each by what it has shown since the read began; the first piece stays, however many there are."""
    far = slow(FAST_BPS)
    far.last_progress_at = 20.0
    new_owners = [source("a", int(2 * FAST_BPS), shown_at=12.0), source("b", int(FAST_BPS), shown_at=11.0)]
    ceded = hand_off([far, *new_owners], UNEVEN, began=10.0, now=20.0)
    whole = sum(UNEVEN) / 3
    for each in ceded:
        [(first, count)] = each.pieces
        nbytes = sum(UNEVEN[first : first + count])
        assert nbytes <= whole < nbytes + PIECE_BYTES
    assert [each.new_owner.agent for each in ceded] == ["a", "b"]
    assert sum(ceded[0].pieces[0]) == len(UNEVEN), "from the end on"
    (everything,) = hand_off([slow(1.0), source("a", 10**12, shown_at=0.0)], UNEVEN, began=0.0, now=0.0)
    assert everything.pieces == ((1, len(UNEVEN) - 1),)


@pytest.mark.parametrize("busy", ["parked", "doubted", "closed", "not shown", "crosses nothing"])
def test_only_who_is_open_and_has_shown_its_part_inherits(busy: str) -> None:
    far, new_owner = slow(FAST_BPS), source("a", int(FAST_BPS), shown_at=1.0)
    match busy:
        case "crosses nothing":
            new_owner.share = msgspec.structs.replace(new_owner.share, crosses=False)
        case "parked":
            new_owner.give([(3, 1)])
        case "doubted":
            new_owner.is_suspect = True
        case "closed":
            new_owner.phase = SourcePhase.CLOSING
        case "not shown":
            new_owner.shown_at = None
    assert hand_off([far, new_owner], UNEVEN, began=0.0, now=1.0) == []


@pytest.mark.parametrize("which", ["near", "asked for its word", "asked for everything"])
def test_nobody_else_hands_over(which: str) -> None:
    """What comes from the own site crosses nothing; of one that is asked for its word, or for all, nothing waits."""
    far, new_owner = slow(FAST_BPS), source("a", int(FAST_BPS), shown_at=1.0)
    match which:
        case "near":
            far.share = msgspec.structs.replace(far.share, far=False)
        case "asked for its word":
            far.confirming = True
        case "asked for everything":
            far.asked(1, tuple(far.take_back(len(UNEVEN), None)), sum(UNEVEN), 0.0)
    assert hand_off([far, new_owner], UNEVEN, began=0.0, now=1.0) == []
    assert hand_off([new_owner], UNEVEN, began=0.0, now=1.0) == []


def test_the_slowest_hands_over_and_one_of_unknown_rate_does_not() -> None:
    fast, slower, new = slow(FAST_BPS), slow(FAST_BPS / 2), slow(0)
    new_owner = source("a", int(FAST_BPS), shown_at=1.0)
    hand_off([fast, slower, new, new_owner], UNEVEN, began=0.0, now=1.0)
    assert [sum(count for _, count in each.queue) < len(UNEVEN) for each in (fast, slower, new)] == [False, True, False]
