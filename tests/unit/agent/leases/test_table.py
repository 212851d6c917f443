"""Leases: granted for exactly what stands, once, and only as long as it stays.

A shard that is being filled serves readers of later turns, with what stands in it.
"""

from typing import Any

import msgspec
import pytest

from tensorhub_agent.leases.delta_store import NO_PATCH, SIZE, PatchOffer
from tensorhub_agent.leases.lease import LEASE_TRANSITIONS, LeaseState, LeaseTransition
from tensorhub_agent.leases.table import LEASES_OF_ONE_MAX, READERS_MAX, LeaseLimits, LeaseTable
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.primitives.program_units import PieceCompletion
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of, pieces
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.leases import DIGESTS_PAGE_PIECES, LeaseGrant, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import ReadPriority, SourceId
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex

KEY = ShardKey("policy", "trainer", 0)
LIMITS = LeaseLimits()
PIECES = 4
ALL = ((0, PIECES),)
LIST = b"d" * (PIECES * PIECE_DIGEST_BYTES)
TURN = ReadPriority(10, 3)
LATER = ReadPriority(11, 1)
EARLIER = ReadPriority(9, 9)


def ask(agent: str = "agent-1", **more: Any) -> LeaseRequest:
    made = LeaseRequest(
        job="j", model=KEY.model, source=SourceId("agent-0", 1, KEY.replica, KEY.shard), version=3, root="r3",
        reader=SourceId(agent, 1, "rollout", 0),
    )  # fmt: skip
    return msgspec.structs.replace(made, **more)


@pytest.fixture
def table() -> LeaseTable:
    """A shard that holds version 3."""
    table = LeaseTable()
    table.offer(KEY, 3, "r3", b"")
    return table


@pytest.fixture
def coming() -> LeaseTable:
    """A shard that is to be filled with version 3, of whose digests the log's root has vouched."""
    table = LeaseTable()
    table.begin_fill(KEY, 3, "r3", TURN, PIECES)
    table.set_digests(KEY, LIST)
    return table


def answer(table: LeaseTable, asked: LeaseRequest, name: str = "one", now: float = 0.0) -> LeaseGrant | str | None:
    """Return what is granted, or the reason of a refusal; None: that is not known yet."""
    found = table.grant(asked, name, f"t-{name}", "here", now)
    table.check()
    return found.reason if isinstance(found, LeaseRefusal) else found


def granted(table: LeaseTable, name: str = "one", **more: Any) -> LeaseGrant:
    found = answer(table, ask(**more), name)
    assert isinstance(found, LeaseGrant)
    return found


def opened(table: LeaseTable, name: str = "one", **more: Any) -> None:
    granted(table, name, **more)
    assert table.redeem(f"t-{name}", 0.0) is not None


# What stands.


@pytest.mark.parametrize(
    ("version", "root", "asked", "why"),
    [
        (3, "r3", {"root": None}, None),
        (None, "r3", {}, None),
        (3, "r3", {"version": 4, "root": None}, "the shard holds version 3, not 4"),
        (3, "r3", {"version": 2}, "the shard holds version 3, not 2"),
        (3, "r3", {"root": "r4"}, "the shard holds other bytes than version 3 has by the log"),
        # What is published without digests could be anything: nobody may take it for what was published before.
        (None, "r3", {"root": None}, "the shard's publication has no number yet"),
        (None, NO_ROOT, {"root": NO_ROOT}, "the shard's publication has no number yet"),
        (3, NO_ROOT, {"root": NO_ROOT}, None),
    ],
)
def test_grants_nothing_but_what_is_asked_for(
    version: int | None, root: str, asked: dict[str, Any], why: str | None
) -> None:
    table = LeaseTable()
    table.offer(KEY, version, root, b"")
    found = answer(table, ask(**asked))
    if why is None:
        assert isinstance(found, LeaseGrant)
    else:
        assert found == why


def test_a_ticket_opens_once_in_time_for_the_agent_that_asked(table: LeaseTable) -> None:
    opened(table)
    assert table.redeem("t-one", 0.0) is None
    assert [granted(table, name, mapped=name == "two").mapped for name in ("two", "three")] == [True, False]
    assert table.is_for("t-two", "agent-1")
    for ticket, agent in (("t-two", "agent-10"), ("t-two", "agent"), ("t-four", "agent-1")):
        assert not table.is_for(ticket, agent)
    assert table.redeem("t-two", LIMITS.ticket_s) is None
    table.check()


def test_a_lease_lasts_as_long_as_its_reader_renews_it(table: LeaseTable) -> None:
    """A driver that ticks at `deadline()` gets on: equal times are due. Who renews too late learns that it is over."""
    opened(table)
    assert table.deadline() == LIMITS.silence_s_max
    assert table.renew("one", 5.0)
    assert table.expire(LIMITS.silence_s_max) == []
    assert table.holds("one")
    assert [lease.name for lease in table.expire(LIMITS.silence_s_max + 5.0)] == ["one"]
    assert not table.renew("one", LIMITS.silence_s_max + 5.0)
    assert table.deadline() is None


