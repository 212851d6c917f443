"""What manager and runner say to each other over core NATS, as msgpack. docs/design/rollouts/messages.md has the rules.

Core NATS loses, repeats and reorders, so every message says whose it is: the log's creation, the leader's term, the
runner's incarnation and, for each request, its attempt.

Tokens are int32 and log-probabilities float32, both little-endian and without padding, so that neither side makes an
object for each token. Columns of a frame are int64.
"""

from typing import Annotated, Final, Literal

import msgspec

from tensorhub_common.protocol.rollout.entries import Attempt, RequestId

TOKEN_BYTES: Final = 4
"""Of a token, and of a log-probability."""
_COLUMN_BYTES: Final = 8

OnUpdate = Literal["finish", "continue", "restart", "keep"]
"""What becomes of a request when the weights of its engine change."""
Kv = Literal["fresh", "recomputed", "kept"]
"""Whether a token run began with a cache of its own version."""
FinishReason = Literal["stop", "length", "failed", "restart", "superseded"]
"""Why an attempt ended at its runner. `restart`: the weights changed, and its request asks to begin anew then.
`superseded`: its version rule does not allow the engine's version, or the engine has no weights."""
HeldState = Literal["running", "stopped", "finished"]
"""What a runner does with an attempt that it holds. `running` has requests that wait for a slot, too."""


STOP_TOKEN_IDS_MAX: Final = 4096
"""Limit of the stop tokens of a sampling: each assign carries them."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are drawn. `seed` is the request's own."""

    tokens_max: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=STOP_TOKEN_IDS_MAX)] = ()
    logprobs: Literal["processed", "temperature"] = "processed"

    def ended_by(self, tokens: bytes | bytearray) -> Literal["stop", "length"] | None:
        """Tell whether no token may follow `tokens` of a response, and why."""
        if tokens and int.from_bytes(tokens[-TOKEN_BYTES:], "little") in self.stop_token_ids:
            return "stop"
        return "length" if len(tokens) // TOKEN_BYTES >= self.tokens_max else None


class PublishedVersions(msgspec.Struct, frozen=True, array_like=True):
    """All versions that are published and unretired, at a sequence of the job's log.

    `retired`: the first and last versions of each span that the trainer has gone back behind, the latest of these.
    """

    seq: int
    published: tuple[int, ...] = ()
    retired: tuple[tuple[int, int], ...] = ()

    def is_retired(self, version: int) -> bool:
        """Tell whether the trainer has gone back behind a version."""
        return any(first <= version <= last for first, last in self.retired)

    def newer_than(self, version: int) -> int:
        """Return how many versions are newer than this one."""
        return sum(each > version for each in self.published)


class VersionRule(msgspec.Struct, frozen=True, array_like=True):
    """On which versions a request may run: on `pinned` alone, or while at most `staleness` newer ones are published."""

    pinned: int | None = None
    staleness: int = 0
    on_update: OnUpdate = "continue"

    def allows(self, version: int, versions: PublishedVersions) -> bool:
        """Tell whether a request may start on `version`: never on a retired one."""
        if versions.is_retired(version):
            return False
        if self.pinned is not None:
            return version == self.pinned
        return versions.newer_than(version) <= self.staleness


class RunEngine(msgspec.Struct, frozen=True, array_like=True):
    """What made the tokens of a run. Two exact engines of one build make the same tokens of the same weights."""

    kind: str
    build: str
    """Names and versions of what computes."""
    dtype: str
    """In which it computes."""
    is_exact: bool
    """Whether an attempt's tokens and log-probabilities depend on nothing but its prompt, sampling and weights."""


class TokenRun(msgspec.Struct, frozen=True, array_like=True):
    """Tokens from `start` on, up to the next run's, were made by one attempt on one version."""

    start: int
    version: int
    root: str
    instance: str
    attempt: Attempt
    kv: Kv = "fresh"
    engine: RunEngine | None = None
    """None: the runner is of a release that does not say."""


class Assign(msgspec.Struct, frozen=True, array_like=True):
    """One attempt to begin. Its prefix comes in parts: this one has tokens from `start` on, of `prefix` in all."""

    request: RequestId
    attempt: Attempt
    prompt: bytes
    sampling: Sampling
    rule: VersionRule
    prefix: int = 0
    start: int = 0
    tokens: bytes = b""
    logprobs: bytes = b""
    runs: tuple[TokenRun, ...] = ()
    """Of the whole prefix."""


class AssignRequest(msgspec.Struct, frozen=True):
    """From the leader: begin these. `versions` is what the version rules were judged by."""

    log: str
    term: int
    incarnation: int
    versions: PublishedVersions
    assigns: tuple[Assign, ...]


