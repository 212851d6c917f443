"""JobFold: what is published, in which order, and what the log's answers change."""

import json

import msgspec
import pytest
from tests.unit.registry.modelled_log import JOB, Entry, ModelledLog, decided

from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import Join, Lead, Publish, Register, Sender
from tensorhub_common.protocol.log.events import AgentJoined, CommandRejected, ShardRegistered
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, LevelUnknown
from tensorhub_registry.core.job_fold import (
    CommandDecided,
    EventBatch,
    JobFold,
    OutcomeStored,
    OutOfOrder,
    PublicationRefused,
    PublicationStored,
    PublicationUnknown,
)
from tensorhub_registry.core.log_entries import FoldMismatch

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


def publish(fold: JobFold, log: ModelledLog, count_max: int = 1) -> EventBatch:
    publication = fold.to_publish(count_max)
    assert publication is not None
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
    publication = fold.to_publish(8)
    assert publication is not None
    assert (publication.expected, [each.subject for each in publication.events]) == (
        0,
        [f"tensorhub.v1.{JOB}.event._hub.agent.joined"],
    )
    assert log.publish(0, publication.events) == 2
    assert fold.handle(PublicationStored(1, 2), 0.0) == [OutcomeStored(effect.events, None)]
    assert read_on(fold, log) == []
    assert fold.to_publish(8) is None
    assert (fold.seq, fold.last_event_seq, fold.unpublished) == (2, 2, 0)


def test_events_are_published_in_the_order_of_their_commands(log: ModelledLog) -> None:
    log.say(JOIN)
    log.say(register(2))
    log.say(LOOSE_WISH)
    fold = fold_of(log)
    while fold.can_publish:
        publish(fold, log)
    read_on(fold, log)
    assert [event.cmd for event in log.events()] == [1, 2, 3]
    assert log.events() == decided(log.entries)


def test_nothing_is_published_while_an_answer_is_awaited(log: ModelledLog) -> None:
    log.say(JOIN)
    log.say(LOOSE_WISH)
    fold = fold_of(log)
    assert fold.to_publish(1) is not None
    assert not fold.can_publish
    assert fold.to_publish(1) is None


def test_folding_goes_on_while_an_answer_is_awaited(log: ModelledLog) -> None:
    log.say(JOIN)
    fold = fold_of(log)
    assert fold.to_publish(1) is not None
    log.say(LOOSE_WISH)
    assert [type(effect) for effect in read_on(fold, log)] == [CommandDecided]


def test_a_new_registry_goes_on_in_the_middle_of_a_group(log: ModelledLog) -> None:
    """Killed between event i and i + 1: the log's last event says what is still to be said."""
    for n, command in enumerate((JOIN, register(2, 0), register(3, 1)), start=1):
        log.say(command)
        publish(fold_of(log), log)
        assert len(log.events()) == n
    expiry = b'{"verb":"expire","by":["_registry",4,1],"agent":"a","incarnation":1,"term":4}'
    expiry = expiry.replace(b'["_registry",4,1]', b'{"lane":"_registry","incarnation":4,"n":1}')
    log.append(f"tensorhub.v1.{JOB}.cmd.expire._registry", expiry)
    first = fold_of(log)
    assert first.unpublished == 2, "agent.lost and replica.lost"
    publish(first, log)
    second = fold_of(log)
    assert second.unpublished == 1
    assert second.history.outcome(log.events()[-1].cmd) is None, "half a group is no outcome"
    publish(second, log)
    assert log.events() == decided(log.entries)
    assert len(second.history.outcome(log.events()[-1].cmd) or ()) == 2


def test_a_lost_acknowledgement_is_found_in_the_log(log: ModelledLog) -> None:
    """Repeated against the same last event it is refused; then the log shows the event, and publication goes on."""
    log.say(JOIN)
    log.say(LOOSE_WISH)
    fold = fold_of(log)
    publication = fold.to_publish(1)
    assert publication is not None
    log.publish(publication.expected, publication.events)
    fold.handle(PublicationUnknown(), 0.0)
    again = publish(fold, log)
    assert (again.expected, again.events) == (publication.expected, publication.events)
    assert not fold.can_publish, "refused: it waits for the log"
    assert [type(effect) for effect in read_on(fold, log)] == [OutcomeStored]
    assert publish(fold, log).events[0].event.cmd == 2
    read_on(fold, log)
    assert log.events() == decided(log.entries)


def test_the_log_may_show_an_event_before_its_acknowledgement(log: ModelledLog) -> None:
    log.say(JOIN)
    fold = fold_of(log)
    publication = fold.to_publish(1)
    assert publication is not None
    seq = log.publish(publication.expected, publication.events)
    assert seq is not None
    assert [type(effect) for effect in read_on(fold, log)] == [OutcomeStored]
    assert fold.handle(PublicationStored(1, seq), 0.0) == []
    fold.check()
    assert fold.to_publish(1) is None