def test_what_ended_in_order_is_told_from_what_was_broken(table: LeaseTable) -> None:
    """A reader whose lease was broken may have read anything; one that is done had the memory to its end."""
    assert (table.reading(KEY), table.awaiting(KEY), table.reading(ShardKey("policy", "nobody", 0))) == (0, 0, 0)
    leases = {}
    for name in ("done", "gone", "late", "broken"):
        granted(table, name)
        assert not table.holds(name), "it is not open yet"
        leases[name] = table.redeem(f"t-{name}", 1.0 if name == "broken" else 0.0)
    assert table.states() == ["open"] * 4
    assert table.finish("done", LeaseTransition.DONE) == KEY
    assert table.finish("done", LeaseTransition.DONE) is None
    granted(table, "not opened")
    assert table.finish("not opened", LeaseTransition.READER_GONE) == KEY
    table.finish("gone", LeaseTransition.READER_GONE)
    table.expire(LIMITS.silence_s_max)
    assert table.withdraw_offer(KEY) == ["broken"]
    assert table.withdraw_offer(KEY) == [], "it is told once"
    table.check()
    ended, broken = LeaseState.ENDED, LeaseState.BROKEN
    assert [lease and lease.state for lease in leases.values()] == [ended, ended, broken, broken]
    assert (table.states(), table.holds("broken")) == ([], False)
    assert not [move for move in LEASE_TRANSITIONS if move[0] in (ended, broken)], "an ended lease moves no more"


def test_a_draining_shard_keeps_its_readers_and_takes_no_more(table: LeaseTable) -> None:
    opened(table)
    table.stop_granting(KEY)
    assert answer(table, ask(), "two") == NOT_HERE
    assert table.holds("one")
    assert table.reading(KEY) == 1


def test_a_shard_has_room_for_so_many_readers_and_so_many_of_one_agent(table: LeaseTable) -> None:
    """Whoever asks for leases and shows no ticket has so many of them, and no reader of another agent notices."""
    for number in range(LEASES_OF_ONE_MAX):
        granted(table, str(number))
    assert f"'agent-1' has {LEASES_OF_ONE_MAX} leases" in str(answer(table, ask(), "more"))
    # The names begin alike, and are of two agents.
    opened(table, "other", agent="agent-10")
    for number in range(READERS_MAX - LEASES_OF_ONE_MAX - 1):
        opened(table, f"more-{number}", agent=f"agent-1{number}-")
    assert f"{READERS_MAX} readers" in str(answer(table, ask(agent="agent-2"), "too many"))


def test_the_pages_of_a_list_make_the_list() -> None:
    """Only whoever has the whole list can hold its root against the log's; without a lease nobody gets a page."""
    digests = b"".join(number.to_bytes(PIECE_DIGEST_BYTES) for number in range(2 * DIGESTS_PAGE_PIECES + 5))
    table = LeaseTable()
    table.offer(KEY, 3, "r3", digests)
    found = granted(table)
    assert found.pieces == 2 * DIGESTS_PAGE_PIECES + 5
    assert found.digests == table.page("one", 0)
    pages = [table.page("one", page * DIGESTS_PAGE_PIECES) for page in range(4)]
    assert [len(page) // PIECE_DIGEST_BYTES for page in pages] == [DIGESTS_PAGE_PIECES, DIGESTS_PAGE_PIECES, 5, 0]
    assert b"".join(pages) == digests
    assert table.page("one", 1) == digests[PIECE_DIGEST_BYTES:][: DIGESTS_PAGE_PIECES * PIECE_DIGEST_BYTES]
    assert table.page("one", -1) == table.page("two", 0) == b""
    table.break_all(KEY)
    assert table.page("one", 0) == b""


# A lease that is held until its reader comes to it.

HOLD_S = LIMITS.hold_s_max


def test_a_ticket_is_good_for_as_long_as_it_is_to_be_held_and_no_longer_than_may_be(table: LeaseTable) -> None:
    """Who asks again holds it for longer, with the same ticket."""
    first = granted(table, hold_s=2 * HOLD_S)
    assert first.ticket_s == HOLD_S
    assert answer(table, ask(hold_s=HOLD_S, again="one"), "two", 20.0) == first
    assert table.reading(KEY) == 1
    assert table.expire(HOLD_S + 19.0) == []
    assert table.redeem("t-one", HOLD_S + 19.0) is not None
    assert answer(table, ask(hold_s=HOLD_S, again="one"), "two", 50.0) == "its lease is over"


def test_only_the_reader_of_a_lease_holds_it_and_only_as_long_as_it_stands(table: LeaseTable) -> None:
    granted(table, hold_s=HOLD_S)
    assert answer(table, ask("agent-7", hold_s=HOLD_S, again="one"), "two", 1.0) == "its lease is over"
    assert [table.is_of("one", agent) for agent in ("agent-7", "agent-1")] == [False, True]
    table.break_all(KEY)
    assert answer(table, ask(hold_s=HOLD_S, again="one"), "two", 2.0) == "its lease is over"


# A shard that is being filled.

NOT_HERE = "the shard is not published here, or it is draining"
NOT_LATER = "the shard is being filled, and its turn is not earlier than the reader's"
OTHER_PROGRAM = "the shard is not filled by the program by which the reader goes"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"turn": LATER}, None),
        # Of one command the round counts.
        ({"turn": ReadPriority(10, 4)}, None),
        *(({"turn": turn}, NOT_LATER) for turn in (None, EARLIER, ReadPriority(10, 2), TURN)),
        ({"turn": LATER, "version": 4}, NOT_HERE),
        ({"turn": LATER, "root": "other"}, NOT_HERE),
        ({"turn": LATER, "root": None}, NOT_HERE),
        # Whoever goes by units needs no root; who counts on promises waits in any turn, but for the same program.
        ({"turn": LATER, "root": None, "units": True}, None),
        ({"turn": EARLIER, "promises": True}, None),
        ({"turn": EARLIER, "promises": True, "program": "p"}, OTHER_PROGRAM),
    ],
)
def test_only_later_turns_are_served_with_what_is_filled_in(
    coming: LeaseTable, asked: dict[str, Any], why: str | None
) -> None:
    found = answer(coming, ask(**asked))
    if why is None:
        assert isinstance(found, LeaseGrant)
        assert (found.filling, found.digests) == (True, LIST)
    else:
        assert found == why


