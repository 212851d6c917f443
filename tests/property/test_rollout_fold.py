"""Whatever stands in the log of a job's rollouts: a request ends once, is done once, no payload is lost."""

from collections import Counter
from hashlib import sha256

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.protocol.rollout.entries import (
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
    SdkSender,
    Submit,
    TokensKept,
)
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.outcomes import Acknowledged, Attached, Cancelled, Ended, Refused, Submitted
from tensorhub_rollout.log.state import RolloutState, decode_state, encode_state

SMALL = st.integers(0, 3)
PAYLOADS = st.integers(0, 5).map(lambda number: Payload(sha256(b"%d" % number).hexdigest(), number + 1))
REQUESTS = st.builds(RequestId, st.integers(0, 12), SMALL)
ATTEMPTS = st.builds(Attempt, SMALL, SMALL)
SENDERS = st.builds(SdkSender, st.integers(0, 12), st.integers(0, 5))
GROUPS = st.builds(
    lambda id_, kind, size, *, is_named: GroupSubmitted(id_, kind * 64, size, 1, 5, is_named=is_named),
    st.sampled_from("pqr"),
    st.sampled_from("ab"),
    st.integers(1, 2),
    is_named=st.booleans(),
)
ENTRIES: st.SearchStrategy[AnyEntry] = st.one_of(
    st.builds(Attach, st.sampled_from(["main", "second"]), st.just("policy"), st.integers(0, 2), st.just("nonce")),
    st.builds(Submit, SENDERS, st.lists(GROUPS, min_size=1, max_size=3).map(tuple), PAYLOADS),
    st.builds(Cancel, SENDERS, st.lists(st.sampled_from("pqr"), max_size=2).map(tuple)),
    st.builds(Done, SENDERS, st.lists(REQUESTS, max_size=4).map(tuple)),
    st.builds(Lead, SMALL, st.just("manager")),
    st.builds(
        Checkpoint,
        SMALL,
        st.just("engine"),
        st.lists(st.builds(TokensKept, REQUESTS, ATTEMPTS, SMALL, st.integers(0, 6)), max_size=4).map(tuple),
        PAYLOADS,
    ),
    st.builds(
        End,
        SMALL,
        st.lists(
            st.builds(RequestEnded, REQUESTS, st.none() | ATTEMPTS, st.sampled_from(["stop", "failed"]), SMALL),
            max_size=4,
        ).map(tuple),
        st.none() | PAYLOADS,
    ),
)
OPENING: list[AnyEntry] = [
    Lead(1, "manager"),
    Attach("main", "policy", 0, "nonce"),
    Submit(
        SdkSender(2, 1),
        (GroupSubmitted("p", "a" * 64, 2, 1, 5), GroupSubmitted("q", "a" * 64, 1, 1, 5)),
        Payload("f" * 64, 9),
    ),
]


def without_memory(state: RolloutState) -> RolloutState:
    """Return the state as it is but for the sequence, and what was said last on each attachment."""
    copy = decode_state(encode_state(state))
    copy.seq = 0
    for consumer in copy.consumers.values():
        consumer.n, consumer.last_seq, consumer.error, consumer.message = 0, 0, None, None
    return copy


@given(st.lists(ENTRIES, max_size=40))
def test_each_request_ends_once_and_is_done_once_and_refused_entries_change_nothing(entries: list[AnyEntry]) -> None:
    state, again = RolloutState("job"), RolloutState("job")
    opened, ended, gone = Counter[RequestId](), Counter[RequestId](), Counter[RequestId]()
    in_use = set[str]()
    for seq, entry in enumerate([*OPENING, *entries], start=1):
        before, known = without_memory(state), set(state.payloads)
        folded = fold(state, seq, entry)
        state.check()
        match folded.outcome:
            case Submitted(opened=requests):
                opened.update(requests)
            case Cancelled(requests=requests) | Ended(requests=requests):
                ended.update(requests)
            case Acknowledged(requests=requests):
                assert all(ended[each] == 1 for each in requests)
                gone.update(requests)
            case Attached(replaced=int()) if before.consumers != without_memory(state).consumers:
                left = {of for of, _, _ in state.requests()}
                gone.update(of for of, _, _ in before.requests() if of not in left)
            case Refused():
                assert without_memory(state) == before
        in_use |= set(state.payloads)
        assert known - set(state.payloads) <= set(folded.freed)
        assert not set(folded.freed) & set(state.payloads)
        # A manager that begins with a snapshot at any entry folds the rest alike.
        again = decode_state(encode_state(again))
        assert fold(again, seq, msgspec.json.decode(msgspec.json.encode(entry), type=type(entry))) == folded
        assert again == state
    assert set(opened.values()) == {1}
    assert max(ended.values(), default=1) == max(gone.values(), default=1) == 1
    assert opened.keys() == {of for of, _, _ in state.requests()} | gone.keys()
    assert ended.keys() <= opened.keys()


@given(st.lists(ENTRIES, max_size=30), st.integers(0, 29))
def test_an_entry_of_the_sdk_that_is_written_twice_counts_once(entries: list[AnyEntry], at: int) -> None:
    once, twice = RolloutState("job"), RolloutState("job")
    for seq, entry in enumerate([*OPENING, *entries[: at + 1]], start=1):
        fold(once, seq, entry)
        fold(twice, seq, entry)
    last = [*OPENING, *entries[: at + 1]][-1]
    if isinstance(last, Submit | Cancel | Done):
        fold(twice, twice.seq + 1, last)
        assert without_memory(twice) == without_memory(once)
