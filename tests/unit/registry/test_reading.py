"""What an entry of the log is, whoever wrote it."""

import pytest
from tests.unit.registry.modelled_log import JOB, Entry

from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import Join, Publish, Sender, Unreadable
from tensorhub_common.protocol.log.events import CommandRejected, VersionRetired
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_registry.core.log_entries import (
    HEADER_CHARS_MAX,
    CommandOrigin,
    FoldMismatch,
    origin_of,
    read_entry,
    subject_of,
)

PREFIX = f"tensorhub.v1.{JOB}"


def entry(subject: str, data: bytes) -> Entry:
    return Entry(1, 0.0, f"{PREFIX}.{subject}", data)


def test_commands_from_outside_and_from_agents() -> None:
    wish = Publish(model="m", replica="r")
    assert read_entry(JOB, entry("cmd.publish", encode(wish)), NEWEST_LEVEL) == wish
    join = Join(by=Sender("a", 1, 1), host="h", site="s")
    assert read_entry(JOB, entry("cmd.join.a", encode(join)), NEWEST_LEVEL) == join


@pytest.mark.parametrize(
    ("subject", "data", "reason"),
    [
        ("cmd.publish", b"", "no command"),
        ("cmd.publish", b"\xff" * 900_000, "has 900000 bytes"),
        ("cmd.join.b", encode(Join(by=Sender("a", 1, 1), host="h", site="s")), "a sender of 'b'"),
        ("cmd.join.a.b", encode(Join(by=Sender("a", 1, 1), host="h", site="s")), "at most one sender"),
        ("cmd.event.m.version.retired", b"{}", "at most one sender"),
        ("cmd." + "x" * 300 + ".a.b", b"{}", "at most one sender"),
        ("cmd.é", b"[]", "no command"),
    ],
)
def test_whatever_else_stands_on_the_command_subjects_is_unreadable(subject: str, data: bytes, reason: str) -> None:
    said = read_entry(JOB, entry(subject, data), NEWEST_LEVEL)
    assert isinstance(said, Unreadable)
    assert reason in said.reason
    assert len(said.reason) < 600


def test_events() -> None:
    event = VersionRetired(cmd=1, i=1, k=1, model="m", version=3)
    assert read_entry(JOB, entry("event.m.version.retired", encode(event)), NEWEST_LEVEL) == event


@pytest.mark.parametrize(
    ("subject", "data"),
    [
        ("event.m.version.invented", b'{"kind":"version.invented","cmd":1,"i":1,"k":1,"model":"m"}'),
        ("event.m.version.retired", b'{"kind":"version.retired","cmd":1,"i":1,"k":1,"time":1.0,"model":"m"}'),
        ("event.n.version.retired", encode(VersionRetired(model="m", version=3))),
        ("event.m.version.published", encode(VersionRetired(model="m", version=3))),
    ],
)
def test_an_event_that_this_version_would_not_write_is_a_mismatch(subject: str, data: bytes) -> None:
    with pytest.raises(FoldMismatch):
        read_entry(JOB, entry(subject, data), NEWEST_LEVEL)


@pytest.mark.parametrize(("model", "token"), [("m", "m"), ("_hub", "_hub"), ("_secret", "_hub")])
def test_the_subject_of_a_rejection_names_only_models_that_can_stand_there(model: str, token: str) -> None:
    event = CommandRejected(verb="want", error="BadCommand", message="no", model=model)
    assert subject_of(JOB, event) == f"{PREFIX}.event.{token}.command.rejected"


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("headers", "origin"),
    [
        ({}, None),
        ({"Nats-Msg-Id": "x"}, None),
        ({"traceparent": TRACE}, CommandOrigin({"traceparent": TRACE})),
        ({"Traceparent": TRACE, "TraceState": "a=b"}, CommandOrigin({"traceparent": TRACE, "tracestate": "a=b"})),
        ({"traceparent": "x" * (HEADER_CHARS_MAX + 1)}, None),
        ({"traceparent": "a\r\nNats-Rollup: all"}, None),
        ({"traceparent": "é"}, None),
        ({"Tensorhub-Reply-To": "_INBOX.a.1"}, CommandOrigin({}, "_INBOX.a.1")),
        ({"tensorhub-reply-to": "_INBOX.a"}, CommandOrigin({}, "_INBOX.a")),
        ({"Tensorhub-Reply-To": f"{PREFIX}.cmd.publish"}, CommandOrigin({}, None, f"{PREFIX}.cmd.publish")),
        ({"Tensorhub-Reply-To": "_INBOX."}, CommandOrigin({}, None, "_INBOX.")),
        ({"Tensorhub-Reply-To": "_INBOX.a..b"}, CommandOrigin({}, None, "_INBOX.a..b")),
        ({"Tensorhub-Reply-To": "_INBOX.>"}, CommandOrigin({}, None, "_INBOX.>")),
        ({"Tensorhub-Reply-To": "_INBOX.a b"}, CommandOrigin({}, None, "_INBOX.a b")),
        ({"Tensorhub-Reply-To": "_INBOX.a\r\nPUB x 0"}, CommandOrigin({}, None, "_INBOX.a\r\nPUB x 0")),
        (
            {"Tensorhub-Reply-To": "_INBOX." + "a" * 600},
            CommandOrigin({}, None, ("_INBOX." + "a" * 600)[:HEADER_CHARS_MAX]),
        ),
    ],
)
def test_what_headers_ask_of_the_outcome(headers: dict[str, str], origin: CommandOrigin | None) -> None:
    """A trace to carry on, and an inbox: nothing that could make the registry write anywhere else."""
    assert origin_of(headers) == origin


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff", b'{"stream":"TENSORHUB_m","seq":4}', b'{"kind":"version.retired"}']
)
def test_what_was_never_an_event_is_nobodys_word(data: bytes) -> None:
    """JetStream answers where it is told to: that is no other fold which has spoken."""
    assert read_entry(JOB, entry("event.m.version.retired", data), NEWEST_LEVEL) is None
