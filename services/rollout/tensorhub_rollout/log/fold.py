"""The fold of a job's rollouts: one entry of the log in, its outcome out. The same on every manager.

docs/design/rollouts/log.md has the rules. Invariants:
- A refused entry changes nothing but the memory of its refusal.
- A request ends once. Its first end in the log counts.
- Nothing of a lower term, of an ended attachment or of an older attempt counts.
- A payload is in `Folded.freed` exactly when nothing names it any more.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from tensorhub_common.catalog.transitions import transition
from tensorhub_common.errors import BadCommand, BadPrompt, InvalidName, StaleSender, TensorHubError
from tensorhub_common.protocol.rollout.entries import (
    PAYLOAD_BYTES_MAX,
    AnyEntry,
    Attach,
    Attempt,
    Cancel,
    Checkpoint,
    Done,
    End,
    EndReason,
    GroupSubmitted,
    Lead,
    Payload,
    RequestId,
    Scale,
    SdkSender,
    Submit,
    TokensKept,
    UnreadableEntry,
)
from tensorhub_common.protocol.subjects import check_name
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
from tensorhub_rollout.log.state import (
    DONE_IDS_MAX,
    Consumer,
    Group,
    Part,
    Request,
    RolloutState,
    StoredEnd,
    StoredPayload,
    Submission,
    WishedInstances,
)
from tensorhub_rollout.log.transitions import REQUEST_TRANSITIONS, RequestState, RequestTransition

CONSUMERS_MAX: Final = 64
SITES_MAX: Final = 64
"""Limit of the sites at which instances are wished for."""
GROUPS_MAX: Final = 1024
"""Limit of the groups of one entry."""
GROUP_SIZE_MAX: Final = 1024
OPEN_REQUESTS_MAX: Final = 262_144
"""Limit of a job's open requests."""
TOKENS_MAX: Final = 4_194_304
"""Limit of a response's tokens, and of a prompt's."""
ID_CHARS_MAX: Final = 128
MESSAGE_CHARS_MAX: Final = 2000
"""A sentence in an entry is cut here."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


class _EntryRefused(Exception):
    """An entry changes nothing; `error` is what its sender is told."""

    def __init__(self, error: type[TensorHubError], message: str) -> None:
        super().__init__(message)
        self.error, self.message = error.__name__, message


def fold(state: RolloutState, seq: int, entry: AnyEntry | UnreadableEntry) -> Folded:
    """Fold the entry with this sequence into the state. Raises ValueError for one that was folded before."""
    if seq <= state.seq:
        raise ValueError(f"entry {seq} was folded before: the state is at {state.seq}")
    state.seq = seq
    step = _Step(state, seq)
    try:
        outcome = step.take(entry)
    except _EntryRefused as no:
        outcome = Refused(no.error, no.message)
    if isinstance(entry, Submit | Cancel | Done):
        _remember(state, seq, entry.by, outcome)
    return Folded(outcome, tuple(step.freed))


def _remember(state: RolloutState, seq: int, by: SdkSender, outcome: Outcome) -> None:
    """Keep the outcome of the attachment's last number. An older word or a repeat does not take its place."""
    consumer = next((each for each in state.consumers.values() if each.attachment == by.attachment), None)
    if consumer is None or by.n <= consumer.n:
        return
    consumer.n, consumer.last_seq = by.n, seq
    consumer.error = outcome.error if isinstance(outcome, Refused) else None
    consumer.message = outcome.message if isinstance(outcome, Refused) else None