def test_refused_after_the_log_was_read_goes_on_at_once(log: ModelledLog) -> None:
    """Another leader's event may be read before our refusal arrives; nothing is left to wait for then."""
    log.say(JOIN)
    log.say(LOOSE_WISH)
    fold, other = fold_of(log), fold_of(log)
    publication = fold.to_publish(1)
    assert publication is not None
    publish(other, log)
    assert log.publish(publication.expected, publication.events) is None
    read_on(fold, log)
    fold.handle(PublicationRefused(), 0.0)
    fold.check()
    publish(fold, log)
    assert log.events() == decided(log.entries)


def test_two_leaders_publish_each_event_once(log: ModelledLog) -> None:
    for _ in range(6):
        log.say(LOOSE_WISH)
    folds = (fold_of(log), fold_of(log))
    for turn in range(40):
        fold = folds[turn % 2]
        if fold.can_publish:
            publish(fold, log)
        else:
            read_on(fold, log)
    assert log.events() == decided(log.entries)


def test_the_second_event_expects_the_first_right_behind_all_that_is_known(log: ModelledLog) -> None:
    log.say(JOIN)
    log.say(LOOSE_WISH)
    fold = fold_of(log)
    publication = fold.to_publish(2)
    assert publication is not None
    assert (publication.expected, publication.ahead) == (0, 3)
    assert log.publish(0, publication.events[:1]) == 3
    assert log.publish(3, publication.events[1:]) == 4
    fold.handle(PublicationStored(2, 4), 0.0)
    fold.check()
    log.say(LOOSE_WISH)
    log.say(LOOSE_WISH)
    read_on(fold, log)
    publication = fold.to_publish(2)
    assert publication is not None
    assert (publication.expected, publication.ahead) == (4, 7)


def test_a_command_in_between_refuses_the_second_event_alone(log: ModelledLog) -> None:
    log.say(JOIN)
    log.say(LOOSE_WISH)
    fold = fold_of(log)
    publication = fold.to_publish(2)
    assert publication is not None
    log.say(LOOSE_WISH)
    assert log.publish(publication.expected, publication.events[:1]) == 4
    assert log.publish(publication.ahead, publication.events[1:]) is None
    fold.handle(PublicationStored(1, 4), 0.0)
    fold.check()
    while fold.can_publish:
        publish(fold, log)
        read_on(fold, log)
    assert log.events() == decided(log.entries)


def test_behind_a_command_the_third_event_of_a_chain_takes_nobodys_place(log: ModelledLog) -> None:
    """The first stands where the third one's sequence says that the second should: only its id tells them apart."""
    log.say(JOIN)
    for _ in range(2):
        log.say(LOOSE_WISH)
    fold = fold_of(log)
    publication = fold.to_publish(3)
    assert publication is not None
    first, second, third = publication.events
    log.say(LOOSE_WISH)
    assert log.publish(publication.expected, [first]) == publication.ahead + 1
    assert log.publish(publication.ahead, [second], first.body) is None
    assert log.publish(publication.ahead + 1, [third], second.body) is None
    assert log.publish(publication.ahead + 1, [third]) is not None, "so it would be, were the sequence all"


def test_a_gap_is_reported_and_nothing_is_folded(log: ModelledLog) -> None:
    log.say(JOIN)
    log.say(LOOSE_WISH)
    fold = JobFold(JOB)
    assert fold.handle(log.entries[1], 0.0) == [OutOfOrder(expected=1, found=2)]
    assert (fold.seq, fold.catalog.seq, fold.unpublished) == (0, 0, 0)
    read_on(fold, log)
    assert fold.handle(log.entries[1], 0.0) == [OutOfOrder(expected=3, found=2)]


def test_an_event_that_was_not_decided_stops_the_fold(log: ModelledLog) -> None:
    """Another version, which decides otherwise, has spoken."""
    log.say(JOIN)
    fold = fold_of(log)
    publication = fold.to_publish(1)
    assert publication is not None
    strange = CommandRejected(cmd=1, i=1, k=1, verb="join", error="BadCommand", message="no", time=1000.125)
    log.append(f"tensorhub.v1.{JOB}.event._hub.command.rejected", encode(strange))
    with pytest.raises(FoldMismatch, match=r"says command.rejected 1.1/1, where .* AgentJoined"):
        read_on(fold, log)
    assert fold.seq == 1


@pytest.mark.parametrize("change", [{"i": 2}, {"cmd": 9}, {"k": 2}, {"time": 5.0}, {"cmd": 0}])
def test_an_event_with_another_number_or_time_stops_the_fold(log: ModelledLog, change: dict[str, int]) -> None:
    log.say(JOIN)
    (event,) = decided(log.entries)
    body = encode(event)
    for key, value in change.items():
        old = f'"{key}":{getattr(event, key)}'.encode()
        assert old in body
        body = body.replace(old, f'"{key}":{value}'.encode())
    log.append(f"tensorhub.v1.{JOB}.event._hub.agent.joined", body)
    with pytest.raises(FoldMismatch):
        fold_of(log)


