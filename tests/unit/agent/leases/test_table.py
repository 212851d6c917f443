"""Leases: granted for exactly what stands, once, and only as long as it stays."""

import msgspec
import pytest

from tensorhub_agent.leases.lease import LEASE_TRANSITIONS, LeaseState, LeaseTransition
from tensorhub_agent.leases.table import LEASES_OF_ONE_MAX, READERS_MAX, LeaseLimits, LeaseTable
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.leases import DIGESTS_PAGE_PIECES, LeaseGrant, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import SourceId

KEY = ShardKey("policy", "trainer", 0)
READER = SourceId("agent-1", 1, "rollout", 0)


def ask(version: int = 3, root: str | None = "r3", reader: SourceId = READER) -> LeaseRequest:
    return LeaseRequest(
        job="j", model="policy", source=SourceId("agent-0", 1, "trainer", 0), version=version, root=root, reader=reader
    )


@pytest.fixture
def table() -> LeaseTable:
    table = LeaseTable()
    table.offer(KEY, 3, "r3", b"")
    return table


def opened(table: LeaseTable, name: str = "one", now: float = 0.0, agent: str = "agent-1") -> None:
    asked = ask(reader=SourceId(agent, 1, "rollout", 0))
    assert isinstance(table.grant(asked, name, f"t-{name}", "here", now), LeaseGrant)
    assert table.redeem(f"t-{name}", now) is not None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (ask(version=4, root=None), "the shard holds version 3, not 4"),
        (ask(version=2), "the shard holds version 3, not 2"),
        (ask(root="r4"), "the shard holds other bytes than version 3 has by the log"),
    ],
)
def test_grants_nothing_but_what_is_asked_for(table: LeaseTable, wrong: LeaseRequest, why: str) -> None:
    assert table.grant(wrong, "one", "t", "here", 0.0) == LeaseRefusal(reason=why)


@pytest.mark.parametrize("root", [None, NO_ROOT])
def test_an_offer_without_number_is_granted_by_a_real_root_alone(root: str | None) -> None:
    """What is being published without digests could be anything: nobody may take it for what was published before."""
    table = LeaseTable()
    table.offer(KEY, None, root or "r3", b"")
    refusal = table.grant(ask(root=root), "one", "t", "here", 0.0)
    assert refusal == LeaseRefusal(reason="the shard's publication has no number yet")


def test_a_ticket_opens_once(table: LeaseTable) -> None:
    opened(table)
    assert table.redeem("t-one", 0.0) is None


def test_a_ticket_that_is_shown_late_is_void(table: LeaseTable) -> None:
    table.grant(ask(), "one", "t-one", "here", 0.0)
    assert table.redeem("t-one", LeaseLimits().ticket_s) is None
    table.check()


def test_what_is_due_at_its_deadline_is_over_then(table: LeaseTable) -> None:
    """A driver that ticks at `deadline()` gets on: equal times are due."""
    opened(table)
    when = table.deadline()
    assert when == LeaseLimits().silence_s_max
    assert [lease.name for lease in table.expire(when)] == ["one"]
    assert table.deadline() is None


def test_renewing_keeps_a_lease(table: LeaseTable) -> None:
    opened(table)
    assert table.renew("one", 5.0)
    assert table.expire(LeaseLimits().silence_s_max) == []
    assert table.holds("one")


def test_who_renews_too_late_learns_that_the_lease_is_over(table: LeaseTable) -> None:
    opened(table)
    table.expire(LeaseLimits().silence_s_max)
    assert not table.renew("one", LeaseLimits().silence_s_max)
    assert table.deadline() is None


def test_what_ended_in_order_is_told_from_what_was_broken(table: LeaseTable) -> None:
    """A reader whose lease was broken may have read anything; one that is done had the memory to its end."""
    leases = {}
    for name in ("done", "gone", "late", "broken"):
        table.grant(ask(), name, f"t-{name}", "here", 0.0)
        leases[name] = table.redeem(f"t-{name}", 1.0 if name == "broken" else 0.0)
    assert table.states() == ["open"] * 4
    table.finish("done", LeaseTransition.DONE)
    table.finish("gone", LeaseTransition.READER_GONE)
    table.expire(LeaseLimits().silence_s_max)
    table.withdraw_offer(KEY)
    assert {name: lease and lease.state for name, lease in leases.items()} == {
        "done": LeaseState.ENDED,
        "gone": LeaseState.ENDED,
        "late": LeaseState.BROKEN,
        "broken": LeaseState.BROKEN,
    }
    assert table.states() == []


def test_what_has_no_reader_keeps_nobody_waiting(table: LeaseTable) -> None:
    assert (table.reading(KEY), table.awaiting(KEY)) == (0, 0)
    assert table.reading(ShardKey("policy", "nobody", 0)) == 0


@pytest.mark.parametrize("mapped", [False, True])
def test_the_grant_says_whether_the_memory_is_mapped(*, table: LeaseTable, mapped: bool) -> None:
    granted = table.grant(msgspec.structs.replace(ask(), mapped=mapped), "one", "t-one", "here", 0.0)
    assert isinstance(granted, LeaseGrant)
    assert granted.mapped is mapped


# ------------------------------------------------------------------------------------------------------ lists in pages