class _Step:
    """What one entry does to the state."""

    def __init__(self, state: RolloutState, seq: int) -> None:
        self.state, self.seq = state, seq
        self.freed: list[str] = []

    def take(self, entry: AnyEntry | UnreadableEntry) -> Outcome:
        if isinstance(entry, UnreadableEntry):
            raise _EntryRefused(BadCommand, entry.reason)
        return _HANDLERS[type(entry)](self, entry)

    # --------------------------------------------------------------------------------------------- of the SDK

    def attach(self, entry: Attach) -> Attached:
        for what, name in (("consumer", entry.name), ("model", entry.model)):
            try:
                check_name(what, name)
            except InvalidName as why:
                raise _EntryRefused(InvalidName, str(why)) from None
        before = self.state.consumers.get(entry.name)
        if before is None and len(self.state.consumers) >= CONSUMERS_MAX:
            raise _EntryRefused(BadCommand, f"the job has {CONSUMERS_MAX} consumers already: use one of their names")
        if before is None or entry.epoch > before.epoch:
            dropped = () if before is None else self._drop_all(entry.name)
            consumer = Consumer(entry.model, entry.epoch, self.seq, entry.nonce, policy=entry.policy)
            self.state.consumers[entry.name] = consumer
            replaced = None if before is None else before.attachment
            return Attached(entry.name, entry.epoch, replaced, dropped)
        if entry.epoch < before.epoch:
            raise _EntryRefused(
                StaleSender,
                f"consumer {entry.name!r} is at epoch {before.epoch}, so epoch {entry.epoch} is over: connect with "
                f"epoch {before.epoch}, or a higher one to drop what it left",
            )
        if entry.model != before.model and before.ids:
            raise _EntryRefused(
                BadCommand,
                f"consumer {entry.name!r} has open groups of model {before.model!r}: connect to that model, with "
                "another name, or with a higher epoch",
            )
        replaced = before.attachment
        before.model, before.attachment, before.nonce = entry.model, self.seq, entry.nonce
        before.n, before.last_seq, before.error, before.message = 0, 0, None, None
        before.policy = entry.policy
        return Attached(entry.name, entry.epoch, replaced)

    def submit(self, entry: Submit) -> Submitted | Repeated:
        name, consumer = self._consumer_of(entry.by)
        if (repeated := _repeat_of(consumer, entry.by)) is not None:
            return repeated
        self._check_groups(consumer, entry.groups)
        self._check_payload(entry.payload)
        new = Submission(name, entry.payload.digest, {}, {})
        known, first = [], 0
        for index, group in enumerate(entry.groups):
            if group.id in consumer.ids or group.id in consumer.done_ids:
                known.append(group.id)
            else:
                new.groups[index] = _opened(group, first)
                consumer.ids[group.id] = (self.seq, index)
                new.requests.update((first + each, Request(index)) for each in range(group.size))
            first += group.size
        if new.groups:
            self.state.submissions[self.seq] = new
            self.state.open += len(new.requests)
            consumer.open += len(new.requests)
            self._use(entry.payload)
        elif entry.payload.digest not in self.state.payloads:
            self.freed.append(entry.payload.digest)
        return Submitted(tuple(RequestId(self.seq, index) for index in new.requests), tuple(known))

    def cancel(self, entry: Cancel) -> Cancelled | Repeated:
        _, consumer = self._consumer_of(entry.by)
        if (repeated := _repeat_of(consumer, entry.by)) is not None:
            return repeated
        unknown = [each for each in entry.groups if each not in consumer.ids and each not in consumer.done_ids]
        if unknown:
            raise _EntryRefused(BadCommand, f"there is no group {unknown[0]!r:.200} to cancel: submit it first")
        cancelled = []
        for at in (consumer.ids[each] for each in entry.groups if each in consumer.ids):
            for request in self._requests_of(*at):
                if self._is_open(request):
                    self._end(request, RequestTransition.CANCELLED, StoredEnd(self.seq, "cancelled"))
                    cancelled.append(request)
        return Cancelled(tuple(cancelled))

    def done(self, entry: Done) -> Acknowledged | Repeated:
        name, consumer = self._consumer_of(entry.by)
        if (repeated := _repeat_of(consumer, entry.by)) is not None:
            return repeated
        for of in entry.requests:
            submission = self.state.submissions.get(of.submission)
            if of.submission >= self.seq or (submission is not None and submission.consumer != name):
                raise _EntryRefused(BadCommand, f"request {_named(of)} is none of consumer {name!r}")
            if self._is_open(of):
                raise _EntryRefused(BadCommand, f"request {_named(of)} has not ended, so it can't be done")
        # What is gone was done before.
        gone = [of for of in dict.fromkeys(entry.requests) if self.state.request(of) is not None]
        for of in gone:
            self._forget(of, RequestTransition.ACKNOWLEDGED)
        return Acknowledged(tuple(gone))

    def _consumer_of(self, by: SdkSender) -> tuple[str, Consumer]:
        """Return the live attachment's consumer, with its name."""
        for name, consumer in self.state.consumers.items():
            if consumer.attachment == by.attachment:
                return name, consumer
        raise _EntryRefused(
            StaleSender,
            "another trainer has attached to this consumer since: only the latest may submit, cancel and acknowledge",
        )

    def _check_groups(self, consumer: Consumer, groups: tuple[GroupSubmitted, ...]) -> None:
        if not 1 <= len(groups) <= GROUPS_MAX:
            raise _EntryRefused(BadCommand, f"an entry submits 1 to {GROUPS_MAX} groups, not {len(groups)}")
        seen = set[str]()
        for group in groups:
            _check_group(group)
            if group.id in seen:
                raise _EntryRefused(BadPrompt, f"two prompts of one call have the id {group.id!r}: give each its own")
            seen.add(group.id)
            if self._digest_of(consumer, group.id) not in {None, group.digest}:
                raise _EntryRefused(
                    BadPrompt,
                    f"the id {group.id!r} stands for another prompt, sampling, version or group size: take another id",
                )
        opened = sum(each.size for each in groups if self._digest_of(consumer, each.id) is None)
        if self.state.open + opened > OPEN_REQUESTS_MAX:
            raise _EntryRefused(
                BadPrompt,
                f"the job has {self.state.open} open requests and may have {OPEN_REQUESTS_MAX}: submit these {opened} "
                "after others have ended",
            )

    def _digest_of(self, consumer: Consumer, id_: str) -> str | None:
        """Return the content that an id stands for; None: it is free."""
        if id_ in consumer.ids:
            submission, index = consumer.ids[id_]
            return self.state.submissions[submission].groups[index].digest
        return consumer.done_ids.get(id_)

    # --------------------------------------------------------------------------------------------- of managers

    def lead(self, entry: Lead) -> Leads:
        if entry.term <= self.state.term:
            raise _EntryRefused(
                StaleSender,
                f"the log is at term {self.state.term}, so term {entry.term} leads no more: take a higher one",
            )
        self.state.term, self.state.manager = entry.term, entry.manager[:ID_CHARS_MAX]
        return Leads(self.state.term, self.state.manager)

    def checkpoint(self, entry: Checkpoint) -> Kept:
        self._check_term(entry.term)
        self._check_payload(entry.payload)
        self._use(entry.payload)
        kept = tuple(part for index, part in enumerate(entry.parts) if self._keep(part, entry.payload.digest, index))
        self._drop(entry.payload.digest)
        return Kept(kept)

    def _keep(self, part: TokensKept, digest: str, index: int) -> bool:
        """Keep a part where it leaves no gap; what was kept behind its beginning is dropped."""
        request, group = self._open_request(part.request)
        if request is None or group is None or not part.start < part.stop <= group.tokens_max:
            return False
        if not _counts(part.attempt, request) or part.start > request.kept:
            return False
        self._cut(request, part.start)
        request.attempt = part.attempt
        request.parts.append(Part(digest, part.start, part.stop, index))
        self.state.payloads[digest].uses += 1
        return True

    def _cut(self, request: Request, stop: int) -> None:
        """Drop the kept tokens from `stop` on."""
        while request.kept > stop:
            last = request.parts[-1]
            if last.start < stop:
                last.stop = stop
            else:
                self._drop(request.parts.pop().payload)

    def end(self, entry: End) -> Ended:
        self._check_term(entry.term)
        for each in entry.ends:
            if each.tokens and entry.payload is None:
                raise _EntryRefused(
                    BadCommand, f"the response {_named(each.request)} has tokens, and no payload has them"
                )
            if each.reason != "failed" and not each.tokens:
                raise _EntryRefused(
                    BadCommand, f"the response {_named(each.request)} has no token: only a failed one may have none"
                )
        if entry.payload is not None:
            self._check_payload(entry.payload)
            self._use(entry.payload)
        ended = []
        for index, each in enumerate(entry.ends):
            request, group = self._open_request(each.request)
            if request is None or group is None or each.tokens > group.tokens_max:
                continue
            if each.attempt is not None and not _counts(each.attempt, request):
                continue
            payload = entry.payload.digest if entry.payload is not None and each.tokens else None
            reason: EndReason = each.reason
            error = (each.error or "the manager gave no reason")[:MESSAGE_CHARS_MAX] if reason == "failed" else None
            stored = StoredEnd(self.seq, reason, each.tokens, each.attempt, payload, index, error)
            request.attempt = each.attempt or request.attempt
            self._end(each.request, RequestTransition.ENDED, stored)
            ended.append(each.request)
        if entry.payload is not None:
            self._drop(entry.payload.digest)
        return Ended(tuple(ended))

    def scale(self, entry: Scale) -> Scaled:
        self._check_term(entry.term)
        if entry.site not in self.state.wished and len(self.state.wished) >= SITES_MAX:
            raise _EntryRefused(BadCommand, f"instances are wished for at {SITES_MAX} sites already")
        self.state.wished[entry.site] = WishedInstances(entry.instances, entry.reason)
        return Scaled()

    def _check_term(self, term: int) -> None:
        if term != self.state.term:
            raise _EntryRefused(StaleSender, f"the log is at term {self.state.term}: nothing of term {term} counts")

    # --------------------------------------------------------------------------------------------- requests

    def _requests_of(self, submission: int, group: int) -> list[RequestId]:
        found = self.state.submissions[submission].groups[group]
        return [RequestId(submission, index) for index in range(found.first, found.first + found.size)]

    def _is_open(self, of: RequestId) -> bool:
        request = self.state.request(of)
        return request is not None and request.state is RequestState.OPEN

    def _open_request(self, of: RequestId) -> tuple[Request | None, Group | None]:
        request = self.state.request(of)
        if request is None or request.state is not RequestState.OPEN:
            return None, None
        return request, self.state.submissions[of.submission].groups[request.group]

    def _end(self, of: RequestId, how: RequestTransition, end: StoredEnd) -> None:
        submission = self.state.submissions[of.submission]
        request = submission.requests[of.index]
        request.state = transition(REQUEST_TRANSITIONS, request.state, how)
        self._cut(request, 0)
        request.end = end
        if end.payload is not None:
            self.state.payloads[end.payload].uses += 1
        consumer = self.state.consumers[submission.consumer]
        self._count_closed(consumer, submission.groups[request.group])
        consumer.ended.setdefault(self.seq, []).append(of)

    def _count_closed(self, consumer: Consumer, group: Group) -> None:
        """Count one open request less."""
        self.state.open -= 1
        consumer.open -= 1
        group.open -= 1

    def _drop_all(self, name: str) -> tuple[RequestId, ...]:
        """Forget all of a consumer; return what was open."""
        mine = [of for of, submission, _ in self.state.requests() if submission.consumer == name]
        dropped = tuple(of for of in mine if self._is_open(of))
        for of in mine:
            self._forget(of, RequestTransition.DROPPED)
        return dropped

    def _forget(self, of: RequestId, how: RequestTransition) -> None:
        """Forget a request, and what only it kept: its group, its submission, payloads."""
        submission = self.state.submissions[of.submission]
        consumer = self.state.consumers[submission.consumer]
        request = submission.requests.pop(of.index)
        group = submission.groups[request.group]
        if request.state is RequestState.OPEN:
            self._count_closed(consumer, group)
        if request.end is not None:
            consumer.ended[request.end.seq].remove(of)
            if not consumer.ended[request.end.seq]:
                del consumer.ended[request.end.seq]
            if request.end.payload is not None:
                self._drop(request.end.payload)
        request.state = transition(REQUEST_TRANSITIONS, request.state, how)
        self._cut(request, 0)
        group.undone -= 1
        if not group.undone:
            self._close(consumer, submission.groups.pop(request.group))
        if not submission.groups:
            self._drop(self.state.submissions.pop(of.submission).payload)

    def _close(self, consumer: Consumer, group: Group) -> None:
        """Keep the id of a group that is done, for a while."""
        del consumer.ids[group.id]
        if group.is_named:
            consumer.done_ids[group.id] = group.digest
            if len(consumer.done_ids) > DONE_IDS_MAX:
                del consumer.done_ids[next(iter(consumer.done_ids))]

    # --------------------------------------------------------------------------------------------- payloads

    def _check_payload(self, payload: Payload) -> None:
        if _DIGEST.fullmatch(payload.digest) is None:
            raise _EntryRefused(BadCommand, f"{payload.digest!r:.80} is no digest of a payload")
        if not 1 <= payload.nbytes <= PAYLOAD_BYTES_MAX:
            raise _EntryRefused(
                BadCommand,
                f"a payload has 1 to {PAYLOAD_BYTES_MAX} bytes, not {payload.nbytes}: submit fewer prompts at once",
            )
        known = self.state.payloads.get(payload.digest)
        if known is not None and known.nbytes != payload.nbytes:
            raise _EntryRefused(BadCommand, f"payload {payload.digest} has {known.nbytes} bytes, not {payload.nbytes}")

    def _use(self, payload: Payload) -> None:
        known = self.state.payloads.get(payload.digest)
        if known is None:
            known = self.state.payloads[payload.digest] = StoredPayload(payload.nbytes)
            self.state.payload_bytes += payload.nbytes
        known.uses += 1

    def _drop(self, digest: str) -> None:
        """Count one use less; what nothing uses is freed."""
        payload = self.state.payloads[digest]
        payload.uses -= 1
        if not payload.uses:
            del self.state.payloads[digest]
            self.state.payload_bytes -= payload.nbytes
            self.freed.append(digest)


