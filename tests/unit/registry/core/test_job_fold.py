"""JobFold: what is published, in which order, and what the log's entries and answers change."""

import json
from contextlib import nullcontext

import msgspec
import pytest
from tests.unit.registry.modelled_log import JOB, Entry, ModelledLog, decided
from tests.unit.span_places import place_at

from tensorhub_common.observability.trace_context import PUBLISH_HEADER, TRACEPARENT, TraceContext
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import Join, Lead, Publish, Ready, Register, Sender, Want
from tensorhub_common.protocol.log.events import (
    AgentJoined,
    CommandRejected,
    RoundDecided,
    ShardRegistered,
    VersionRetired,
)
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, LevelUnknown
from tensorhub_registry.core.job_fold import (
    CommandDecided,
    EntryIgnored,
    EventBatch,
    JobFold,
    OutcomeStored,
    OutOfOrder,
    PublicationRefused,
    PublicationStored,
    PublicationUnknown,
)
from tensorhub_registry.core.log_entries import HEADER_CHARS_MAX, FoldMismatch

ONE_TRACE_S_MAX = 600.0
PUBLICATION, TRANSFER = place_at(0xA, 0xA1), place_at(0xB, 0xB1)
JOIN = Join(by=Sender("a", 1, 1), host="h", site="s")
LOOSE_WISH = Publish(model="m", replica="r")


def register(n: int, shard: int = 0) -> Register:
    return Register(by=Sender("a", 1, n), model="m", replica="r", shard=shard, shards=2, layout="0" * 64, nbytes=8)


@pytest.fixture
def log() -> ModelledLog:
    return ModelledLog()


def fold_of(log: ModelledLog, **limits: int) -> JobFold:
    fold = JobFold(JOB, **limits)
    read_on(fold, log)
    return fold


def read_on(fold: JobFold, log: ModelledLog) -> list[object]:
    """Read as far as the fold takes it."""
    effects: list[object] = []
    for entry in log.after(fold.seq):
        if fold.is_full and ".cmd." in entry.subject:
            break
        effects += fold.handle(entry, 0.0)
        fold.check()
    return effects


def asked(fold: JobFold, count_max: int = 1) -> EventBatch:
    """Return what it wants to publish."""
    publication = fold.to_publish(count_max)
    assert publication is not None
    return publication


def publish(fold: JobFold, log: ModelledLog, count_max: int = 1) -> EventBatch:
    publication = asked(fold, count_max)
    seq = log.publish(publication.expected, publication.events)
    fold.handle(PublicationRefused() if seq is None else PublicationStored(len(publication.events), seq), 0.0)
    fold.check()
    return publication


def test_a_command_becomes_a_group_that_is_published_and_then_stands(log: ModelledLog) -> None:
    """Decided when folded, standing when acknowledged, and reading the own event changes nothing more."""
    fold = JobFold(JOB)
    log.say(JOIN)
    (effect,) = read_on(fold, log)
    assert isinstance(effect, CommandDecided)
    assert [type(event) for event in effect.events] == [AgentJoined]
    publication = asked(fold, 8)
    assert publication.expected == 0
    assert [each.subject for each in publication.events] == [f"tensorhub.v1.{JOB}.event._hub.agent.joined"]
    assert not fold.can_publish
    assert fold.to_publish(1) is None, "an answer is awaited"
    assert log.publish(0, publication.events) == 2
    assert fold.handle(PublicationStored(1, 2), 0.0) == [OutcomeStored(effect.events, None)]
    assert read_on(fold, log) == []
    assert fold.to_publish(8) is None
    assert (fold.seq, fold.last_event_seq, fold.unpublished) == (2, 2, 0)
    for answer in (PublicationStored(1, 2), PublicationRefused()):
        with pytest.raises(ValueError, match="was in progress"):
            fold.handle(answer, 0.0)


def test_the_second_event_expects_the_first_right_behind_all_that_is_known(log: ModelledLog) -> None:
    log.say(JOIN)
    log.say(LOOSE_WISH)
    fold = fold_of(log)
    publication = asked(fold, 2)
    assert (publication.expected, publication.ahead) == (0, 3)
    assert log.publish(0, publication.events[:1]) == 3
    assert log.publish(3, publication.events[1:]) == 4
    fold.handle(PublicationStored(2, 4), 0.0)
    fold.check()
    log.say(LOOSE_WISH)
    log.say(LOOSE_WISH)
    read_on(fold, log)
    publication = asked(fold, 2)
    assert (publication.expected, publication.ahead) == (4, 7)


