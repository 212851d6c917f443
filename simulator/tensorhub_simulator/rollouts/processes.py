"""The processes of the simulated world, and what they lose when they are killed."""

from dataclasses import dataclass, field

from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import TokenRun
from tensorhub_rollout.core.leader import Leader
from tensorhub_rollout.decisions.decisions import Decisions
from tensorhub_rollout.log.state import RolloutState
from tensorhub_runner.core.runner import Runner


@dataclass(slots=True)
class Written:
    """A response as its payload has it."""

    tokens: bytes
    logprobs: bytes
    runs: tuple[TokenRun, ...]


@dataclass(slots=True)
class Process:
    """What is killed, or stopped for a while. What it planned dies with its life."""

    name: str
    life: int = 0
    is_up: bool = False
    asleep_until: float = 0.0
    stops: int = 0


@dataclass(slots=True)
class ManagerProcess(Process):
    """A manager: it folds the log, and leads while it has a term."""

    state: RolloutState = field(default_factory=lambda: RolloutState("job"))
    next: int = 0
    """Entries that were folded."""
    leader: Leader | None = None
    has_lease: bool = False
    led_at: float = 0.0
    """When it last began to lead."""
    claimed: int = 0
    """The term that it last asked for."""
    decisions: Decisions | None = None
    begun: set[tuple[int, int]] = field(default_factory=set)
    """Groups of which it has placed a request while it leads, as (submission, index of the group)."""


@dataclass(slots=True)
class RunnerProcess(Process):
    """A runner with its engine."""

    incarnation: int = 0
    started_at: float = 0.0
    core: Runner | None = None
    engine: dict[Attempt, tuple[int, int]] = field(default_factory=dict)
    """What the engine runs: seed and next position of each."""
    cached: dict[Attempt, int | None] = field(default_factory=dict)
    """The version that the engine's cache of each was computed with."""
    prefills: dict[Attempt, int] = field(default_factory=dict)
    """How many steps the prompt of an attempt still takes."""
    loaded: int | None = None
    staged: int | None = None
    """What is to take the place of that next."""
    loaded_at: float = 0.0
    is_loading: bool = False
