"""Between bytes and structs: what is read, and what is answered with a reason instead."""

import json
from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest

from tensorhub_common.catalog.handlers import admin, holding, membership, publishing, rounds
from tensorhub_common.protocol.log.codec import COMMAND_BYTES_MAX, decode_command, decode_event, encode
from tensorhub_common.protocol.log.commands import (
    OUTSIDE_VERBS,
    VERSION_MAX,
    AnyCommand,
    Command,
    Expire,
    Join,
    Publish,
    Ready,
    Sender,
    Unreadable,
    Want,
)
from tensorhub_common.protocol.log.events import (
    HUB_MODEL,
    AgentJoined,
    AnyEvent,
    Event,
    VersionPublished,
    kind_of,
    model_of,
)
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL

COMMANDS: tuple[type[Command], ...] = get_args(AnyCommand)
EVENTS: tuple[type[Event], ...] = get_args(AnyEvent)
BY = {"lane": "a/0", "incarnation": 1, "n": 1}
PUBLISH = {"verb": "publish", "model": "m", "replica": "r"}
WANT = {"verb": "want", "by": BY, "model": "m", "replica": "r", "shard": 0, "want": "latest"}


def read(body: object, verb: str, process: str | None = "a") -> AnyCommand | Unreadable:
    return decode_command(verb, process, json.dumps(body).encode(), NEWEST_LEVEL)


def reason(answer: AnyCommand | Unreadable) -> str:
    assert isinstance(answer, Unreadable), answer
    return answer.reason


def leaves_of(base: type) -> Iterator[type]:
    """Yield the structs that no other one is made from."""
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        yield from leaves_of(kind)
    if not kinds:
        yield base


@pytest.mark.parametrize("want", [0, VERSION_MAX, "latest", "newer", 1.0, 1.5, True, None, "later", "7", [], {}])
def test_wishes_that_are_read_and_those_that_are_none(want: object) -> None:
    answer = read({**WANT, "want": want}, "want")
    assert isinstance(answer, Want) if want in (0, VERSION_MAX, "latest", "newer") else "no command" in reason(answer)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'"publish"',
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b'{"verb":"publish","model":"\\ud800","replica":"r"}',
        b'{"verb":"publish","model":"m"}',
        b'{"verb":"publish","model":7,"replica":"r"}',
        b'{"verb":"publish","model":"m","replica":"r","version":' + b"9" * 5000 + b"}",
        b'{"verb":"publish","model":"m","replica":"r","version":1e400}',
        b'{"verb":"fly","model":"m","replica":"r"}',
        b'{"verb":"publish","model":"m","replica":"r"} {}',
    ],
)
def test_whatever_is_no_command_is_answered_with_a_reason(data: bytes) -> None:
    """Anyone with the job's credentials may send anything, and no registry may fall over it."""
    assert read(PUBLISH, "publish", None) == Publish(model="m", replica="r", version=None)
    assert "no command" in reason(decode_command("publish", None, data, NEWEST_LEVEL))
    too_long = b" " * (COMMAND_BYTES_MAX + 1)
    assert "at most" in reason(decode_command("publish", None, too_long, NEWEST_LEVEL)), "it is not even parsed"


def test_who_uses_nothing_new_says_nothing_that_an_earlier_release_would_refuse() -> None:
    """An agent without a rack joins as one did before there were racks, and such a join is still read as it was."""
    join = Join(by=Sender("a", 1, 1), host="h", site="s")
    assert set(msgspec.json.decode(encode(join))) == {"verb", "by", "host", "site"}
    before = b'{"verb":"join","by":{"lane":"a","incarnation":1,"n":1},"host":"h","site":"s","holds":[],"cache_bytes":0}'
    assert decode_command("join", "a", before, NEWEST_LEVEL) == join