def test_a_gap_is_reported_and_nothing_is_folded(log: ModelledLog) -> None:
    log.say(JOIN)
    log.say(LOOSE_WISH)
    fold = JobFold(JOB)
    assert fold.handle(log.entries[1], 0.0) == [OutOfOrder(expected=1, found=2)]
    assert (fold.seq, fold.catalog.seq, fold.unpublished) == (0, 0, 0)
    read_on(fold, log)
    assert fold.handle(log.entries[1], 0.0) == [OutOfOrder(expected=3, found=2)]


def test_a_log_that_was_raised_beyond_this_release_stops_the_fold(log: ModelledLog) -> None:
    """And it does so before anything else of that level is folded."""
    log.say(JOIN)
    log.say(Lead(by=Sender("_registry", 4, 0), registry="registry-1", term=4, level=NEWEST_LEVEL + 1))
    fold = JobFold(JOB)
    with pytest.raises(LevelUnknown, match="stops this job here"):
        read_on(fold, log)
    assert fold.seq == 1


def test_a_full_fold_takes_no_command_and_learns_from_the_logs_end_how_far_publication_is(log: ModelledLog) -> None:
    """A log that begins with more commands than may wait still can be folded, by whoever comes later."""
    for _ in range(10):
        log.say(LOOSE_WISH)
    first = fold_of(log, unpublished_max=3)
    assert (first.seq, first.unpublished) == (3, 3)
    with pytest.raises(ValueError, match="publish before folding"):
        first.handle(log.entries[3], 0.0)
    while first.can_publish:
        publish(first, log, 2)
        read_on(first, log)
    assert log.events() == decided(log.entries)

    second = fold_of(log, unpublished_max=3)
    assert (second.seq, second.is_full) == (3, True)
    last = log.last_event(0)
    assert last is not None
    effects = second.handle(last, 0.0)
    assert [type(effect) for effect in effects] == [OutcomeStored] * 3
    read_on(second, log)
    assert (second.seq, second.unpublished) == (20, 0)


def test_of_events_that_can_not_be_compared_the_order_is_still_checked(log: ModelledLog) -> None:
    for _ in range(6):
        log.say(LOOSE_WISH)
    first = fold_of(log)
    publish(first, log, 6)
    told = JobFold(JOB, unseen_max=2)
    last = log.last_event(0)
    assert last is not None
    told.handle(last, 0.0)
    read_on(told, log)
    assert told.seq == 12
    log.entries[7], log.entries[8] = (
        Entry(8, 0.0, log.entries[8].subject, log.entries[8].data),
        Entry(9, 0.0, log.entries[7].subject, log.entries[7].data),
    )
    told = JobFold(JOB, unseen_max=2)
    told.handle(last, 0.0)
    with pytest.raises(FoldMismatch):
        read_on(told, log)


def test_pending_is_what_has_no_whole_group_yet(log: ModelledLog) -> None:
    log.say(JOIN)
    log.say(register(2))
    fold = fold_of(log)
    assert [fold.is_pending(seq) for seq in (1, 2, 3)] == [True, True, True]
    publish(fold, log)
    assert [fold.is_pending(seq) for seq in (1, 2)] == [False, True]
    publish(fold, log)
    read_on(fold, log)
    assert [fold.is_pending(seq) for seq in (1, 2, 3, 4, 5)] == [False, False, False, False, True]
    assert isinstance((fold.history.outcome(2) or (None,))[0], ShardRegistered)


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
INBOX = "_INBOX.x.1"