def test_a_release_that_words_its_refusals_otherwise_folds_on(log: ModelledLog) -> None:
    """Sentences are for people: what stands in the log stays as it was said."""
    log.say(LOOSE_WISH)
    (event,) = decided(log.entries)
    assert isinstance(event, CommandRejected)
    said = msgspec.structs.replace(event, message="In other words: no.")
    log.append(f"tensorhub.v1.{JOB}.event.m.command.rejected", encode(said))
    fold = fold_of(log)
    assert fold.history.outcome(1) == (said,)
    log.say(LOOSE_WISH)
    other_error = msgspec.structs.replace(said, cmd=3, time=1_000.375, error="BadCommand")
    log.append(f"tensorhub.v1.{JOB}.event.m.command.rejected", encode(other_error))
    with pytest.raises(FoldMismatch):
        read_on(fold, log)


def test_a_release_that_does_not_write_a_field_folds_on(log: ModelledLog) -> None:
    """An older release led, which knows nothing of racks: what both know is the same, so this one goes on."""
    log.say(msgspec.structs.replace(JOIN, rack="r1"))
    (event,) = decided(log.entries)
    body = json.loads(encode(event))
    assert body.pop("rack") == "r1"
    log.append(f"tensorhub.v1.{JOB}.event._hub.agent.joined", json.dumps(body).encode())
    fold = fold_of(log)
    assert (fold.seq, fold.unpublished) == (2, 0)
    assert fold.catalog.agents["a"].rack == "r1"


def test_a_release_that_writes_a_later_field_is_followed(log: ModelledLog) -> None:
    log.say(JOIN)
    (event,) = decided(log.entries)
    body = {**json.loads(encode(event)), "zone": "z", "by": {**json.loads(encode(event))["by"], "later": 1}}
    log.append(f"tensorhub.v1.{JOB}.event._hub.agent.joined", json.dumps(body).encode())
    fold = fold_of(log)
    assert (fold.seq, fold.unpublished) == (2, 0)


def test_a_field_that_differs_stops_the_fold(log: ModelledLog) -> None:
    log.say(msgspec.structs.replace(JOIN, rack="r1"))
    (event,) = decided(log.entries)
    body = {**json.loads(encode(event)), "rack": "r2"}
    log.append(f"tensorhub.v1.{JOB}.event._hub.agent.joined", json.dumps(body).encode())
    with pytest.raises(FoldMismatch):
        fold_of(log)


def test_a_log_that_was_raised_beyond_this_release_stops_the_fold(log: ModelledLog) -> None:
    """And it does so before anything else of that level is folded."""
    log.say(JOIN)
    log.say(Lead(by=Sender("_registry", 4, 0), registry="registry-1", term=4, level=NEWEST_LEVEL + 1))
    fold = JobFold(JOB)
    with pytest.raises(LevelUnknown, match="stops this job here"):
        read_on(fold, log)
    assert fold.seq == 1


def test_an_event_before_any_command_stops_the_fold(log: ModelledLog) -> None:
    log.append(f"tensorhub.v1.{JOB}.event.m.version.retired", b'{"kind":"version.retired","cmd":1,"i":1,"k":1}')
    with pytest.raises(FoldMismatch):
        fold_of(log)


def test_the_same_event_twice_stops_the_fold(log: ModelledLog) -> None:
    log.say(JOIN)
    publish(fold_of(log), log)
    log.append(log.entries[-1].subject, log.entries[-1].data)
    with pytest.raises(FoldMismatch, match=r"what follows 1\.1/1"):
        fold_of(log)


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


def test_garbage_is_rejected_and_changes_nothing_else(log: ModelledLog) -> None:
    log.append(f"tensorhub.v1.{JOB}.cmd.publish", b"\xff" * 900_000)
    log.append(f"tensorhub.v1.{JOB}.cmd.a.b.c.d", b"{}")
    log.append(f"tensorhub.v1.{JOB}.cmd.join.a", b'{"verb":"join","host":"h"}')
    fold = fold_of(log)
    publish(fold, log, 8)
    events = log.events()
    assert [type(event) for event in events] == [CommandRejected] * 3
    assert all(len(entry.data) < 1_000 for entry in log.entries[3:])
    assert not fold.catalog.agents


def test_events_carry_the_trace_of_their_command_and_the_group_its_inbox(log: ModelledLog) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    log.say(JOIN, {"Traceparent": trace, "Tensorhub-Reply-To": "_INBOX.x.1", "Nats-Msg-Id": "7"})
    fold = fold_of(log)
    publication = fold.to_publish(1)
    assert publication is not None
    assert publication.events[0].trace == {"traceparent": trace}
    (stands,) = fold.handle(PublicationStored(1, 2), 0.0)
    assert isinstance(stands, OutcomeStored)
    assert stands.origin is not None
    assert stands.origin.reply_to == "_INBOX.x.1"


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


def test_answers_to_nothing_are_faults(log: ModelledLog) -> None:
    fold = fold_of(log)
    with pytest.raises(ValueError, match="nothing that was under way"):
        fold.handle(PublicationStored(1, 2), 0.0)
    with pytest.raises(ValueError, match="none was under way"):
        fold.handle(PublicationRefused(), 0.0)
