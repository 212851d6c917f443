"""Why a job can't go on, in words for an operator, and what to do. Pure.

Some reasons pass by themselves: the log can't be read or written for a while. For others the job is set aside.
"""

from dataclasses import dataclass, field
from typing import Final

from tensorhub_common.bus.errors import (
    LogFull,
    LogGap,
    LogMissing,
    LogShorter,
    MessageTooLarge,
    NoBus,
    NotPermitted,
    SnapshotBroken,
    StreamMismatch,
)
from tensorhub_common.log_follower.set_aside import SetAside
from tensorhub_common.protocol.log.levels import LevelUnknown
from tensorhub_common.protocol.queries import JobHealth, JobState
from tensorhub_registry.core.log_entries import FoldMismatch

WAITING_S_MIN: Final = 2.0
"""A reason that passes sooner is not shown: a connection or a stream's leader that changes."""

NOTED_S: Final = 60.0
"""A reason that was not noted again for this time has passed. A job tries everything again within seconds, except the
command that an agent is lost, which is dropped and not repeated where the agent beats."""

_REPORT: Final = "this is a fault of TensorHub: report it with the registry's log, and run another release meanwhile"

_ADVICE: Final[tuple[tuple[type[Exception], str], ...]] = (
    (
        FoldMismatch,
        "run one release of the registry everywhere, and look who may write events (docs/operate/security.md)",
    ),
    (LevelUnknown, "run the release that raised it, or a newer one, in every registry and planner"),
    (LogMissing, "open the job again with connect(), or find out who deleted its log"),
    (LogShorter, "find out who replaced the log; 'tensorhub delete' and a new job begin anew"),
    (LogGap, "restore the job's snapshots from a backup; 'tensorhub delete' and a new job begin anew"),
    (SnapshotBroken, "restore the job's snapshots from a backup; 'tensorhub delete' and a new job begin anew"),
    (LogFull, "raise max_bytes of the job's stream, or give NATS more disk space (docs/operate/runbook.md)"),
    (MessageTooLarge, "raise max_payload of NATS to 1 MiB or more"),
    (NotPermitted, "give the registry its permissions anew: 'tensorhub credentials'"),
    (StreamMismatch, "rename or delete the stream: it is none of this hub's"),
    (NoBus, "start NATS, or wait until it is back"),
)
_UNREACHABLE: Final = "look whether more than half of the nodes of NATS run, and which one led the stream"


def advice_on(error: BaseException) -> str:
    """Say what to do about an error that a job was set aside for."""
    return next((text for kind, text in _ADVICE if isinstance(error, kind)), _REPORT)


@dataclass(frozen=True, slots=True)
class JobFailure:
    """Why a job was set aside."""

    why: str
    advice: str
    is_raised: bool = False
    """The job was raised to a level that this release can't fold."""

    @classmethod
    def of(cls, error: BaseException, why: str = "") -> "JobFailure":
        """Take the error, and a sentence that says more than the error's own."""
        return cls(why or str(error), advice_on(error), isinstance(error, LevelUnknown))


@dataclass(slots=True)
class WaitReasons:
    """What one job waits for, by what it can't do meanwhile ("reading", "writing")."""

    _found: dict[str, tuple[float, str, str]] = field(default_factory=dict)
    _noted_at: dict[str, float] = field(default_factory=dict)
    """When each was noted last."""

    def note(self, what: str, error: BaseException, now: float) -> None:
        """Note a failure of what is tried again. `now` in seconds since the epoch."""
        known = self._found.get(what) if self._is_noted(what, now) else None
        text = next((text for kind, text in _ADVICE if isinstance(error, kind)), _UNREACHABLE)
        self._found[what] = (now if known is None else known[0], str(error), text)
        self._noted_at[what] = now

    def clear(self, what: str) -> None:
        """Note that it has worked."""
        self._found.pop(what, None)

    def oldest(self, now: float) -> tuple[float, str, str] | None:
        """Return since when the job waits, why, and what to do; None while it has not waited for long."""
        lasting = (
            found
            for what, found in self._found.items()
            if now - found[0] >= WAITING_S_MIN and self._is_noted(what, now)
        )
        return min(lasting, default=None)

    def _is_noted(self, what: str, now: float) -> bool:
        return now - self._noted_at.get(what, now - NOTED_S) < NOTED_S


def health_of(
    job: str, seq: int, failure: JobFailure | None, aside: SetAside | None, troubles: WaitReasons, now: float
) -> JobHealth:
    """Return how a job gets on, at `now` in seconds since the epoch."""
    if failure is not None:
        since, again_at = (now, now) if aside is None else (aside.since, aside.again_at)
        return JobHealth(
            job=job,
            state=JobState.SET_ASIDE,
            why=failure.why,
            advice=failure.advice,
            seq=seq,
            since=since,
            again_at=again_at,
        )
    waiting = troubles.oldest(now)
    if waiting is not None:
        since, why, advice = waiting
        return JobHealth(job=job, state=JobState.WAITING, why=why, advice=advice, seq=seq, since=since)
    return JobHealth(job=job, state=JobState.WELL, seq=seq)