@pytest.mark.parametrize(
    ("body", "verb", "process", "why"),
    [
        (WANT, "want", "b", "sender of 'b'"),
        ({**WANT, "by": None}, "want", "a", "sender of 'a'"),
        ({**WANT, "by": {**BY, "lane": "ab/0"}}, "want", "a", "sender of 'a'"),
        ({**WANT, "by": {**BY, "lane": "/a"}}, "want", "a", "sender of 'a'"),
        ({**PUBLISH, "by": BY}, "publish", None, "own subject"),
        (WANT, "publish", "a", "must agree"),
    ],
)
def test_who_may_publish_on_a_processs_subject_is_that_process_and_nobody_else(
    body: dict[str, object], verb: str, process: str | None, why: str
) -> None:
    assert read(WANT, "want") == Want(by=Sender("a/0", 1, 1), model="m", replica="r", shard=0, want="latest")
    assert why in reason(read(body, verb, process))


@pytest.mark.parametrize("kind", COMMANDS)
def test_from_outside_only_what_users_wish_and_rule_is_taken(kind: type[Command]) -> None:
    verb = str(kind.__struct_config__.tag)
    body = {"verb": verb, **{name: _value(name) for name in kind.__struct_fields__ if name != "by"}}
    answer = read(body, verb, None)
    assert isinstance(answer, kind) if verb in OUTSIDE_VERBS else "hub's own" in reason(answer)


def _value(name: str) -> object:
    flags = {"patient": True, "spot": False, "on": True, "supersede": True, "staged": False, "void": False}
    flags |= {"mapped": False, "waits": True}
    numbers = {"shard", "shards", "nbytes", "cache_bytes", "round", "attempt", "version", "last", "to"}
    numbers |= {"incarnation", "term", "level", "wish", "n", "lasts_s"}
    return {"want": 1, "holds": [], "versions": [], **flags}.get(name, 1 if name in numbers else "x")


@pytest.mark.parametrize(
    "command",
    [
        Join(by=Sender("a", 1, 1), host="h", site="s"),
        Ready(by=Sender("a/0", 1, 2), model="m", replica="r", shard=3, version=None, root="0" * 32),
        Expire(by=Sender("_registry", 4, 1), agent="a", incarnation=1, term=4),
    ],
)
def test_a_command_reads_back_as_it_was_written(command: AnyCommand) -> None:
    assert command.by is not None
    verb = str(command.__struct_config__.tag)
    assert decode_command(verb, command.by.process, encode(command), NEWEST_LEVEL) == command


def test_all_commands_and_events_that_there_are_are_read_and_an_event_s_kind_fits_its_subject() -> None:
    assert set(leaves_of(Command)) == set(COMMANDS)
    assert set(leaves_of(Event)) == set(EVENTS)
    for kind in EVENTS:
        noun, _, what = str(kind.__struct_config__.tag).partition(".")
        assert (noun.isalpha(), what.isalpha()) == (True, True), kind


def test_an_event_reads_back_as_it_was_written_and_a_later_field_is_passed_over() -> None:
    """A program of an older version goes on reading the log."""
    event = VersionPublished(
        cmd=7, i=1, k=2, time=1.25, by=Sender("a/0", 1, 1), model="m", version=12, replica="r", roots=("0" * 32,)
    )
    body = json.loads(encode(event))
    assert body["kind"] == kind_of(event) == "version.published"
    assert decode_event(json.dumps({**body, "later": 1}).encode()) == decode_event(encode(event)) == event
    joined = AgentJoined(agent="a", incarnation=1, host="h", site="s")
    assert (kind_of(joined), model_of(joined), model_of(event)) == ("agent.joined", HUB_MODEL, "m")


@pytest.mark.parametrize("data", [b"", b"{}", b'{"kind":"version.flown"}', b'{"kind":"version.published"}', b"\xff"])
def test_what_is_no_event_raises(data: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        decode_event(data)


def test_every_command_has_one_handler() -> None:
    tables = [module.HANDLERS for module in (admin, holding, membership, publishing, rounds)]
    assert sorted(each.__name__ for table in tables for each in table) == sorted(kind.__name__ for kind in COMMANDS)
