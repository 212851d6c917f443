"""What a leader takes in, and what it wants done. Pure values."""

from typing import Literal

import msgspec

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import Attempt, RequestEnded, RequestId, TokensKept
from tensorhub_common.protocol.rollout.messages import (
    AbortRequest,
    AbortResult,
    AssignRequest,
    AssignResult,
    Frame,
    FrameResult,
    HeartbeatResult,
    PublishedVersions,
    Report,
    ReportResult,
    RunnerHeartbeat,
    Sampling,
    TokenRun,
    VersionRule,
)
from tensorhub_rollout.log.outcomes import Outcome


class EntryFolded(msgspec.Struct, frozen=True):
    """The state was changed by an entry with this outcome."""

    outcome: Outcome


class HeartbeatCame(msgspec.Struct, frozen=True):
    """A runner lives."""

    runner: str
    beat: RunnerHeartbeat


class ReportCame(msgspec.Struct, frozen=True):
    """A runner said what it holds."""

    runner: str
    report: Report


class FrameCame(msgspec.Struct, frozen=True):
    """A runner sent tokens."""

    runner: str
    frame: Frame


class AssignAnswered(msgspec.Struct, frozen=True):
    """A runner answered which attempts it takes."""

    runner: str
    incarnation: int
    results: tuple[AssignResult, ...]


class AbortAnswered(msgspec.Struct, frozen=True):
    """A runner answered where attempts ended, and which it has forgotten."""

    runner: str
    incarnation: int
    stopped: tuple[AbortResult, ...]
    forgotten: tuple[Attempt, ...]


class PrefixLoaded(msgspec.Struct, frozen=True):
    """What checkpoints hold of a request, read from their payloads."""

    request: RequestId
    tokens: bytes
    logprobs: bytes
    runs: tuple[TokenRun, ...]


class PromptLoaded(msgspec.Struct, frozen=True):
    """What an attempt needs of a request's submission."""

    request: RequestId
    prompt: bytes
    sampling: Sampling
    rule: VersionRule
    age_max: int | None = None
    newest: int | None = None
    """The newest version that was published when it was submitted; None: its trainer knew of none."""


class LoadingFailed(msgspec.Struct, frozen=True):
    """What the log keeps of a request can't be read, and no repeat helps."""

    request: RequestId
    error: str


class HubHold(msgspec.Struct, frozen=True):
    """What the rollout manager holds of a model, as the job's log has it; (term, n) of the last word."""

    term: int = 0
    n: int = 0
    versions: tuple[int, ...] = ()
    copied: frozenset[int] = frozenset()
    """Those of which the hub has a copy."""
    coming: frozenset[int] = frozenset()
    """Those of which a copy is being read: the holder that it is read from may be gone for others already."""


class VersionsSeen(msgspec.Struct, frozen=True):
    """The versions of a model changed."""

    model: str
    versions: PublishedVersions
    available: frozenset[int] = frozenset()
    """Those that a replica has."""
    kept: frozenset[int] = frozenset()
    """Those that are retained, pinned or held, and have a copy that may not vanish."""
    hold: HubHold | None = None
    """None: the level of the job's log knows no holds."""


class RoomSeen(msgspec.Struct, frozen=True):
    """How many bytes the payloads of the job may have together; 0: any number."""

    payload_bytes_max: int


class BusChanged(msgspec.Struct, frozen=True):
    """The connection to NATS came or went."""

    is_connected: bool


class StoringFailed(msgspec.Struct, frozen=True):
    """These ends were not written, and never will be by that entry."""

    requests: tuple[RequestId, ...]


class Place(msgspec.Struct, frozen=True):
    """The policy: begin an attempt of a waiting request there, for this reason."""

    request: RequestId
    runner: str
    reason: str = ""


class Withdraw(msgspec.Struct, frozen=True):
    """The policy: stop the attempt of a request; then begin one on `target`, or let it wait (None), for this reason."""

    request: RequestId
    target: str | None = None
    reason: str = ""


class Want(msgspec.Struct, frozen=True):
    """The policy: have an instance load a version and keep it, or follow the newest one."""

    runner: str
    version: int | Literal["newest"]


class EndSeeding(msgspec.Struct, frozen=True):
    """The policy: tell the trainer's own engine that it may stop."""

    runner: str


LeaderInput = (
    EndSeeding
    | EntryFolded
    | HeartbeatCame
    | ReportCame
    | FrameCame
    | AssignAnswered
    | AbortAnswered
    | PrefixLoaded
    | PromptLoaded
    | LoadingFailed
    | VersionsSeen
    | RoomSeen
    | BusChanged
    | StoringFailed
    | Place
    | Withdraw
    | Want
    | Tick
)

# ------------------------------------------------------------------------------------------------------ effects


class SendAssign(msgspec.Struct, frozen=True):
    """Ask a runner to begin attempts."""

    runner: str
    request: AssignRequest


class SendAbort(msgspec.Struct, frozen=True):
    """Ask a runner to stop attempts, or to forget them."""

    runner: str
    request: AbortRequest


class AnswerFrame(msgspec.Struct, frozen=True):
    """Answer the frame that came."""

    result: FrameResult


class AnswerReport(msgspec.Struct, frozen=True):
    """Answer the report that came."""

    result: ReportResult


class AnswerHeartbeat(msgspec.Struct, frozen=True):
    """Answer the heartbeat that came."""

    result: HeartbeatResult


class LoadPrefix(msgspec.Struct, frozen=True):
    """Read what checkpoints hold of the request."""

    request: RequestId


class LoadPrompt(msgspec.Struct, frozen=True):
    """Read what the submission says of the request."""

    request: RequestId


class StoreEnd(msgspec.Struct, frozen=True):
    """Write the response, then the entry that ends its request."""

    ended: RequestEnded
    tokens: bytes
    logprobs: bytes
    runs: tuple[TokenRun, ...]


class StoreTokens(msgspec.Struct, frozen=True):
    """Write tokens of a checkpoint, then its entry."""

    instance: str
    part: TokensKept
    tokens: bytes
    logprobs: bytes
    runs: tuple[TokenRun, ...]


class InstanceLost(msgspec.Struct, frozen=True):
    """An instance is gone, for this reason; its requests wait again."""

    runner: str
    reason: str
    is_left: bool = False
    """It had said that it leaves, and had nothing any more."""


LeaderEffect = (
    SendAssign
    | SendAbort
    | AnswerFrame
    | AnswerReport
    | AnswerHeartbeat
    | LoadPrefix
    | LoadPrompt
    | StoreEnd
    | StoreTokens
    | InstanceLost
)
