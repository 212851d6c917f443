"""The fold of a job's rollouts: what each entry does, and in which words it is refused."""

from hashlib import sha256
from typing import Any

import msgspec
import pytest

from tensorhub_common.protocol.rollout.entries import (
    DEFAULT_POLICY,
    AnyEntry,
    Attach,
    Attempt,
    Cancel,
    Checkpoint,
    Done,
    End,
    GroupSubmitted,
    Lead,
    Payload,
    RequestEnded,
    RequestId,
    Scale,
    SdkSender,
    Submit,
    TokensKept,
    UnreadableEntry,
    decode,
    encode,
)
from tensorhub_rollout.log import fold as fold_module
from tensorhub_rollout.log.fold import SITES_MAX, fold
from tensorhub_rollout.log.outcomes import (
    Acknowledged,
    Attached,
    Cancelled,
    Ended,
    Folded,
    Kept,
    Leads,
    Outcome,
    Refused,
    Repeated,
    Scaled,
    Submitted,
)
from tensorhub_rollout.log.state import RolloutState, WishedInstances, decode_state, encode_state


def digest(of: object) -> str:
    return sha256(str(of).encode()).hexdigest()


def payload(of: object, nbytes: int = 100) -> Payload:
    return Payload(digest(of), nbytes)


def group(id_: str, **more: Any) -> GroupSubmitted:
    said = {"id": id_, "digest": digest(id_), "size": 2, "prompt_tokens": 3, "tokens_max": 10, **more}
    return GroupSubmitted(**said)


class Log:
    """A log of rollouts. Each entry goes over the wire, and each state into a snapshot."""

    def __init__(self) -> None:
        self.state = RolloutState("job")
        self.attachment = 0
        self.freed: list[str] = []
        self._n = 0

    def say(self, entry: AnyEntry) -> Outcome:
        return self.folded(decode(str(entry.__struct_config__.tag), encode(entry))).outcome

    def folded(self, entry: AnyEntry | UnreadableEntry) -> Folded:
        folded = fold(self.state, self.state.seq + 1, entry)
        self.state.check()
        assert decode_state(encode_state(self.state)) == self.state
        self.freed += folded.freed
        return folded

    def attach(self, epoch: int = 0, *, name: str = "main", model: str = "policy") -> Outcome:
        outcome = self.say(Attach(name, model, epoch, "nonce"))
        if isinstance(outcome, Attached):
            self.attachment, self._n = self.state.seq, 0
        return outcome

    def by(self) -> SdkSender:
        self._n += 1
        return SdkSender(self.attachment, self._n)

    def submit(self, *groups: GroupSubmitted, of: object = "prompts") -> Outcome:
        return self.say(Submit(self.by(), groups, payload(of)))

    def cancel(self, *groups: str) -> Outcome:
        return self.say(Cancel(self.by(), groups))

    def done(self, *requests: RequestId) -> Outcome:
        return self.say(Done(self.by(), requests))

    def lead(self, term: int) -> Outcome:
        return self.say(Lead(term, f"manager-{term}"))

    def keep(self, request: RequestId, attempt: Attempt, start: int, stop: int, *, of: object = None) -> Outcome:
        part = TokensKept(request, attempt, start, stop)
        return self.say(Checkpoint(attempt.term, "engine", (part,), payload(of or (request, attempt, start))))

    def end(self, request: RequestId, attempt: Attempt, reason: Any = "stop", tokens: int = 4) -> Outcome:
        ended = RequestEnded(request, attempt, reason, tokens, "it is poison" if reason == "failed" else None)
        return self.say(End(attempt.term, (ended,), payload((request, attempt, "end")) if tokens else None))


FIRST, SECOND = RequestId(3, 0), RequestId(3, 1)
OLD, NEW = Attempt(1, 7), Attempt(1, 8)


@pytest.fixture
def log() -> Log:
    """Return a log with a leader, a trainer, and the two requests of one group."""
    made = Log()
    made.lead(1)
    made.attach()
    assert made.submit(group("p")) == Submitted((FIRST, SECOND))
    return made


def refusal(outcome: Outcome) -> tuple[str, str]:
    assert isinstance(outcome, Refused)
    return outcome.error, outcome.message


def test_a_request_ends_once_and_its_trainer_has_it_until_it_says_done(log: Log) -> None:
    assert log.end(FIRST, OLD) == Ended((FIRST,))
    end = log.state.request(FIRST)
    assert end is not None
    assert log.state.consumers["main"].ended == {4: [FIRST]}
    assert log.end(FIRST, NEW, "length") == Ended(())
    assert log.state.request(FIRST) == end
    assert log.freed == [digest((FIRST, NEW, "end"))]
    assert log.done(FIRST) == Acknowledged((FIRST,))
    assert log.state.request(FIRST) is None
    assert log.done(FIRST) == Acknowledged(()), "what is done is done"
    assert log.freed[1:] == [digest((FIRST, OLD, "end"))]