def test_a_reader_is_told_what_stands_there() -> None:
    """Once there are digests: at the opening what there is, then each piece; before that it may not be asked for."""
    coming = LeaseTable()
    coming.begin_fill(KEY, 3, "r3", TURN, PIECES)
    assert answer(coming, ask(turn=LATER)) is None
    coming.set_digests(KEY, LIST)
    assert granted(coming, turn=LATER).digests == LIST
    assert coming.pieces_available(KEY, [(0, 1)]) == [], "nobody has shown a ticket"
    lease = coming.redeem("t-one", 0.0)
    assert lease is not None
    assert lease.pieces() == ((0, 1),)
    assert [coming.is_missing("one", 0, last) for last in (1, 2)] == [False, True]
    assert coming.pieces_available(KEY, [(2, 1)]) == ["one"]
    missing = [coming.is_missing("one", *each) for each in ((2, 3), (1, 3), (2, 4))]
    assert missing == [False, True, True], "what is not there yet keeps nobody from what is"
    assert coming.waits("one")


def test_leases_go_on_when_the_shard_is_ready(coming: LeaseTable) -> None:
    """One was opened before, one is opened after; both have everything, and an unpublish waits for both."""
    opened(coming, "one", turn=LATER)
    granted(coming, "two", turn=LATER)
    coming.pieces_available(KEY, ALL)
    for _ in ("filled", "published once more"):
        coming.offer(KEY, 3, "r3", LIST)
        coming.check()
    assert coming.reading(KEY) == 2
    assert not coming.waits("one")
    assert not coming.is_missing("one", 0, PIECES)
    lease = coming.redeem("t-two", 0.0)
    assert lease is not None
    assert lease.pieces() == ALL, "it was told to wait for being told"
    assert coming.finish("one", LeaseTransition.DONE) == KEY
    assert coming.reading(KEY) == 1


def test_a_fill_that_is_given_up_breaks_its_readers_leases(coming: LeaseTable) -> None:
    opened(coming, turn=LATER)
    assert coming.cancel_fill(KEY) == ["one"]
    coming.check()
    assert not coming.holds("one")
    assert coming.is_missing("one", 0, 1)
    assert isinstance(answer(coming, ask(turn=LATER), "two"), str)


def test_readers_of_what_stood_there_before_are_others() -> None:
    """The shard still offers version 2 while its round waits: breaking those leases leaves the new ones."""
    table = LeaseTable()
    table.offer(KEY, 2, "r2", LIST)
    granted(table, "old", version=2, root="r2")
    table.begin_fill(KEY, 3, "r3", TURN, PIECES)
    table.set_digests(KEY, LIST)
    opened(table, "new", turn=LATER)
    assert table.break_all(KEY) == ["old"]
    assert table.holds("new")
    assert table.awaiting(KEY) == 1


# One that is filled by a program, whose readers are told of its units.

PIECE_BYTES = 4


