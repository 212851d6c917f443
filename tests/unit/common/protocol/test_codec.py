"""Between bytes and structs: what is read, and what is answered with a reason instead."""

import json
from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest

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
    CommandRejected,
    Event,
    VersionPublished,
    kind_of,
    model_of,
)
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL

COMMANDS: tuple[type[Command], ...] = get_args(AnyCommand)
EVENTS: tuple[type[Event], ...] = get_args(AnyEvent)
BY = {"lane": "a/0", "incarnation": 1, "n": 1}
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


# ---------------------------------------------------------------------------------------------------------- commands


def test_a_publication_from_outside_needs_three_words() -> None:
    body = {"verb": "publish", "model": "policy", "replica": "trainer"}
    assert read(body, "publish", None) == Publish(model="policy", replica="trainer", version=None)


def test_an_agents_command_names_its_sender() -> None:
    assert read(WANT, "want") == Want(by=Sender("a/0", 1, 1), model="m", replica="r", shard=0, want="latest")


@pytest.mark.parametrize("want", [0, VERSION_MAX, "latest", "newer"])
def test_wishes_that_are_read(want: object) -> None:
    assert isinstance(read({**WANT, "want": want}, "want"), Want)


@pytest.mark.parametrize("want", [1.0, 1.5, True, None, "later", "7", [], {}])
def test_wishes_that_are_none(want: object) -> None:
    assert "no command" in reason(read({**WANT, "want": want}, "want"))


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
    assert "no command" in reason(decode_command("publish", None, data, NEWEST_LEVEL))


def test_a_field_that_no_command_has_is_refused() -> None:
    """A misspelt `versoin` must not be taken for a wish without a version."""
    body = {"verb": "publish", "model": "m", "replica": "r", "versoin": 12}
    assert "versoin" in reason(read(body, "publish", None))


def test_who_uses_nothing_new_says_nothing_that_an_earlier_release_would_refuse() -> None:
    """An agent without a rack joins as one did before there were racks, and such a join is still read as it was."""
    join = Join(by=Sender("a", 1, 1), host="h", site="s")
    assert set(msgspec.json.decode(encode(join))) == {"verb", "by", "host", "site"}
    before = b'{"verb":"join","by":{"lane":"a","incarnation":1,"n":1},"host":"h","site":"s","holds":[],"cache_bytes":0}'
    assert decode_command("join", "a", before, NEWEST_LEVEL) == join


def test_a_body_that_is_too_long_is_not_even_parsed() -> None:
    assert "at most" in reason(decode_command("publish", None, b" " * (COMMAND_BYTES_MAX + 1), NEWEST_LEVEL))


def test_subject_and_body_must_agree_on_the_verb() -> None:
    assert "must agree" in reason(read(WANT, "publish"))


def test_who_may_publish_on_a_processs_subject_is_that_process_and_nobody_else() -> None:
    assert "sender of 'b'" in reason(read(WANT, "want", "b"))
    assert "sender of 'a'" in reason(read({**WANT, "by": None}, "want", "a"))
    assert "sender of 'a'" in reason(read({**WANT, "by": {**BY, "lane": "ab/0"}}, "want", "a"))
    assert "sender of 'a'" in reason(read({**WANT, "by": {**BY, "lane": "/a"}}, "want", "a"))


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
    numbers |= {"incarnation", "term", "level", "wish"}
    return {"want": 1, "holds": [], **flags}.get(name, 1 if name in numbers else "x")


def test_an_outsider_can_not_speak_in_an_agents_name() -> None:
    body = {"verb": "publish", "model": "m", "replica": "r", "by": BY}
    assert "own subject" in reason(read(body, "publish", None))


def test_every_command_reads_back_as_it_was_written() -> None:
    for command in (
        Join(by=Sender("a", 1, 1), host="h", site="s"),
        Ready(by=Sender("a/0", 1, 2), model="m", replica="r", shard=3, version=None, root="0" * 32),
        Expire(by=Sender("_registry", 4, 1), agent="a", incarnation=1, term=4),
    ):
        assert command.by is not None
        verb = str(command.__struct_config__.tag)
        assert decode_command(verb, command.by.process, encode(command), NEWEST_LEVEL) == command


def test_every_command_that_there_is_is_read() -> None:
    assert set(leaves_of(Command)) == set(get_args(AnyCommand))


# ------------------------------------------------------------------------------------------------------------ events


def test_every_event_that_there_is_is_read() -> None:
    assert set(leaves_of(Event)) == set(get_args(AnyEvent))


def test_an_event_reads_back_as_it_was_written() -> None:
    event = VersionPublished(
        cmd=7, i=1, k=2, time=1.25, by=Sender("a/0", 1, 1), model="m", version=12, replica="r", roots=("0" * 32,)
    )
    assert decode_event(encode(event)) == event
    assert json.loads(encode(event))["kind"] == "version.published"


def test_a_later_field_of_an_event_is_passed_over() -> None:
    """A program of an older version goes on reading the log."""
    body = json.loads(encode(CommandRejected(verb="publish", error="BadCommand", message="no")))
    assert decode_event(json.dumps({**body, "later": 1}).encode()) == CommandRejected(
        verb="publish", error="BadCommand", message="no"
    )


@pytest.mark.parametrize("data", [b"", b"{}", b'{"kind":"version.flown"}', b'{"kind":"version.published"}', b"\xff"])
def test_what_is_no_event_raises(data: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        decode_event(data)


@pytest.mark.parametrize("kind", EVENTS)
def test_every_kind_has_a_noun_and_what_became_of_it(kind: type[Event]) -> None:
    """It stands in the subject, as `event.<model>.<noun>.<what>`."""
    noun, _, what = str(kind.__struct_config__.tag).partition(".")
    assert noun.isalpha()
    assert what.isalpha()


def test_an_event_of_no_model_is_the_hubs() -> None:
    joined = AgentJoined(agent="a", incarnation=1, host="h", site="s")
    assert (kind_of(joined), model_of(joined)) == ("agent.joined", HUB_MODEL)
    assert model_of(CommandRejected(verb="v", error="e", message="m", model="policy")) == "policy"