@pytest.mark.parametrize(
    ("headers", "trace", "reply_to", "foreign"),
    [
        ({"Nats-Msg-Id": "x"}, {}, None, None),
        ({"Traceparent": TRACE, "TraceState": "a=b"}, {"traceparent": TRACE, "tracestate": "a=b"}, None, None),
        ({"traceparent": "x" * (HEADER_CHARS_MAX + 1)}, {}, None, None),
        ({"traceparent": "a\r\nNats-Rollup: all"}, {}, None, None),
        ({"traceparent": "é"}, {}, None, None),
        ({"Tensorhub-Reply-To": INBOX, "Traceparent": TRACE}, {"traceparent": TRACE}, INBOX, None),
        ({"tensorhub-reply-to": f"tensorhub.v1.{JOB}.cmd.publish"}, {}, None, f"tensorhub.v1.{JOB}.cmd.publish"),
        *(
            ({"Tensorhub-Reply-To": wrong}, {}, None, wrong[:HEADER_CHARS_MAX])
            for wrong in (*(f"_INBOX.{end}" for end in ("", "a..b", ">", "a b", "a\r\nPUB x 0")), "_INBOX." + "a" * 600)
        ),
    ],
)
def test_events_carry_the_trace_of_their_command_and_the_outcome_its_inbox(
    log: ModelledLog, headers: dict[str, str], trace: dict[str, str], reply_to: str | None, foreign: str | None
) -> None:
    """Nothing that a header says makes the registry write anywhere else than to an inbox."""
    log.say(JOIN, headers)
    fold = fold_of(log)
    assert asked(fold).events[0].trace == trace
    (stored,) = fold.handle(PublicationStored(1, 2), 0.0)
    assert isinstance(stored, OutcomeStored)
    found = (None, None) if stored.origin is None else (stored.origin.reply_to, stored.origin.foreign_reply_to)
    assert found == (reply_to, foreign)


HOLDING = {"model": "m", "replica": "r", "shard": 0, "version": 3, "root": "0"}


@pytest.mark.parametrize(
    ("changes", "agrees"),
    [
        ({}, True),
        ({"rack": None}, True),
        ({"zone": "z", "by": {"lane": "a", "incarnation": 1, "n": 1, "later": 1}}, True),
        ({"time": 1000}, False),
        ({"time": 1_000.125}, True),
        ({"cmd": 9}, False),
        ({"cmd": 0}, False),
        ({"i": 2}, False),
        ({"k": 2}, False),
        ({"by": None}, False),
        ({"by": {"lane": "b", "incarnation": 1, "n": 1}}, False),
        ({"kind": "agent.lost"}, False),
        ({"agent": "b"}, False),
        ({"rack": "r2"}, False),
        ({"kept": [HOLDING]}, False),
    ],
)
def test_stored_events_agree_in_what_both_know(log: ModelledLog, changes: dict[str, object], *, agrees: bool) -> None:
    """A field that one of them does not know is no difference. Any other one stops the fold."""
    log.say(msgspec.structs.replace(JOIN, rack="r1"))
    (event,) = decided(log.entries)
    body = {**json.loads(encode(event)), **changes}
    body = {name: value for name, value in body.items() if value is not None or name == "by"}
    log.append(f"tensorhub.v1.{JOB}.event._hub.agent.joined", json.dumps(body).encode())
    with nullcontext() if agrees else pytest.raises(FoldMismatch):
        assert fold_of(log).unpublished == 0


def test_only_the_sentences_of_a_rejection_may_differ(log: ModelledLog) -> None:
    log.say(LOOSE_WISH)
    (event,) = decided(log.entries)
    assert isinstance(event, CommandRejected)
    said = msgspec.structs.replace(event, message="in other words")
    entry = log.append(f"tensorhub.v1.{JOB}.event.m.command.rejected", encode(said))
    assert fold_of(log).history.outcome(1) == (said,)
    log.entries[-1] = msgspec.structs.replace(entry, data=encode(msgspec.structs.replace(event, error="BadCommand")))
    with pytest.raises(FoldMismatch, match=r"says command.rejected 1.1/1, where .* CommandRejected"):
        fold_of(log)


RETIRED = encode(VersionRetired(cmd=1, i=1, k=1, model="m", version=3))


@pytest.mark.parametrize(
    ("subject", "data", "is_event"),
    [
        ("m.version.invented", b'{"kind":"version.invented","cmd":1,"i":1,"k":1,"model":"m"}', True),
        ("m.version.retired", b'{"kind":"version.retired","cmd":1,"i":1,"k":1}', True),
        *((place, RETIRED, True) for place in ("n.version.retired", "m.version.published", "m.version.retired")),
        *(
            ("m.version.retired", data, False)
            for data in (b"", b"\xff", b'{"stream":"TENSORHUB_m","seq":4}', b'{"kind":"version.retired"}')
        ),
    ],
)
def test_what_is_stored_on_an_events_subject(log: ModelledLog, subject: str, data: bytes, *, is_event: bool) -> None:
    """An event that this release would not write stops the fold; what was never an event is passed over."""
    log.append(f"tensorhub.v1.{JOB}.event.{subject}", data)
    with pytest.raises(FoldMismatch) if is_event else nullcontext():
        assert read_on(JobFold(JOB), log) == [EntryIgnored(1, f"tensorhub.v1.{JOB}.event.{subject}")]


