"""What an agent is to the rest of the simulation, and what both of its ends know of a read from one source."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from tensorhub_agent.core.agent import AgentCore
from tensorhub_agent.core.effects import AnyCall, EffectOutcome
from tensorhub_agent.leases.lease import LeaseTransition
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.primitives.lease_messages import AvailabilityUpdate
from tensorhub_common.protocol.plans import ReadPriority
from tensorhub_simulator.engine.clock import Node
from tensorhub_simulator.faultsim.models.deltas import Deltas
from tensorhub_simulator.faultsim.models.segments import ModelledShard


class AgentHost(Node):
    """An agent, as its workers, its peers and its readers see it."""

    core: AgentCore
    deltas: Deltas
    host: str
    site: str
    stored: dict[ShardKey, ModelledShard]
    kept: dict[ShardKey, ModelledShard]
    """Memory of a GPU that an earlier process had, and that a worker keeps."""
    drag: float
    """How many times slower it sends than others."""
    dies_in: int | None
    """After this many effects it is killed."""

    @property
    @abstractmethod
    def log_position(self) -> int:
        """Up to which entry it has read the log."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL it, for all jobs."""

    @abstractmethod
    def begin(self, key: ShardKey, call: AnyCall) -> None:
        """Begin a worker's call."""

    @abstractmethod
    def loaded(self, key: ShardKey) -> None:
        """Take note that a worker has written values of its own."""

    @abstractmethod
    def worker_gone(self, session: int) -> None:
        """Take note that a worker's connection has ended."""

    @abstractmethod
    def outcome(self, outcome: EffectOutcome) -> None:
        """Give the core the outcome of an effect."""

    @abstractmethod
    def lease_ended(self, lease: str, how: LeaseTransition) -> None:
        """Take note that a reader is done, or gone."""

    @abstractmethod
    def session_ended(self, key: ShardKey, source: int) -> None:
        """Forget a session of one of its reads."""

    @abstractmethod
    def written_by(self, key: ShardKey, where: Sequence[int], data: bytes) -> None:
        """Write what a source sent."""

    @abstractmethod
    def set_timer(self) -> None:
        """Plan the core's next tick."""


class Session(Protocol):
    """One source of one read, from the lease to the close."""

    reader: AgentHost
    source: AgentHost
    key: ShardKey
    source_key: ShardKey
    number: int
    lease: str
    turn: ReadPriority | None
    reader_life: int
    closing: bool
    closed: bool

    @property
    def is_cut(self) -> bool:
        """Whether nothing passes between the two agents now, other than by NATS."""
        ...

    @property
    def reads(self) -> bool:
        """Whether bytes are under way."""
        ...

    @property
    def source_lives(self) -> bool:
        """Whether the process that granted the lease is there."""
        ...

    def announce(self, update: AvailabilityUpdate) -> None:
        """Carry to the reader what a half-filled source says of its pieces."""
        ...

    def lost(self, reason: str) -> None:
        """End it at the reader."""
        ...

    def source_died(self) -> None:
        """Let the reader learn that the source's process is gone."""
        ...