def test_the_pages_of_a_list_make_the_list() -> None:
    """Only whoever has the whole list can hold its root against the log's."""
    digests = b"".join(number.to_bytes(PIECE_DIGEST_BYTES) for number in range(2 * DIGESTS_PAGE_PIECES + 5))
    table = LeaseTable()
    table.offer(KEY, 3, "r3", digests)
    granted = table.grant(ask(), "one", "t-one", "here", 0.0)
    assert isinstance(granted, LeaseGrant)
    assert granted.pieces == 2 * DIGESTS_PAGE_PIECES + 5
    assert granted.digests == table.page("one", 0)
    pages = [table.page("one", page * DIGESTS_PAGE_PIECES) for page in range(4)]
    assert [len(page) // PIECE_DIGEST_BYTES for page in pages] == [DIGESTS_PAGE_PIECES, DIGESTS_PAGE_PIECES, 5, 0]
    assert b"".join(pages) == digests
    assert table.page("one", 1) == digests[PIECE_DIGEST_BYTES:][: DIGESTS_PAGE_PIECES * PIECE_DIGEST_BYTES]


def test_who_asks_for_a_page_without_a_lease_or_before_its_beginning_gets_nothing(table: LeaseTable) -> None:
    table.offer(KEY, 3, "r3", bytes(8 * PIECE_DIGEST_BYTES))
    opened(table)
    assert table.page("one", -1) == b""
    assert table.page("two", 0) == b""
    table.break_all(KEY)
    assert table.page("one", 0) == b""


def test_a_draining_shard_keeps_its_readers_and_takes_no_more(table: LeaseTable) -> None:
    opened(table)
    table.stop_granting(KEY)
    refusal = table.grant(ask(), "two", "t-two", "here", 0.0)
    assert refusal == LeaseRefusal(reason="the shard is not published here, or it is draining")
    assert table.holds("one")
    assert table.reading(KEY) == 1


def test_a_broken_lease_holds_no_more_and_is_told_once(table: LeaseTable) -> None:
    opened(table)
    assert table.withdraw_offer(KEY) == ["one"]
    assert not table.holds("one")
    assert table.withdraw_offer(KEY) == []
    table.check()


def test_a_granted_lease_that_is_not_open_vouches_for_nothing(table: LeaseTable) -> None:
    table.grant(ask(), "one", "t-one", "here", 0.0)
    assert not table.holds("one")
    assert table.finish("one", LeaseTransition.DONE) == KEY
    assert table.finish("one", LeaseTransition.DONE) is None


def test_a_shard_has_room_for_so_many_readers(table: LeaseTable) -> None:
    for number in range(READERS_MAX):
        opened(table, str(number), agent=f"agent-{number}")
    assert isinstance(table.grant(ask(), "more", "t", "here", 0.0), LeaseRefusal)


def test_one_agent_leaves_room_for_the_others(table: LeaseTable) -> None:
    """Whoever asks for leases and shows no ticket has so many of them, and no reader of another agent notices."""
    for number in range(LEASES_OF_ONE_MAX):
        assert isinstance(table.grant(ask(), str(number), f"t-{number}", "here", 0.0), LeaseGrant)
    refused = table.grant(ask(), "more", "t", "here", 0.0)
    assert isinstance(refused, LeaseRefusal)
    assert "agent-1" in refused.reason
    # The names begin alike, and are of two agents.
    opened(table, "other", agent="agent-10")
    table.check()


def test_a_ticket_is_for_the_agent_that_asked(table: LeaseTable) -> None:
    table.grant(ask(), "one", "t-one", "here", 0.0)
    assert table.is_for("t-one", "agent-1")
    assert not table.is_for("t-one", "agent-10")
    assert not table.is_for("t-one", "agent")
    assert not table.is_for("t-two", "agent-1")


def test_an_ended_lease_moves_no_more() -> None:
    ended = {LeaseState.ENDED, LeaseState.BROKEN}
    assert not [move for move in LEASE_TRANSITIONS if move[0] in ended]


# A lease that is held until its reader comes to it.


def holding(hold_s: float, again: str = "", agent: str = "agent-1") -> LeaseRequest:
    return msgspec.structs.replace(ask(reader=SourceId(agent, 1, "rollout", 0)), hold_s=hold_s, again=again)


def test_a_ticket_is_good_for_as_long_as_it_is_to_be_held_and_no_longer_than_may_be(table: LeaseTable) -> None:
    answer = table.grant(holding(2 * LeaseLimits().hold_s_max), "one", "t", "here", 0.0)
    assert isinstance(answer, LeaseGrant)
    assert answer.ticket_s == LeaseLimits().hold_s_max
    assert table.expire(LeaseLimits().hold_s_max - 0.1) == []
    assert table.redeem("t", LeaseLimits().hold_s_max - 0.1) is not None


def test_who_asks_again_holds_it_for_longer_with_the_same_ticket(table: LeaseTable) -> None:
    first = table.grant(holding(LeaseLimits().hold_s_max), "one", "t", "here", 0.0)
    assert table.grant(holding(LeaseLimits().hold_s_max, "one"), "two", "u", "here", 20.0) == first
    assert table.reading(KEY) == 1
    assert table.expire(LeaseLimits().hold_s_max + 19.0) == []
    assert table.redeem("t", LeaseLimits().hold_s_max + 19.0) is not None
    assert table.grant(holding(LeaseLimits().hold_s_max, "one"), "two", "u", "here", 50.0) == LeaseRefusal(
        reason="its lease is over"
    )


def test_only_the_reader_of_a_lease_holds_it_and_only_as_long_as_it_stands(table: LeaseTable) -> None:
    table.grant(holding(LeaseLimits().hold_s_max), "one", "t", "here", 0.0)
    refusal = LeaseRefusal(reason="its lease is over")
    assert table.grant(holding(LeaseLimits().hold_s_max, "one", "agent-7"), "two", "u", "here", 1.0) == refusal
    assert not table.is_of("one", "agent-7")
    assert table.is_of("one", "agent-1")
    table.break_all(KEY)
    assert table.grant(holding(LeaseLimits().hold_s_max, "one"), "two", "u", "here", 2.0) == refusal
    table.check()