class AssignResult(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens of the prefix the runner holds, or why it does not take the attempt."""

    attempt: Attempt
    held: int
    refused: str | None = None


class AssignAnswer(msgspec.Struct, frozen=True):
    """From a runner: what it says to each attempt of an assign."""

    results: tuple[AssignResult, ...]


class AbortRequest(msgspec.Struct, frozen=True):
    """From the leader: stop some attempts, whose tokens stay at the runner, and forget others."""

    log: str
    term: int
    incarnation: int
    stop: tuple[Attempt, ...] = ()
    forget: tuple[Attempt, ...] = ()


class AbortResult(msgspec.Struct, frozen=True, array_like=True):
    """Where a stopped attempt ended, prefix included. None: the runner does not have it, or has forgotten it."""

    attempt: Attempt
    tokens: int | None


class AbortAnswer(msgspec.Struct, frozen=True):
    """From a runner: where the attempts of an abort ended, and which it has forgotten."""

    stopped: tuple[AbortResult, ...] = ()
    forgotten: tuple[Attempt, ...] = ()


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """An attempt ended by itself. `tokens`: how many its request has then."""

    attempt: Attempt
    tokens: int
    reason: FinishReason
    error: str | None = None


class Frame(msgspec.Struct, frozen=True):
    """From a runner: new tokens, one row for each attempt that has some.

    `attempts`, `starts` and `counts` are columns. `tokens` and `logprobs` have the rows one behind the other.
    """

    log: str
    incarnation: int
    number: int
    attempts: bytes = b""
    """`attempt_key` of each row."""
    starts: bytes = b""
    counts: bytes = b""
    tokens: bytes = b""
    logprobs: bytes = b""
    runs: tuple[tuple[Attempt, TokenRun], ...] = ()
    """The runs that begin in this frame, with the attempts of their rows: a prefix has runs of earlier attempts."""
    finished: tuple[Finished, ...] = ()


def is_well_formed(frame: Frame) -> bool:
    """Tell whether the columns of a frame are whole and name as many tokens as it has."""
    sizes = {len(frame.attempts), len(frame.starts), len(frame.counts)}
    if len(sizes) > 1 or len(frame.attempts) % _COLUMN_BYTES:
        return False
    starts, counts = (memoryview(column).cast("q") for column in (frame.starts, frame.counts))
    if min(starts, default=0) < 0 or min(counts, default=0) < 0:
        return False
    return len(frame.tokens) == len(frame.logprobs) == TOKEN_BYTES * sum(counts)


class FrameResult(msgspec.Struct, frozen=True):
    """From the leader: what it took of a frame."""

    log: str
    term: int
    number: int
    resend: tuple[tuple[Attempt, int], ...] = ()
    """Attempts of which the leader holds less than the frame builds on, with what it holds."""
    wants_report: bool = False
    """The frame has an attempt that the leader does not know."""


class HeldAttempt(msgspec.Struct, frozen=True, array_like=True):
    """One attempt at a runner. `tokens` counts the prefix."""

    request: RequestId
    attempt: Attempt
    tokens: int
    state: HeldState


class Report(msgspec.Struct, frozen=True):
    """From a runner: all attempts that it holds."""

    log: str
    incarnation: int
    held: tuple[HeldAttempt, ...]


class ReportResult(msgspec.Struct, frozen=True):
    """From the leader: the attempts to forget, and from where on it wants the tokens of the others."""

    log: str
    term: int
    forget: tuple[Attempt, ...]
    resend: tuple[tuple[Attempt, int], ...] = ()


class EngineStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of an engine: how many requests it had, how many context tokens on average, and how long it took."""

    batch: int
    context_tokens: float
    seconds: float


class RunnerHeartbeat(msgspec.Struct, frozen=True):
    """From a runner, every `beat_s`."""

    log: str
    incarnation: int
    steps: int
    """Steps of the engine since it began: they stand still while it hangs."""
    model: str
    """The model of the hub whose versions it loads."""
    slots: int
    """How many requests it runs at once."""
    version: int | None
    """The version in the engine's memory; None: none yet, or it is being changed."""
    is_leaving: bool = False
    """A notice of preemption came: it takes no new request."""
    measured: tuple[EngineStep, ...] = ()
    """Some steps since the last heartbeat that made one token of each request, and computed no prompt."""
    is_local: bool = False
    """It is the trainer's own engine, which generates at the beginning of a step alone."""
    keeps_versions: bool = False
    """It loads the version that it is asked for, and keeps that while newer ones are published."""
    loads_in_s: float | None = None
    """How many seconds until its next version is here, as fast as that came last; None: it does not know of one, or
    that time has passed."""


class HeartbeatResult(msgspec.Struct, frozen=True):
    """From the leader. `log` tells the runner which log it is of: a leader knows no runner that says an earlier one."""

    log: str
    term: int
    versions: PublishedVersions
    wants_report: bool = False
    flush_s: float = 0.0
    """New tokens are to be sent no more often than this: the larger the fleet, the longer."""
    version_wanted: int | Literal["newest"] | None = None
    """What it is to have in memory; None: what was said before."""
    is_enough: bool = False
    """To the trainer's own engine: the others are done in time with all that is open, so it may stop."""


_TERM_SHIFT: Final = 32


def attempt_key(attempt: Attempt) -> int:
    """Return an attempt as one number, in the order of attempts. Raises ValueError for one beyond int64."""
    if attempt.term >> 31 or attempt.n >> _TERM_SHIFT:
        raise ValueError(f"{attempt} does not fit a frame: terms end at 2^31 and numbers at 2^32")
    return attempt.term << _TERM_SHIFT | attempt.n


def attempt_of(key: int) -> Attempt:
    """Return the attempt of a key."""
    return Attempt(key >> _TERM_SHIFT, key & ((1 << _TERM_SHIFT) - 1))
