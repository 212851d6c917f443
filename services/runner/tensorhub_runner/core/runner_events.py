"""What a runner takes in, and what it wants done. Pure values."""

import msgspec

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import (
    AbortRequest,
    AbortResult,
    AssignRequest,
    AssignResult,
    Finished,
    Frame,
    FrameResult,
    HeartbeatResult,
    Report,
    ReportResult,
    RunEngine,
    RunnerHeartbeat,
    Sampling,
)


class AssignCame(msgspec.Struct, frozen=True):
    """A leader asks to begin attempts."""

    request: AssignRequest


class AbortCame(msgspec.Struct, frozen=True):
    """A leader asks to stop attempts, or to forget them."""

    request: AbortRequest


class FrameAnswered(msgspec.Struct, frozen=True):
    """A leader answered a frame."""

    result: FrameResult


class ReportAnswered(msgspec.Struct, frozen=True):
    """A leader answered a report."""

    result: ReportResult


class HeartbeatAnswered(msgspec.Struct, frozen=True):
    """A leader answered a heartbeat."""

    result: HeartbeatResult


class StepTokens(msgspec.Struct, frozen=True):
    """What a step of the engine made of one attempt."""

    attempt: Attempt
    tokens: bytes
    logprobs: bytes
    finished: Finished | None = None
    is_current: bool = False
    """Whether all that is cached of it was computed with the weights in memory, as far as the engine can tell."""


class EngineStepped(msgspec.Struct, frozen=True):
    """The engine made one step, which took so long."""

    made: tuple[StepTokens, ...]
    seconds: float = 0.0


class LoadWanted(msgspec.Struct, frozen=True):
    """A newer version can be loaded: nothing begins that would have to be waited for."""


class WeightsChanging(msgspec.Struct, frozen=True):
    """The engine stands still, and its memory is being changed."""


class WeightsComing(msgspec.Struct, frozen=True):
    """The next version is on its way: in how many seconds it is here, as fast as it comes now."""

    loads_in_s: float


class WeightsLoaded(msgspec.Struct, frozen=True):
    """A version, with its root, is in the engine's memory from the next step on. None: there are no weights now."""

    version: int | None
    root: str = ""
    engine: RunEngine | None = None
    """What computes with it."""


class PreemptionNoticed(msgspec.Struct, frozen=True):
    """The machine goes away soon."""


RunnerInput = (
    AssignCame
    | AbortCame
    | FrameAnswered
    | ReportAnswered
    | HeartbeatAnswered
    | EngineStepped
    | LoadWanted
    | WeightsChanging
    | WeightsComing
    | WeightsLoaded
    | PreemptionNoticed
    | Tick
)


class AnswerAssign(msgspec.Struct, frozen=True):
    """Answer the assign that came."""

    results: tuple[AssignResult, ...]


class AnswerAbort(msgspec.Struct, frozen=True):
    """Answer the abort that came."""

    stopped: tuple[AbortResult, ...]
    forgotten: tuple[Attempt, ...]


class SendFrame(msgspec.Struct, frozen=True):
    """Send new tokens to the leader."""

    frame: Frame


class SendReport(msgspec.Struct, frozen=True):
    """Tell the leader all that is held."""

    report: Report


class SendHeartbeat(msgspec.Struct, frozen=True):
    """Tell the leader that this runner lives."""

    beat: RunnerHeartbeat


class Begin(msgspec.Struct, frozen=True):
    """Have the engine go on behind these tokens, before its next step."""

    attempt: Attempt
    prompt: bytes
    tokens: bytes
    sampling: Sampling


class Stop(msgspec.Struct, frozen=True):
    """Have the engine leave an attempt, before its next step."""

    attempt: Attempt


RunnerEffect = AnswerAssign | AnswerAbort | SendFrame | SendReport | SendHeartbeat | Begin | Stop