def test_prompts_are_kept_until_the_last_response_of_their_entry_is_done(log: Log) -> None:
    log.end(FIRST, OLD, "failed", 0)
    log.end(SECOND, OLD)
    log.done(FIRST)
    assert log.freed == []
    log.done(SECOND)
    assert log.freed == [digest((SECOND, OLD, "end")), digest("prompts")]
    assert (log.state.submissions, log.state.payloads, log.state.open) == ({}, {}, 0)


def test_an_id_stands_for_its_content_also_once_it_is_done(log: Log) -> None:
    other = group("p", digest=digest("another prompt"))
    assert log.submit(group("p"), group("q")) == Submitted((RequestId(4, 2), RequestId(4, 3)), ("p",))
    error, message = refusal(log.submit(other))
    assert error == "BadPrompt"
    assert message == "the id 'p' stands for another prompt, sampling, version or group size: take another id"
    for each in (FIRST, SECOND):
        log.end(each, OLD)
    log.done(FIRST, SECOND)
    assert log.submit(group("p"), of="again") == Submitted((), ("p",))
    assert log.freed[-1] == digest("again")
    assert refusal(log.submit(other))[0] == "BadPrompt"


def test_an_id_that_the_sdk_made_is_not_kept() -> None:
    log = Log()
    log.attach()
    log.submit(group("made", is_named=False))
    log.cancel("made")
    log.done(RequestId(2, 0), RequestId(2, 1))
    assert log.state.consumers["main"].done_ids == {}


def test_so_many_ids_are_kept_the_latest(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_module, "DONE_IDS_MAX", 2)
    for each in "abc":
        log.submit(group(each, size=1))
        log.cancel(each)
        log.done(RequestId(log.state.seq - 1, 0))
    assert [*log.state.consumers["main"].done_ids] == ["b", "c"]


def test_the_order_of_the_log_decides_between_cancel_and_end(log: Log) -> None:
    log.keep(SECOND, OLD, 0, 3)
    log.end(FIRST, OLD)
    assert log.cancel("p", "p") == Cancelled((SECOND,))
    assert log.freed == [digest((SECOND, OLD, 0))]
    assert log.end(SECOND, OLD) == Ended(())
    reasons = [request.end.reason for _, _, request in log.state.requests() if request.end is not None]
    assert reasons == ["stop", "cancelled"]


def test_a_later_trainer_takes_over_and_the_earlier_one_is_told(log: Log) -> None:
    log.end(FIRST, OLD)
    before = log.by()
    assert log.attach() == Attached("main", 0, replaced=2)
    late = "another trainer has attached to this consumer since: only the latest may submit, cancel and acknowledge"
    for entry in (Done(before, (FIRST,)), Cancel(before, ("p",)), Submit(before, (group("q"),), payload("q"))):
        assert refusal(log.say(entry)) == ("StaleSender", late)
    assert log.done(FIRST) == Acknowledged((FIRST,))


def test_a_higher_epoch_drops_what_the_earlier_one_left_and_frees_its_ids(log: Log) -> None:
    log.submit(group("q"), of="more")
    log.end(FIRST, OLD)
    log.keep(SECOND, OLD, 0, 3)
    others = (RequestId(4, 0), RequestId(4, 1))
    assert log.attach(2) == Attached("main", 2, replaced=2, dropped=(SECOND, *others))
    assert (log.state.payloads, log.state.open) == ({}, 0)
    assert log.submit(group("p", digest=digest("another"))) == Submitted((RequestId(8, 0), RequestId(8, 1)))
    assert refusal(log.attach(1)) == (
        "StaleSender",
        "consumer 'main' is at epoch 2, so epoch 1 is over: connect with epoch 2, or a higher one to drop what it left",
    )


def test_a_consumer_stays_with_its_model_while_groups_are_open(log: Log) -> None:
    error, message = refusal(log.attach(model="critic"))
    assert (error, message.partition(":")[0]) == ("BadCommand", "consumer 'main' has open groups of model 'policy'")
    assert message.endswith("connect to that model, with another name, or with a higher epoch")
    assert log.attach(name="second", model="critic") == Attached("second", 0)
    assert log.attach(1, model="critic") == Attached("main", 1, replaced=2, dropped=(FIRST, SECOND))


