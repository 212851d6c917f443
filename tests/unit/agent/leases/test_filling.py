"""A shard that is being filled serves readers of later turns, with what stands in it."""

import pytest

from tensorhub_agent.leases.lease import LeaseTransition
from tensorhub_agent.leases.table import LeaseTable
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.plans import ReadPriority, SourceId

KEY = ShardKey("m", "middle", 0)
TURN = ReadPriority(10, 3)
PIECES = 4
LIST = b"d" * (PIECES * PIECE_DIGEST_BYTES)
ALL = ((0, PIECES),)


def ask(turn: ReadPriority | None, version: int = 7, root: str | None = "root") -> LeaseRequest:
    return LeaseRequest(
        job="j",
        model="m",
        source=SourceId("a", 1, "middle", 0),
        version=version,
        root=root,
        reader=SourceId("b", 1, "tail", 0),
        turn=turn,
    )


@pytest.fixture
def table() -> LeaseTable:
    """A shard that is to be filled with version 7, of whose digests the log's root has vouched."""
    made = LeaseTable()
    made.begin_fill(KEY, 7, "root", TURN, PIECES)
    made.set_digests(KEY, LIST)
    return made


def granted(table: LeaseTable, name: str = "one") -> LeaseGrant:
    answer = table.grant(ask(ReadPriority(11, 1)), name, f"ticket-{name}", "here", 0.0)
    table.check()
    assert isinstance(answer, LeaseGrant)
    return answer


def opened(table: LeaseTable, name: str = "one") -> None:
    granted(table, name)
    assert table.redeem(f"ticket-{name}", 0.0) is not None


@pytest.mark.parametrize("turn", [None, ReadPriority(9, 9), ReadPriority(10, 2), TURN])
def test_only_later_turns_are_served(table: LeaseTable, turn: ReadPriority | None) -> None:
    assert table.grant(ask(turn), "one", "ticket", "here", 0.0) == LeaseRefusal(
        reason="the shard is being filled, and its turn is not earlier than the reader's"
    )


def test_of_one_command_the_round_counts(table: LeaseTable) -> None:
    assert isinstance(table.grant(ask(ReadPriority(10, 4)), "one", "ticket", "here", 0.0), LeaseGrant)


@pytest.mark.parametrize(
    "wrong",
    [ask(ReadPriority(11, 1), version=8), ask(ReadPriority(11, 1), root="other"), ask(ReadPriority(11, 1), root=None)],
)
def test_only_what_is_filled_in_is_granted(table: LeaseTable, wrong: LeaseRequest) -> None:
    assert isinstance(table.grant(wrong, "one", "ticket", "here", 0.0), LeaseRefusal)


def test_the_answer_waits_for_the_digests() -> None:
    table = LeaseTable()
    table.begin_fill(KEY, 7, "root", TURN, PIECES)
    assert table.grant(ask(ReadPriority(11, 1)), "one", "ticket", "here", 0.0) is None
    table.set_digests(KEY, LIST)
    assert granted(table).digests == LIST


def test_a_reader_is_told_what_stands_there(table: LeaseTable) -> None:
    """At the opening what there is, then each piece; and before that it may not be asked for."""
    assert granted(table).filling
    assert table.pieces_available(KEY, [(0, 1)]) == [], "nobody has shown a ticket"
    lease = table.redeem("ticket-one", 0.0)
    assert lease is not None
    assert lease.pieces() == ((0, 1),)
    assert not table.is_missing("one", 0, 1)
    assert table.is_missing("one", 0, 2)
    assert table.pieces_available(KEY, [(1, 1)]) == ["one"]
    assert not table.is_missing("one", 0, 2)
    assert table.waits("one")


def test_what_is_not_there_yet_keeps_nobody_from_what_is(table: LeaseTable) -> None:
    opened(table)
    table.pieces_available(KEY, [(2, 1)])
    assert not table.is_missing("one", 2, 3)
    assert table.is_missing("one", 1, 3)
    assert table.is_missing("one", 2, 4)


def test_leases_go_on_when_the_shard_is_ready(table: LeaseTable) -> None:
    """One was opened before, one is opened after; both have everything, and an unpublish waits for both."""
    opened(table, "one")
    granted(table, "two")
    table.pieces_available(KEY, ALL)
    table.offer(KEY, 7, "root", LIST)
    table.check()
    assert table.reading(KEY) == 2
    assert not table.waits("one")
    assert not table.is_missing("one", 0, PIECES)
    lease = table.redeem("ticket-two", 0.0)
    assert lease is not None
    assert lease.pieces() == ALL, "it was told to wait for being told"
    assert table.finish("one", LeaseTransition.DONE) == KEY
    assert table.reading(KEY) == 1


def test_a_fill_that_is_given_up_breaks_its_readers_leases(table: LeaseTable) -> None:
    opened(table, "one")
    assert table.cancel_fill(KEY) == ["one"]
    table.check()
    assert not table.holds("one")
    assert table.is_missing("one", 0, 1)
    assert isinstance(table.grant(ask(ReadPriority(11, 1)), "two", "ticket", "here", 0.0), LeaseRefusal)


def test_readers_of_what_stood_there_before_are_others() -> None:
    """The shard still offers version 6 while its round waits: breaking those leases leaves the new ones."""
    other = LeaseTable()
    other.offer(KEY, 6, "old", LIST)
    old = ask(None, version=6, root="old")
    assert isinstance(other.grant(old, "old", "ticket-old", "here", 0.0), LeaseGrant)
    other.begin_fill(KEY, 7, "root", TURN, PIECES)
    other.set_digests(KEY, LIST)
    opened(other, "new")
    assert other.break_all(KEY) == ["old"]
    assert other.holds("new")
    assert other.awaiting(KEY) == 1
