"""Responses as a trainer gets them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tensorhub._rollouts.prompts import Sampling, sampling_of
from tensorhub_common.protocol.rollout import messages
from tensorhub_common.protocol.rollout.entries import Attempt, EndReason
from tensorhub_common.protocol.rollout.messages import Kv
from tensorhub_common.protocol.rollout.payloads import StoredTokens, SubmittedPrompts, request_seed
from tensorhub_common.protocol.rollout.questions import EndedRequest

FinishReason = Literal["stop", "length", "cancelled", "failed"]
SessionEnd = Literal["reward", "idle", "closed"]
"""`reward`: it got its last reward. `idle`: no call came for too long. `closed`: its gateway was closed."""
NO_VERSION: Final = -1
"""The version of a token that no weights made."""


@dataclass(frozen=True, slots=True)
class RunEngine:
    """What made the tokens of a run. Two exact engines of one build make the same tokens of the same weights."""

    kind: str
    """"torch", or what an engine of one's own calls itself."""
    build: str
    """Names and versions of what computes."""
    dtype: str
    """In which it computes."""
    is_exact: bool
    """Whether tokens and log-probabilities depend on nothing but prompt, sampling and weights."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens `start` to `end` (exclusive) of a response were made by one attempt on one version.

    `kv`: whether the run began with a cache of its own version (`fresh`, `recomputed`), or with one of a version before
    (`kept`). `root` is the digest of the version's bytes at that instance. `age`: how many newer versions there are, as
    of the response's delivery. `engine`: None where a runner of an earlier release does not say.
    """

    start: int
    end: int
    version: int
    root: str
    instance: str
    attempt: tuple[int, int]
    kv: Kv
    age: int
    engine: RunEngine | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One response. `token_ids`, `logprobs` and `versions` have one length: int32, float32 (natural log), int64.

    One with `turns` is a *trajectory*: a session of a gateway from its first call to one that nothing follows. Its
    `prompt_ids` are those of the first call, and `token_ids` all that followed: what was made, and what users and tools
    said between. Tokens that were not made have the log-probability 0, the version -1, no run, and the loss mask 0.
    """

    group: str
    index: int
    """Within its group."""
    prompt_ids: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    """With the stop token, where one ended it."""
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    """The version whose weights were in the engine's memory when each token was made."""
    runs: tuple[TokenRun, ...]
    finish_reason: FinishReason
    error: str | None
    """Why it failed."""
    seed: int
    """Its own, of 64 bits."""
    sampling: Sampling
    """As its prompt was submitted with."""
    metadata: Any
    """Of its prompt."""
    age: int
    """How many newer versions are published than that of its oldest token, as of its delivery."""
    since_submit: int | None = None
    """How many versions were published from its submission to its delivery; None: not known. Where a trainer publishes
    one a step, these are steps."""
    session: str | None = None
    """Of a trajectory, and of a call that no gateway has joined to one."""
    turn: int | None = None
    """Which call of its session it is; None: it is a trajectory, or of no session."""
    turns: "tuple[Turn, ...]" = ()
    """The calls of a trajectory."""
    reward: float | None = None
    """Of a trajectory's session; None: it got none."""
    session_end: SessionEnd | None = None
    """Why the session of a trajectory ended."""

    @property
    def loss_mask(self) -> npt.NDArray[np.int8]:
        """Return 1 for each token to train on, else 0. A token of a session has 1 in one of its trajectories."""
        if not self.turns:
            return np.ones(len(self.token_ids), np.int8)
        mask = np.zeros(len(self.token_ids), np.int8)
        for each in self.turns:
            if each.is_trained:
                mask[each.start : each.end] = 1
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One call in a trajectory: tokens `start` to `end` (exclusive) of the trajectory were made in it."""

    number: int
    """Calls of a session are counted in the order in which they came."""
    start: int
    end: int
    is_trained: bool
    """Whether these tokens have loss mask 1 here: of the trajectories that share a call, the first trains it."""
    forked: str | None
    """Why it does not go on from an earlier call of its session; None: it does, or is the first."""
    response: Response
    """As it was generated: with its own seed and sampling, and with all tokens before it as its prompt."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """How old what a batch has is, in versions: by age, how many tokens, responses and groups have it.

    The age of a token is how many newer versions were published when its response was delivered. That of a response is
    the age of its oldest token, and that of a group the age of its oldest response in the batch. `since_submit` counts
    groups by how many versions were published between their submission and their delivery: in it is also how long
    they waited. A group of which that is not known is left out there.
    """

    tokens: dict[int, int]
    responses: dict[int, int]
    groups: dict[int, int]
    since_submit: dict[int, int] = field(default_factory=dict)


def staleness_of(responses: Iterable[Response]) -> Staleness:
    """Count ages. A response without a token has none."""
    tokens, ages, groups, waited = Counter[int](), Counter[int](), dict[str, int](), dict[str, int]()
    for each in responses:
        for run in each.runs:
            tokens[run.age] += run.end - run.start
        if not each.runs:
            continue
        ages[each.age] += 1
        groups[each.group] = max(each.age, groups.get(each.group, 0))
        if each.since_submit is not None:
            waited[each.group] = each.since_submit
    counted = (tokens, ages, Counter(groups.values()), Counter(waited.values()))
    return Staleness(*(dict(sorted(each.items())) for each in counted))


def engine_of(sent: messages.RunEngine) -> RunEngine:
    """Return an engine that has travelled, as a trainer sees it."""
    return RunEngine(sent.kind, sent.build, sent.dtype, sent.is_exact)


def response_of(
    ended: EndedRequest, prompts: SubmittedPrompts, stored: StoredTokens | None, published: tuple[int, ...]
) -> Response:
    """Return the response of a request that has ended. `stored`: its tokens, None where it has none."""
    prompt = prompts.prompts[ended.group_index]
    tokens = b"" if stored is None else stored.tokens
    count = len(tokens) // 4
    runs = () if stored is None else _runs(stored, count, published)
    versions = np.empty(count, np.int64)
    for run in runs:
        versions[run.start : run.end] = run.version
    reason: EndReason = ended.reason
    turn = prompt.turn
    return Response(
        group=ended.group,
        index=ended.index_in_group,
        prompt_ids=np.frombuffer(prompt.tokens, "<i4"),
        token_ids=np.frombuffer(tokens, "<i4"),
        logprobs=np.frombuffer(b"" if stored is None else stored.logprobs, "<f4"),
        versions=versions,
        runs=runs,
        finish_reason=reason,
        error=ended.error,
        seed=request_seed(prompts.sampling.seed, ended.group, ended.index_in_group),
        sampling=sampling_of(prompts.sampling),
        metadata=msgspec.json.decode(prompt.metadata) if prompt.metadata else None,
        age=max((run.age for run in runs), default=0),
        since_submit=None if prompts.newest is None else _newer(prompts.newest, published),
        session=None if turn is None else turn.session,
        turn=None if turn is None else turn.turn,
    )


def _runs(stored: StoredTokens, count: int, published: tuple[int, ...]) -> tuple[TokenRun, ...]:
    ends = [*(run.start for run in stored.runs[1:]), count]
    return tuple(
        TokenRun(
            run.start,
            end,
            run.version,
            run.root,
            run.instance,
            _pair(run.attempt),
            run.kv,
            _newer(run.version, published),
            None if run.engine is None else engine_of(run.engine),
        )
        for run, end in zip(stored.runs, ends, strict=True)
        if run.start < end
    )


def _newer(version: int, published: tuple[int, ...]) -> int:
    return sum(each > version for each in published)


def _pair(attempt: Attempt) -> tuple[int, int]:
    return attempt.term, attempt.n
