"""What two releases may write differently of one event, and what they may not."""

import json

import msgspec
import pytest

from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import HeldShard, Sender
from tensorhub_common.protocol.log.events import (
    AgentJoined,
    AnyEvent,
    CommandRejected,
    RoundDecided,
    ShardRegistered,
    Sibling,
)
from tensorhub_registry.core.release_agreement import agrees

BY = Sender("a", 1, 1)
JOINED = AgentJoined(
    cmd=7,
    i=1,
    k=2,
    time=1.5,
    by=BY,
    agent="a",
    incarnation=1,
    host="h",
    site="s",
    rack="r1",
    kept=(HeldShard(model="m", replica="r", shard=0, version=3, root="0"),),
)
REGISTERED = ShardRegistered(
    cmd=9,
    i=1,
    k=1,
    model="m",
    replica="r",
    shard=1,
    shards=2,
    spot=False,
    agent="a",
    layout="L",
    siblings=(Sibling(0, "L"),),
)


def stored(event: AnyEvent, **changes: object) -> bytes:
    return json.dumps({**json.loads(encode(event)), **changes}).encode()


def without(event: AnyEvent, *names: str) -> bytes:
    return json.dumps({name: value for name, value in json.loads(encode(event)).items() if name not in names}).encode()


@pytest.mark.parametrize("event", [JOINED, REGISTERED])
def test_what_was_written_here_agrees(event: AnyEvent) -> None:
    assert agrees(event, encode(event))


def test_an_older_release_does_not_write_a_field_that_has_a_value_here() -> None:
    """The defect: equality compared a default with the value, and the job stopped."""
    assert agrees(JOINED, without(JOINED, "rack"))


def test_a_newer_release_writes_a_field_that_is_none_here() -> None:
    assert agrees(JOINED, stored(JOINED, zone="z"))


def test_nested_fields_are_passed_over_alike() -> None:
    holding = {"model": "m", "replica": "r", "shard": 0, "version": 3, "root": "0", "later": 1}
    assert agrees(JOINED, stored(JOINED, kept=[holding]))
    del holding["root"]
    assert agrees(JOINED, stored(JOINED, kept=[holding]))
    assert not agrees(JOINED, stored(JOINED, kept=[{**holding, "version": 4}]))


def test_arrays_of_fields_grow_at_their_end() -> None:
    assert agrees(REGISTERED, stored(REGISTERED, siblings=[[0, "L", "later"]]))
    assert agrees(REGISTERED, stored(REGISTERED, siblings=[[0]]))
    assert not agrees(REGISTERED, stored(REGISTERED, siblings=[[1, "L"]]))


@pytest.mark.parametrize(
    "changes",
    [
        {"cmd": 8},
        {"i": 2},
        {"k": 1},
        {"time": 1.25},
        {"by": None},
        {"by": {"lane": "b", "incarnation": 1, "n": 1}},
        {"kind": "agent.lost"},
        {"agent": "b"},
        {"rack": "r2"},
        {"kept": []},
        {"dropped": [{"model": "m", "replica": "r", "shard": 0}]},
    ],
)
def test_a_difference_in_what_both_know_is_one(changes: dict[str, object]) -> None:
    assert not agrees(JOINED, stored(JOINED, **changes))


@pytest.mark.parametrize("roots", [[], ["1"], ["0", "1"], [None], "0"])
def test_lists_of_another_length_differ(roots: object) -> None:
    event = RoundDecided(cmd=1, i=1, k=1, model="m", replica="r", round=1, attempt=1, version=1, roots=("0",))
    assert agrees(event, encode(event))
    assert not agrees(event, stored(event, roots=roots))


def test_sentences_may_be_put_otherwise() -> None:
    event = CommandRejected(cmd=1, i=1, k=1, verb="pin", error="BadCommand", message="no")
    assert agrees(event, stored(event, message="not today"))
    assert not agrees(event, stored(event, error="RetentionFull"))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"{}", b"\xff", b"[" * 10_000])
def test_what_is_no_event_agrees_with_none(data: bytes) -> None:
    assert not agrees(JOINED, data)


def test_numbers_count_by_their_value() -> None:
    """JSON has one kind of number."""
    event = msgspec.structs.replace(JOINED, time=1.0)
    assert agrees(event, stored(event, time=1))