def test_names_are_checked_and_counted(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(log.attach(name="a b"))[0] == "InvalidName"
    assert refusal(log.attach(model="_hub"))[0] == "InvalidName"
    monkeypatch.setattr(fold_module, "CONSUMERS_MAX", 1)
    assert refusal(log.attach(name="second"))[1] == "the job has 1 consumers already: use one of their names"
    assert log.attach() == Attached("main", 0, replaced=2)


def test_a_repeat_is_answered_with_the_first_outcome_and_an_older_word_is_refused(log: Log) -> None:
    again = Submit(SdkSender(2, 1), (group("p"),), payload("prompts"))
    assert log.say(again) == Repeated(3)
    bad = Submit(log.by(), (group("p", digest=digest("x")),), payload("x"))
    error, message = refusal(log.say(bad))
    assert log.say(bad) == Repeated(5, error, message)
    assert refusal(log.say(again)) == ("BadCommand", "the attachment has said 2 already, so 1 comes too late")
    assert refusal(log.say(Cancel(SdkSender(2, 0), ("p",))))[0] == "BadCommand"


def test_nothing_of_a_lower_term_counts(log: Log) -> None:
    assert log.lead(3) == Leads(3, "manager-3")
    assert refusal(log.lead(3))[1] == "the log is at term 3, so term 3 leads no more: take a higher one"
    late = ("StaleSender", "the log is at term 3: nothing of term 1 counts")
    assert refusal(log.end(FIRST, OLD)) == late
    assert refusal(log.keep(FIRST, OLD, 0, 2)) == late
    assert refusal(log.say(Scale(1, 4, "", "more"))) == late
    assert log.say(Scale(3, 4, "", "more")) == Scaled()
    assert log.state.wished == {"": WishedInstances(4, "more")}
    for number in range(SITES_MAX - 1):
        assert log.say(Scale(3, 1, f"site-{number}", "there")) == Scaled()
    assert "are wished for at 64 sites already" in refusal(log.say(Scale(3, 1, "one-more", "there")))[1]
    assert log.say(Scale(3, 2, "", "fewer")) == Scaled()
    assert log.state.wished[""].instances == 2
    assert log.end(FIRST, Attempt(3, 1)) == Ended((FIRST,))


def test_checkpoints_leave_no_gap_and_a_later_attempt_begins_where_its_leader_knew(log: Log) -> None:
    def kept() -> list[tuple[str, int, int]]:
        request = log.state.request(FIRST)
        assert request is not None
        return [(part.payload, part.start, part.stop) for part in request.parts]

    assert log.keep(FIRST, OLD, 1, 3) == Kept(())
    assert log.freed == [digest((FIRST, OLD, 1))]
    log.keep(FIRST, OLD, 0, 3, of="a")
    log.keep(FIRST, OLD, 3, 6, of="b")
    assert kept() == [(digest("a"), 0, 3), (digest("b"), 3, 6)]
    log.keep(FIRST, NEW, 2, 4, of="c")
    assert kept() == [(digest("a"), 0, 2), (digest("c"), 2, 4)]
    assert log.freed[1:] == [digest("b")]
    assert log.keep(FIRST, OLD, 4, 6) == Kept(()), "of an older attempt"
    assert log.keep(FIRST, NEW, 4, 11) == Kept(()), "more than the response may have"
    assert log.keep(FIRST, NEW, 4, 4) == Kept(())
    log.keep(FIRST, NEW, 0, 1, of="d")
    assert kept() == [(digest("d"), 0, 1)]


def test_an_older_attempt_ends_nothing(log: Log) -> None:
    """The highest attempt counts, never the first: else failures would favour short answers."""
    log.keep(FIRST, NEW, 0, 2)
    assert log.end(FIRST, OLD) == Ended(())
    assert log.end(FIRST, NEW, tokens=11) == Ended(()), "more than the response may have"
    assert log.end(FIRST, NEW) == Ended((FIRST,))


@pytest.mark.parametrize(
    ("ended", "message"),
    [
        (RequestEnded(FIRST, OLD, "stop", 0), "the response 3/0 has no token: only a failed one may have none"),
        (RequestEnded(FIRST, OLD, "stop", 1), "the response 3/0 has tokens, and no payload has them"),
    ],
)
def test_an_end_has_its_tokens(log: Log, ended: RequestEnded, message: str) -> None:
    assert refusal(log.say(End(1, (ended,)))) == ("BadCommand", message)


def test_a_failure_says_why(log: Log) -> None:
    log.end(FIRST, OLD, "failed", 0)
    log.say(End(1, (RequestEnded(SECOND, None, "failed", 0),)))
    errors = [request.end.error for _, _, request in log.state.requests() if request.end is not None]
    assert errors == ["it is poison", "the manager gave no reason"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Done(SdkSender(2, 2), (FIRST,)), "request 3/0 has not ended, so it can't be done"),
        (Done(SdkSender(2, 2), (RequestId(9, 0),)), "request 9/0 is none of consumer 'main'"),
        (Cancel(SdkSender(2, 2), ("p", "nobody")), "there is no group 'nobody' to cancel: submit it first"),
        (Submit(SdkSender(2, 2), (), payload("x")), "an entry submits 1 to 1024 groups, not 0"),
        (Submit(SdkSender(2, 2), (group("q", digest="x"),), payload("x")), "'x' is no digest of group 'q'"),
        (Submit(SdkSender(2, 2), (group("q"),), Payload("x", 1)), "'x' is no digest of a payload"),
        (
            Submit(SdkSender(2, 2), (group("q"),), payload("prompts", 7)),
            f"payload {digest('prompts')} has 100 bytes, not 7",
        ),
        (
            Submit(SdkSender(2, 2), (group("q"),), payload("x", 2**30)),
            f"a payload has 1 to {64 * 2**20} bytes, not {2**30}: submit fewer prompts at once",
        ),
    ],
)
def test_what_the_sdk_never_says_is_refused(log: Log, entry: AnyEntry, message: str) -> None:
    assert refusal(log.say(entry)) == ("BadCommand", message)
    assert log.state.open == 2


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([group("")], "the id '' can't be used: take 1 to 128 printable characters"),
        ([group("a\n")], "the id 'a\\n' can't be used: take 1 to 128 printable characters"),
        ([group("q", size=0)], "group 'q' has 0 responses: take 1 to 1024"),
        ([group("q", prompt_tokens=0)], "group 'q' has 0 prompt tokens: take 1 to 4194304"),
        ([group("q", tokens_max=2**40)], f"group 'q' has {2**40} tokens a response: take 1 to 4194304"),
        ([group("q"), group("q")], "two prompts of one call have the id 'q': give each its own"),
        (
            [group(f"{number}", size=1024) for number in range(256)],
            "the job has 2 open requests and may have 262144: submit these 262146 after others have ended",
        ),
    ],
)
def test_bad_prompts_are_refused_whole(log: Log, groups: list[GroupSubmitted], message: str) -> None:
    assert refusal(log.submit(group("good"), *groups)) == ("BadPrompt", message)
    assert (log.state.open, [*log.state.consumers["main"].ids]) == (2, ["p"])