@pytest.mark.parametrize(
    ("subject", "data", "reason"),
    [
        ("publish", b"", "no command"),
        ("publish", b"\xff" * 900_000, "has 900000 bytes"),
        ("join.b", encode(JOIN), "a sender of 'b'"),
        ("join.a.b", encode(JOIN), "at most one sender"),
        ("x" * 300 + ".a.b", b"{}", "at most one sender"),
        ("é", b"[]", "no command"),
    ],
)
def test_no_command_is_rejected_with_the_reason(log: ModelledLog, subject: str, data: bytes, reason: str) -> None:
    log.append(f"tensorhub.v1.{JOB}.cmd.{subject}", data)
    (effect,) = read_on(fold := JobFold(JOB), log)
    assert isinstance(effect, CommandDecided)
    (event,) = effect.events
    assert isinstance(event, CommandRejected)
    assert reason in event.message
    assert len(event.message) < 600
    assert not fold.catalog.agents


def test_the_oldest_outcomes_are_dropped(log: ModelledLog) -> None:
    for _ in range(5):
        log.say(LOOSE_WISH)
    fold = fold_of(log)
    fold.history.outcomes_max = 3
    publish(fold, log, 5)
    assert [seq for seq in range(9) if fold.history.outcome(seq)] == [3, 4, 5]
    assert (fold.history.forgotten, [event.cmd for event in fold.history.events()]) == (2, [1, 2, 3, 4, 5])
    fold.check()


@pytest.mark.parametrize(
    ("after_s", "joined", "published", "header", "parent"),
    [
        (1.0, True, True, PUBLICATION, PUBLICATION.beside(TRANSFER.span_id)),
        (1.0, False, True, PUBLICATION, PUBLICATION),
        (ONE_TRACE_S_MAX + 1, True, True, TRANSFER, TRANSFER),
        (1.0, True, False, TRANSFER, TRANSFER),
        (1.0, False, False, None, None),
    ],
)
def test_a_decision_names_the_publication_of_its_version_as_its_cause(
    log: ModelledLog,
    after_s: float,
    *,
    joined: bool,
    published: bool,
    header: TraceContext | None,
    parent: TraceContext | None,
) -> None:
    """Long after that, or without a trace of it, the round has the trace of the one who joined last."""

    def traced(place: TraceContext | None) -> dict[str, str]:
        return {} if place is None else {TRACEPARENT: place.traceparent}

    log.say(JOIN)
    log.say(Join(by=Sender("b", 1, 1), host="g", site="s"))
    log.say(msgspec.structs.replace(register(2), shards=1))
    log.say(msgspec.structs.replace(register(2), by=Sender("b", 1, 2), replica="s", shards=1))
    ready = Ready(by=Sender("a", 1, 3), model="m", replica="r", shard=0, version=7, root="a" * 32)
    log.say(ready, traced(PUBLICATION if published else None))
    log.entries_later(after_s)
    want = Want(by=Sender("b", 1, 3), model="m", replica="s", shard=0, want="latest")
    log.say(want, traced(TRANSFER if joined else None))
    fold = fold_of(log)
    publication = asked(fold, 20)
    found = {type(each.event): each for each in publication.events}
    late = after_s > ONE_TRACE_S_MAX
    expected = traced(header) | ({PUBLISH_HEADER: PUBLICATION.traceparent} if late else {})
    assert found[RoundDecided].trace == expected
    last = fold.handle(PublicationStored(len(publication.events), 20), 0.0)[-1]
    assert isinstance(last, OutcomeStored)
    (cause,) = [each for each in last.causes if isinstance(each.event, RoundDecided)]
    assert (cause.parent, cause.links) == (parent, (PUBLICATION,) if late else ())


def test_a_lost_acknowledgement_is_found_in_the_log(log: ModelledLog) -> None:
    """Repeated against the same last event it is refused; then the log shows the event, and publication goes on."""
    log.say(JOIN)
    log.say(LOOSE_WISH)
    fold = fold_of(log)
    publication = asked(fold)
    log.publish(publication.expected, publication.events)
    fold.handle(PublicationUnknown(), 0.0)
    again = publish(fold, log)
    assert (again.expected, again.events) == (publication.expected, publication.events)
    assert not fold.can_publish, "refused: it waits for the log"
    assert [type(effect) for effect in read_on(fold, log)] == [OutcomeStored]
    assert publish(fold, log).events[0].event.cmd == 2
    read_on(fold, log)
    assert log.events() == decided(log.entries)
