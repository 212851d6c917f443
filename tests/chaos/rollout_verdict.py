"""What a trainer got of a job of rollouts, and whether it is what it has to get.

- Each response comes, once, or again to a later attachment until it is done, and the same each time.
- Its tokens, versions and runs are those that an engine made, by the engines' own records. With engines whose tokens
  follow from the seed they are also those that any engine would have made.
- Within a response, a later run has no earlier attempt.
- No response begins on a version that its rule forbids.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from tests.kit.engine_records import BEGUN, Records, fingerprints, repeats
from tests.kit.fake_engine import VOCABULARY, logprob_of, token_of

import tensorhub
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import attempt_key
from tensorhub_common.protocol.rollout.payloads import request_seed

SEED: Final = 11
STOP: Final = 7
WRONGS_MAX: Final = 100

Key = tuple[str, int]
"""A group and the index of a response in it."""


class Run(msgspec.Struct, frozen=True, array_like=True):
    start: int
    end: int
    version: int
    instance: str
    attempt: tuple[int, int]
    kv: str


class Delivered(msgspec.Struct, frozen=True):
    """One response, as it can be sent by a trainer in a process of its own."""

    group: str
    index: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    runs: list[Run]
    reason: str
    error: str | None
    age: int

    @property
    def key(self) -> Key:
        return self.group, self.index

    @property
    def attempts(self) -> list[tuple[int, int]]:
        """Return the attempts whose tokens are in it."""
        return list(dict.fromkeys(run.attempt for run in self.runs))


def delivered_of(response: tensorhub.Response) -> Delivered:
    return Delivered(
        response.group,
        response.index,
        response.token_ids.tolist(),
        response.logprobs.tolist(),
        response.versions.tolist(),
        [Run(each.start, each.end, each.version, each.instance, each.attempt, each.kv) for each in response.runs],
        response.finish_reason,
        response.error,
        response.age,
    )


def expected(group: str, index: int, tokens_max: int) -> list[int]:
    """Return the tokens that a response must have, whoever made them."""
    seed = request_seed(SEED, group, index)
    found: list[int] = []
    while len(found) < tokens_max and STOP not in found:
        found.append(token_of(seed, len(found)))
    return found


@dataclass
class Verdict:
    """What came of one consumer's requests."""

    tokens_max: int
    is_exact: bool = True
    """Whether tokens follow from the seed."""
    submitted: dict[str, int] = field(default_factory=dict)
    """How many responses each group has."""
    may_fail: set[str] = field(default_factory=set)
    """Groups whose responses may end as `failed` or `cancelled`."""
    received: dict[Key, Delivered] = field(default_factory=dict)
    done: set[Key] = field(default_factory=set)
    wrongs: list[str] = field(default_factory=list)
    _yielded: set[Key] = field(default_factory=set)
    """In the attachment that lives."""

    def attached(self) -> None:
        """Note that a trainer has attached: what is not done comes again."""
        self._yielded = set()

    def take(self, responses: Iterable[Delivered]) -> None:
        """Note what a trainer was given."""
        for each in responses:
            self._take(each)

    def acknowledged(self, responses: Iterable[Delivered]) -> None:
        """Note what is done for certain."""
        self.done.update(each.key for each in responses)

    def _take(self, each: Delivered) -> None:
        if each.group not in self.submitted or not each.index < self.submitted[each.group]:
            self.wrong(f"{each.key} came, and was not submitted")
        if each.key in self._yielded:
            self.wrong(f"{each.key} came twice to one trainer")
        if each.key in self.done:
            self.wrong(f"{each.key} came again after it was done")
        if self.received.setdefault(each.key, each) != each:
            self.wrong(f"{each.key} came again as another response")
        self._yielded.add(each.key)
        if each.reason in {"stop", "length"} or each.group not in self.may_fail:
            self._check(each)

    def _check(self, each: Delivered) -> None:
        count = len(each.tokens)
        is_over = each.tokens[-1:] == [STOP] or count == self.tokens_max
        if each.reason not in {"stop", "length"} or not is_over or STOP in each.tokens[:-1]:
            self.wrong(f"{each.key} ended as {each.reason} after {count} tokens ({each.error})")
        elif self.is_exact and each.tokens != expected(each.group, each.index, self.tokens_max):
            self.wrong(f"{each.key} has other tokens: {each.tokens}")
        if [run.start for run in each.runs] != [0, *(run.end for run in each.runs[:-1])] or each.runs[-1].end != count:
            self.wrong(f"{each.key} has runs with gaps: {each.runs}")
        if [run.attempt for run in each.runs] != sorted(run.attempt for run in each.runs):
            self.wrong(f"{each.key} has a later attempt before an earlier one: {each.runs}")
        of_runs = [run.version for run in each.runs for _ in range(run.start, run.end)]
        told = np.array([logprob_of(version, at) for at, version in enumerate(of_runs)], np.float32)
        if each.versions != of_runs or each.logprobs != told.tolist():
            self.wrong(f"{each.key} names versions that did not make its tokens: {each.runs}")

    def wrong(self, sentence: str) -> None:
        if len(self.wrongs) < WRONGS_MAX:
            self.wrongs.append(sentence)

    @property
    def missing(self) -> list[Key]:
        """Return what was submitted and never came."""
        wanted = ((group, index) for group, size in self.submitted.items() for index in range(size))
        return [key for key in wanted if key not in self.received]

    @property
    def tokens(self) -> int:
        """How many tokens came."""
        return sum(len(each.tokens) for each in self.received.values())

    def attempts(self) -> Counter[int]:
        """Return how many responses have tokens of one attempt, of two, and so on."""
        return Counter(len(each.attempts) for each in self.received.values())

    def check_records(self, records: Records) -> "Made":
        """Compare every token that came with what engines say that they made; return how many were made in all."""
        made = records[records["token"] != BEGUN]
        known = fingerprints(*(made[key] for key in ("seed", "attempt", "position", "token", "version")))
        came = [each for each in self.received.values() if each.tokens]
        told = [_told(each) for each in came]
        if not came:
            return Made(len(made), 0, repeats(records))
        is_known = np.isin(np.concatenate(told), known)
        for each, found in zip(came, np.split(is_known, np.cumsum([len(part) for part in told])[:-1]), strict=True):
            if not found.all():
                lacking = np.flatnonzero(~found).tolist()
                self.wrong(f"tokens {lacking} of {each.key} were made by no engine as {each.runs} tell")
        return Made(len(made), self.tokens, repeats(records))

    def check_staleness(self, newest_at_submit: Mapping[str, int], staleness: int) -> int:
        """Return how many responses began on an older version than was allowed when they were submitted.

        Versions are numbered one by one. Each that is too old is wrong.
        """
        stale = 0
        for each in self.received.values():
            if each.versions and each.versions[0] < newest_at_submit[each.group] - staleness:
                stale += 1
                self.wrong(
                    f"{each.key} began on version {each.versions[0]}; {newest_at_submit[each.group]} was published "
                    f"before it was submitted, and {staleness} newer ones are allowed"
                )
        return stale


def _told(each: Delivered) -> npt.NDArray[np.uint64]:
    """Return the fingerprint of each token as its response tells of it."""
    count = len(each.tokens)
    lengths = [run.end - run.start for run in each.runs]
    return fingerprints(
        np.full(count, request_seed(SEED, each.group, each.index), np.uint64),
        np.repeat([attempt_key(Attempt(*run.attempt)) for run in each.runs], lengths),
        np.arange(count),
        np.array(each.tokens),
        np.array(each.versions),
    )


@dataclass(frozen=True)
class Made:
    """Tokens: of all engines together, those that came, and those that had been made before."""

    made: int
    delivered: int
    again: int

    @property
    def share_again(self) -> float:
        """What was made and not delivered, of what was delivered."""
        return (self.made - self.delivered) / max(1, self.delivered)


assert STOP < VOCABULARY