def test_a_consumer_acknowledges_nothing_of_another(log: Log) -> None:
    log.end(FIRST, OLD)
    log.attach(name="second")
    assert refusal(log.done(FIRST))[1] == "request 3/0 is none of consumer 'second'"


def test_what_is_no_entry_changes_nothing_and_no_entry_is_folded_twice(log: Log) -> None:
    assert log.folded(decode("end", b"{")) == Folded(
        Refused("BadCommand", "the body is no entry: Input data was truncated")
    )
    with pytest.raises(ValueError, match="entry 4 was folded before: the state is at 4"):
        fold(log.state, 4, Lead(9, "m"))


@pytest.mark.parametrize(
    ("verb", "body", "reason"),
    [
        ("end", encode(Lead(1, "m")), "the subject says 'end' and the body says 'lead'; they must agree"),
        ("lead", b'{"verb":"lead","term":-1,"manager":"m"}', "the body is no entry: Expected `int` >= 0 - at `$.term`"),
        (
            "lead",
            b'{"verb":"lead","term":9007199254740992,"manager":"m"}',
            "the body is no entry: Expected `int` <= 9007199254740991 - at `$.term`",
        ),
        (
            "lead",
            b'{"verb":"lead","term":1,"manager":"m","more":1}',
            "the body is no entry: Object contains unknown field `more`",
        ),
        ("lead", b" " * 262_145, "the body has 262145 bytes; an entry has at most 262144"),
    ],
)
def test_what_can_not_be_read_says_why(verb: str, body: bytes, reason: str) -> None:
    assert decode(verb, body) == UnreadableEntry(verb, reason)


def test_the_policy_is_what_the_latest_trainer_wants(log: Log) -> None:
    """The default is said by nothing, in the log and in a snapshot: an earlier release refuses fields that it lacks."""
    said = msgspec.json.decode(encode(Attach("main", "policy", 0, "n", DEFAULT_POLICY)))
    assert said.keys() == {"verb", "name", "model", "epoch", "nonce"}
    assert "policy" not in msgspec.msgpack.decode(encode_state(log.state))["consumers"]["main"]
    log.say(Attach("main", "policy", 0, "n", "streamrl"))
    assert log.state.consumers["main"].policy == "streamrl"
    assert decode_state(encode_state(log.state)).consumers["main"].policy == "streamrl"
    log.attach()
    assert log.state.consumers["main"].policy == DEFAULT_POLICY
    log.say(Attach("main", "policy", 0, "n", "later"))
    consumer = log.state.consumers["main"]
    assert consumer.policy == "later", "a release that does not know it folds the same"