def filled_by_a_program(tensors: int = 3) -> LeaseTable:
    """Return the leases on a shard of so many pieces, of which each has two units, by two sources: first all of one."""

    def halves(start: int, nbytes: int) -> Layout:
        names = (f"t{number}" for number in range(tensors))
        return layout_of([TensorEntry(name, "uint8", 1, (nbytes,), (PIECE_BYTES,), (start,)) for name in names])

    mine, sources = halves(0, PIECE_BYTES), {"one": halves(0, 2), "other": halves(2, 2)} if tensors else {}
    program = NumberedProgram(compile_program("mine", mine, LayoutIndex(sources)), "program")
    table = LeaseTable()
    table.begin_fill(KEY, 3, None, TURN, tensors, units=PieceCompletion(program, pieces(mine)))
    return table


def by_units(table: LeaseTable, name: str, program: str, *, turn: ReadPriority = LATER, promises: bool = False) -> Any:
    return answer(table, ask(root=None, units=True, turn=turn, promises=promises, program=program), name)


def test_whoever_counts_on_promises_goes_by_the_same_program() -> None:
    """The units of another one are other bytes: what was promised of these would say nothing of those."""
    table = filled_by_a_program()
    assert by_units(table, "other", "another", promises=True) == OTHER_PROGRAM
    found = by_units(table, "one", "program", turn=EARLIER, promises=True)
    assert (found.promises, found.program) == (True, "program")
    assert table.counts_on_promises(KEY)
    assert answer(table, ask(again="one", hold_s=found.ticket_s)) == found


def test_readers_of_other_programs_are_told_of_pieces_and_those_of_the_same_of_units() -> None:
    table, leases = filled_by_a_program(), {}
    unknown = "the shard is filled by a program: what its pieces hash to is not known yet"
    assert [answer(table, ask(turn=LATER, root=root)) for root in (None, "r3")] == [unknown, NOT_HERE]
    for name, program, told_of in (("same", "program", "program"), ("other", "another", None)):
        found = by_units(table, name, program)
        assert (found.promises, found.program) == (False, told_of)
        leases[name] = table.redeem(f"t-{name}", 0.0)
    assert table.pieces_available(KEY, [(0, 1)]) == ["other"]
    assert table.prove_units(KEY, [(0, 2)]) == ["same"]
    assert isinstance(by_units(table, "late", "program", promises=True), LeaseGrant)
    lease = leases["late"] = table.redeem("t-late", 0.0)
    assert lease is not None
    assert lease.pieces() == ((0, 2),)
    assert table.promise(KEY, [(2, 1)], []) is not None
    assert lease.promised() == ((2, 1),)
    assert [table.lacks_units("late", 0, nbytes) for nbytes in (2, PIECE_BYTES)] == [False, True]
    assert table.lacks_units("other", 0, 2), "it is told of pieces"
    assert isinstance(by_units(table, "last", "program"), LeaseGrant)
    table.offer(KEY, 3, "root", b"")
    assert not table.lacks_units("late", 0, PIECE_BYTES)
    leases["last"] = table.redeem("t-last", 0.0)
    told = {name: each and each.pieces() for name, each in leases.items()}
    assert told == {"other": ((0, 3),), **dict.fromkeys(("same", "late", "last"), ((0, 6),))}, "without digests too"


def test_a_shard_without_tensors_has_no_units() -> None:
    table = filled_by_a_program(tensors=0)
    assert isinstance(by_units(table, "one", "program"), LeaseGrant)
    table.offer(KEY, 3, "root", b"")
    lease = table.redeem("t-one", 0.0)
    assert lease is not None
    assert lease.pieces() == ()


# A reader that may have patches instead of pieces.


def test_a_reader_hears_how_large_its_patches_are_and_of_those_that_are_made_later(table: LeaseTable) -> None:
    granted(table)
    lease = table.redeem("t-one", 0.0)
    sizes = [SIZE.pack(each) for each in (NO_PATCH, 5, 7)]
    assert (table.patch_sizes("one", 0), table.awaiting_patches("one")) == (b"", None), "it has none"
    first = PatchOffer([None, (b"five.",), None], sizes[0] + sizes[1] + sizes[0])
    assert table.patch("one", first, "base") == first.sizes
    assert lease is not None
    assert (table.awaiting_patches("one"), lease.base) == (lease, "base")
    more = PatchOffer([None, None, (b"seven..",)], sizes[0] + sizes[0] + sizes[2])
    assert table.patch("one", more, None) == b"".join(sizes)
    assert (lease.patches, table.awaiting_patches("one")) == (first, None)
    assert [table.patch_sizes("one", page) for page in (-1, 0, 1)] == [b"", b"".join(sizes), sizes[1] + sizes[2]]
    assert table.patch("two", more, "base") == b""
    assert table.awaiting_patches("two") is None