def _opened(group: GroupSubmitted, first: int) -> Group:
    return Group(
        group.id,
        group.digest,
        first,
        group.size,
        group.prompt_tokens,
        group.tokens_max,
        group.priority,
        group.version,
        group.is_named,
        undone=group.size,
        open=group.size,
    )


def _check_group(group: GroupSubmitted) -> None:
    if not 1 <= len(group.id) <= ID_CHARS_MAX or not group.id.isprintable():
        raise _EntryRefused(
            BadPrompt, f"the id {group.id!r:.200} can't be used: take 1 to {ID_CHARS_MAX} printable characters"
        )
    for what, number, highest in (
        ("responses", group.size, GROUP_SIZE_MAX),
        ("prompt tokens", group.prompt_tokens, TOKENS_MAX),
        ("tokens a response", group.tokens_max, TOKENS_MAX),
    ):
        if not 1 <= number <= highest:
            raise _EntryRefused(BadPrompt, f"group {group.id!r} has {number} {what}: take 1 to {highest}")
    if _DIGEST.fullmatch(group.digest) is None:
        raise _EntryRefused(BadCommand, f"{group.digest!r:.80} is no digest of group {group.id!r}")


def _repeat_of(consumer: Consumer, by: SdkSender) -> Repeated | None:
    """Return the answer to a repeat, or None for a new entry."""
    if by.n > consumer.n:
        return None
    if by.n < consumer.n or by.n == 0:
        raise _EntryRefused(BadCommand, f"the attachment has said {consumer.n} already, so {by.n} comes too late")
    return Repeated(consumer.last_seq, consumer.error, consumer.message)


def _counts(attempt: Attempt, request: Request) -> bool:
    """Tell whether an attempt is at least as high as the highest that was named for a request."""
    return request.attempt is None or attempt >= request.attempt


def _named(of: RequestId) -> str:
    return f"{of.submission}/{of.index}"


_HANDLERS: Final[Mapping[type, Callable[[_Step, Any], Outcome]]] = {
    Attach: _Step.attach,
    Submit: _Step.submit,
    Cancel: _Step.cancel,
    Done: _Step.done,
    Lead: _Step.lead,
    Checkpoint: _Step.checkpoint,
    End: _Step.end,
    Scale: _Step.scale,
}
