"""What every part of one simulated job has: virtual time, random streams, the configuration, and a way to report."""

from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any, Final, TypeVar

from tensorhub_simulator.engine.clock import Clock
from tensorhub_simulator.engine.streams import Streams
from tensorhub_simulator.faultsim.config import WorldConfig
from tensorhub_simulator.faultsim.observations import Observation

O = TypeVar("O", bound=Observation)  # noqa: E741 (the one type of this module)

QUIET_SLOWNESS: Final = 0.3


class Env:
    """The surroundings of one job."""

    def __init__(self, name: str, clock: Clock, streams: Streams, config: WorldConfig, transcript: deque[str]) -> None:
        """Begin at the time of the clock. A job beside another one has the same clock, streams and transcript."""
        self.name, self.clock, self.streams, self.config = name, clock, streams, config
        self.transcript = transcript
        self.counts = Counter[str]()
        """What happened, and how often: that no invariant broke says something only where all of it happened."""
        self.faults_ended_at: float | None = None
        self._numbers = 0
        self._subscribers: dict[type[Observation], list[Callable[[Any], None]]] = {}

    def stream(self, *names: object) -> Random:
        """Return the random stream of this name in this job, at its beginning."""
        return self.streams.of(self.name, *names)

    def number(self) -> int:
        """Return a number that nothing else of this job has."""
        self._numbers += 1
        return self._numbers

    def log_line(self, text: str) -> None:
        """Add a line to the transcript."""
        self.transcript.append(f"{self.clock.now:8.3f}  {text}")

    def subscribe(self, kind: type[O], see: Callable[[O], None]) -> None:
        """Have each observation of this kind given to `see`, in the order of the subscriptions."""
        self._subscribers.setdefault(kind, []).append(see)

    def observe(self, observation: Observation) -> None:
        """Count an observation, and give it to the subscribers of its kind."""
        for name, count in observation.counted():
            if count:
                self.counts[name] += count
        for see in self._subscribers.get(type(observation), ()):
            see(observation)

    @property
    def is_quiet(self) -> bool:
        """Whether the last fault is over."""
        return self.faults_ended_at is not None

    @property
    def slowness(self) -> float:
        """How slow copying is now. Without faults no source is slower than what counts as a stall."""
        return QUIET_SLOWNESS if self.is_quiet else self.config.slowness
