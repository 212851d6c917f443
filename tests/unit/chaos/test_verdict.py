"""The counter of outcomes finds what it is there to find: a log that is wrong in one place has one finding."""

import msgspec
import pytest
from tests.chaos.verdict import LogVerdict

from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.events import AnyEvent, CommandRejected, ShardFilled, VersionPublished


def command(seq: int, msg_id: str = "") -> StoredEntry:
    return StoredEntry(seq, 0.0, "tensorhub.v1.j.cmd.publish", {"Nats-Msg-Id": msg_id or f"id-{seq}"}, b"")


def event(seq: int, cmd: int, i: int = 1, k: int = 1, what: AnyEvent | None = None) -> StoredEntry:
    said = what or CommandRejected(verb="publish", error="BadCommand", message="no")
    body = encode(msgspec.structs.replace(said, cmd=cmd, i=i, k=k))
    return StoredEntry(seq, 0.0, "tensorhub.v1.j.event.m.command.rejected", {}, body)


def read(*entries: StoredEntry) -> LogVerdict:
    verdict = LogVerdict()
    verdict.read(entries)
    return verdict


def test_a_log_as_it_should_be() -> None:
    verdict = read(command(1), command(2), event(3, 1, 1, 2), command(4), event(5, 1, 2, 2), event(6, 2), event(7, 4))
    assert not verdict.wrongs
    assert not verdict.undecided
    assert verdict.groups == {1: 2, 2: 1, 4: 1}
    assert not verdict.lost({"id-1": 1, "id-4": 4})


@pytest.mark.parametrize(
    ("entries", "finding"),
    [
        ((command(1), event(2, 1), event(3, 1)), "second group"),
        ((command(1), command(2), event(3, 1, 1, 2), event(4, 2)), "breaks into the group"),
        ((command(1), command(2), event(3, 2), event(4, 1)), "comes after the group"),
        ((command(1), event(2, 1, 2, 2)), "the middle of one"),
        ((event(1, 7),), "answers no command"),
        ((command(1), event(3, 1)), "entry 3 follows 1"),
    ],
)
def test_what_is_wrong_is_found(entries: tuple[StoredEntry, ...], finding: str) -> None:
    (wrong,) = read(*entries).wrongs
    assert finding in wrong


def test_a_command_without_a_whole_outcome_is_undecided_and_an_acknowledged_one_stands_exactly_once() -> None:
    for events in ((), (event(2, 1, 1, 3), event(3, 1, 2, 3))):
        assert read(command(1), *events).undecided == [1]
    for entries in ((), (command(1, "mine"), command(2, "mine")), (command(1), command(2, "mine"))):
        assert len(read(*entries).lost({"mine": 1})) == 1


def test_one_place_has_one_root_at_one_version() -> None:
    published = VersionPublished(model="m", version=1, replica="t", roots=("a" * 32,))
    filled = ShardFilled(model="m", replica="r", shard=0, version=1, round=1, root="b" * 32)
    entries = (command(1), event(2, 1, what=published), command(3), event(4, 3, what=filled))
    (wrong,) = read(*entries).wrongs
    assert "another root" in wrong
    (wrong,) = read(*entries[:3], event(4, 3, what=published)).wrongs
    assert "second time" in wrong
