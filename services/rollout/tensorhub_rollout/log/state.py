"""What the log of a job's rollouts says: consumers, submissions, requests, payloads. `fold` changes it.

A snapshot with a field that this release does not know is refused, since to leave it out would be to fold differently.

Invariants (`check`):
- A payload is known exactly while a submission, a kept part or an undone end names it.
- A group has as many undone requests as it counts. A submission without an undone request is gone.
- An id belongs to one group of its consumer.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from tensorhub_common.protocol.rollout.entries import DEFAULT_POLICY, Attempt, EndReason, RequestId
from tensorhub_rollout.log.transitions import RequestState

DONE_IDS_MAX: Final = 262_144
"""Limit of the ids of done groups that each consumer keeps, the latest."""


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """Tokens `start` to `stop` of a request, as number `index` in a payload of a checkpoint."""

    payload: str
    start: int
    stop: int
    index: int = 0


class StoredEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a request ended. `payload` has its response as number `index`; None: it has no token."""

    seq: int
    """The entry that ended it."""
    reason: EndReason
    tokens: int = 0
    attempt: Attempt | None = None
    payload: str | None = None
    index: int = 0
    error: str | None = None


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """One response that is wanted."""

    group: int
    """The index of its group in the submission."""
    state: RequestState = RequestState.OPEN
    attempt: Attempt | None = None
    """The highest attempt that a checkpoint or an end has named."""
    parts: list[Part] = []
    """What checkpoints hold of it, in order and without a gap from token 0."""
    end: StoredEnd | None = None

    @property
    def kept(self) -> int:
        """How many tokens checkpoints hold."""
        return self.parts[-1].stop if self.parts else 0


class Group(msgspec.Struct, forbid_unknown_fields=True):
    """The requests of one prompt. `first` and `size`: which of its submission they are."""

    id: str
    digest: str
    first: int
    size: int
    prompt_tokens: int
    tokens_max: int
    priority: int
    version: int | None
    is_named: bool
    undone: int
    """How many of its requests are not done."""
    open: int
    """How many of its requests are open."""


class Submission(msgspec.Struct, forbid_unknown_fields=True):
    """One `submit`: its new groups by their index in the entry, and their requests by theirs."""

    consumer: str
    payload: str
    groups: dict[int, Group]
    requests: dict[int, Request]


class Consumer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One name under which a trainer takes responses."""

    model: str
    epoch: int
    attachment: int
    nonce: str
    n: int = 0
    """The last number that the live attachment used."""
    last_seq: int = 0
    """The entry that had it."""
    error: str | None = None
    message: str | None = None
    """With what that entry was refused."""
    ids: dict[str, tuple[int, int]] = {}
    """The groups that are not done, as (submission, index of the group)."""
    done_ids: dict[str, str] = {}
    """Digests by id of the named groups that are done, in the order in which they were."""
    open: int = 0
    """How many of its requests are open."""
    ended: dict[int, list[RequestId]] = {}
    """What ended and is not done, by the entry that ended it."""
    policy: str = DEFAULT_POLICY
    """How its requests are placed. The default is left out, so that earlier releases read the snapshot."""


class StoredPayload(msgspec.Struct, forbid_unknown_fields=True):
    """A payload that is in use. `uses`: how many things name it."""

    nbytes: int
    uses: int = 0


ANY_SITE: Final = ""


class WishedInstances(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How many remote instances the policy wishes for at a site, and why."""

    instances: int
    reason: str


class RolloutState(msgspec.Struct, forbid_unknown_fields=True):
    """A job's rollouts at one sequence of their log."""

    job: str
    seq: int = 0
    term: int = 0
    manager: str = ""
    open: int = 0
    """How many requests are open."""
    consumers: dict[str, Consumer] = {}
    submissions: dict[int, Submission] = {}
    payloads: dict[str, StoredPayload] = {}
    payload_bytes: int = 0
    """Of all payloads together."""
    wished: dict[str, WishedInstances] = {}
    """By site; "" is any."""

    def request(self, of: RequestId) -> Request | None:
        """Return the request, or None: it is done and forgotten, or never was."""
        submission = self.submissions.get(of.submission)
        return None if submission is None else submission.requests.get(of.index)

    def group_of(self, of: RequestId) -> Group:
        """Return the group of a request that is not done."""
        submission = self.submissions[of.submission]
        return submission.groups[submission.requests[of.index].group]

    def model_of(self, of: RequestId) -> str:
        """Return the model of a request that is not done."""
        return self.consumers[self.submissions[of.submission].consumer].model

    def kept_of(self, of: RequestId) -> int:
        """Return how many tokens of a request the log has."""
        request = self.request(of)
        return 0 if request is None else request.kept

    def policy_of(self, model: str) -> str:
        """Return how requests of a model are placed: as the trainer wants it that has attached last."""
        consumers = [each for each in self.consumers.values() if each.model == model]
        return max(consumers, key=lambda each: each.attachment).policy if consumers else DEFAULT_POLICY

    def requests(self) -> Iterator[tuple[RequestId, Submission, Request]]:
        """Return all that are not done."""
        for seq, submission in self.submissions.items():
            for index, request in submission.requests.items():
                yield RequestId(seq, index), submission, request

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        uses: Counter[str] = Counter(each.payload for each in self.submissions.values())
        for _, _, request in self.requests():
            uses.update(part.payload for part in request.parts)
            if request.end is not None and request.end.payload is not None:
                uses[request.end.payload] += 1
            _check_request(request)
        assert uses == {digest: payload.uses for digest, payload in self.payloads.items()}
        assert self.payload_bytes == sum(each.nbytes for each in self.payloads.values())
        named = {}
        for seq, submission in self.submissions.items():
            _check_submission(submission)
            for index, group in submission.groups.items():
                named[(submission.consumer, group.id)] = (seq, index)
        assert named == {(name, of): at for name, each in self.consumers.items() for of, at in each.ids.items()}
        open_ = Counter(
            submission.consumer for _, submission, request in self.requests() if request.state is RequestState.OPEN
        )
        assert open_ == {name: each.open for name, each in self.consumers.items() if each.open}
        assert self.open == open_.total()
        ended = {of for each in self.consumers.values() for requests in each.ended.values() for of in requests}
        assert ended == {of for of, _, request in self.requests() if request.state is RequestState.ENDED}


def _check_request(request: Request) -> None:
    assert request.state is not RequestState.DONE
    assert (request.end is not None) == (request.state is RequestState.ENDED)
    assert not request.parts or request.state is RequestState.OPEN
    at = 0
    for part in request.parts:
        assert part.start == at < part.stop
        at = part.stop


def _check_submission(submission: Submission) -> None:
    assert submission.groups
    for index, group in submission.groups.items():
        assert group.undone == sum(each.group == index for each in submission.requests.values())
        assert group.undone > 0
        mine = (each for each in submission.requests.values() if each.group == index)
        assert group.open == sum(each.state is RequestState.OPEN for each in mine)
    assert {each.group for each in submission.requests.values()} == submission.groups.keys()


def encode_state(state: RolloutState) -> bytes:
    """Return the state as a snapshot holds it."""
    return msgspec.msgpack.encode(state)


def decode_state(data: bytes) -> RolloutState:
    """Read what `encode_state` wrote. Raises one of `MALFORMED` on anything else."""
    return msgspec.msgpack.decode(data, type=RolloutState)
