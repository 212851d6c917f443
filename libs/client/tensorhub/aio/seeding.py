"""A trainer's own engine that generates at the beginning of a step (RLBoost, NSDI'26, section 4.1).

Always true: once a seeding has ended, however it did, the engine has nothing of it and makes no step; what it had begun
goes on elsewhere, behind its last token.
"""

import asyncio
import importlib
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self

from tensorhub import arguments
from tensorhub._control.registry_client import RegistryClient
from tensorhub._rollouts.manager_client import ManagerClient
from tensorhub_common.errors import BadCommand, NotPublished
from tensorhub_common.protocol.rollout.questions import SeedingQuestion, SeedingState

IDLE_S: Final = 1.0
"""A seeding ends before its time where its engine had nothing to do for so long."""
FIRST_S: Final = 5.0
"""So long its first request may take to come: a manager that leads since a moment ago places nothing for a second."""

UNTIMED_S_MAX: Final = 86_400.0
"""So long a seeding lasts at most where no other instance is there, or the manager says when it is enough: it ends
before that once nothing is left to do."""

_INSTANCE: Final = "tensorhub_runner.app.local_instance"
_ENGINE: Final = ("begin", "stop", "step", "weights_changed", "has_work", "capacity", "facts")
"""What is called of an engine (tensorhub_runner.engines.engine)."""


class LocalInstance(Protocol):
    """What runs the engine; `tensorhub_runner` has it."""

    @property
    def tokens(self) -> int:
        """How many tokens were made here."""

    async def start(self, version: int, root: str) -> None:
        """Take requests."""

    async def wait_enough(self, idle_s: float, first_s: float) -> None:
        """Wait until the manager says that it is enough, or it had nothing to do for so long.

        `first_s`: so long the first request may take to come.
        """

    async def leave(self) -> None:
        """Give back all that is open."""


class SeedingClock:
    """What a trainer measures of its steps for seeding, and what is known of it. Times in seconds."""

    def __init__(self) -> None:
        self.train_wait_s = self.seeded_s = 0.0
        self.state: SeedingState | None = None
        self.is_seeding = False
        self._version: int | None = None

    def begin_step(self, version: int) -> None:
        """Measure anew where the trainer has published since; else the step goes on."""
        if version != self._version:
            self._version, self.train_wait_s, self.seeded_s = version, 0.0, 0.0


class SeedingTrainer(NamedTuple):
    """Who seeds: its lines to manager and registry, and the version that its engine reads, if there is one."""

    manager: ManagerClient
    registry: RegistryClient
    model: str
    attachment: int
    version: int | None


class Seeding:
    """One seeding, as `async with`: the engine takes requests from its beginning on."""

    def __init__(
        self,
        trainer: SeedingTrainer,
        clock: SeedingClock,
        engine: Any,  # noqa: ANN401 (an engine of tensorhub_runner's protocol; the SDK depends on no service)
        *,
        seconds: float | None,
        initial_s: float,
        gain: float,
        timeout_s: float,
    ) -> None:
        missing = [name for name in _ENGINE if not hasattr(engine, name)]
        if missing:
            raise BadCommand(
                f"seeding needs an engine, for example tensorhub_runner.engines.torch_engine.TorchEngine, and "
                f"{type(engine).__name__} has no {arguments.listed(missing)}"
            )
        self.seconds: float | None = None if seconds is None else arguments.seconds("seconds", seconds)
        """How long the engine generates at most, counted from the beginning.

        None: until the manager says that it is enough, or nothing is left to do. Before the block also: as is learnt.
        """
        self._initial_s = arguments.seconds("initial_s", initial_s)
        self._gain = arguments.seconds("gain", gain)
        if not self._gain:
            raise BadCommand("gain=0 is not possible: take a positive number; a higher one learns more slowly")
        self._timeout_s = arguments.seconds("timeout_s", timeout_s)
        self._trainer, self._clock, self._engine = trainer, clock, engine
        self._instance: LocalInstance | None = None
        self._began_at = 0.0

    @property
    def remote_max(self) -> int | None:
        """How many instances beside this one are worth having, as far as is known; None before the block."""
        return None if self._clock.state is None else self._clock.state.remote_max

    @property
    def tokens(self) -> int:
        """How many tokens the engine has made."""
        return 0 if self._instance is None else self._instance.tokens

    async def __aenter__(self) -> Self:
        """Ask how long to seed, and have the engine take requests.

        Raises:
            NotPublished: This process has registered no shard of the model that holds a version.
            BadCommand: Another seeding of these rollouts is under way.
            RolloutUnavailable: No manager answered within the bound, or another trainer has attached since.
        """
        clock = self._clock
        if self._trainer.version is None:
            raise NotPublished(
                f"the engine can't say which version it has: seeding takes it from a shard of model "
                f"{self._trainer.model!r} that this process has registered and published, and there is none"
            )
        if clock.is_seeding:
            raise BadCommand("these rollouts seed already: one engine at a time is possible")
        clock.is_seeding = True
        try:
            await self._begin(self._trainer.version)
        except BaseException:
            clock.is_seeding = False
            raise
        return self

    async def _begin(self, version: int) -> None:
        clock, trainer = self._clock, self._trainer
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        question = SeedingQuestion(
            trainer.attachment,
            version,
            clock.train_wait_s,
            clock.seeded_s,
            self._initial_s,
            self._gain,
            clock.state,
        )
        answer = await trainer.manager.seeding(question, deadline)
        assert answer.state is not None
        clock.state = answer.state
        clock.begin_step(version)
        if self.seconds is None:
            is_timed = answer.has_others and not answer.is_watched
            self.seconds = answer.state.seed_s if is_timed else None
        make = importlib.import_module(_INSTANCE).LocalInstance
        bus = await trainer.registry.bus(max(0.0, deadline - loop.time()))
        instance: LocalInstance = make(bus, trainer.manager.job, trainer.model, self._engine)
        self._began_at = loop.time()
        try:
            await instance.start(version, answer.root)
        except BaseException:
            await instance.leave()
            raise
        self._instance = instance

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until the time is over, or the engine has nothing to do; then give back what is open.

        After an error it is given back at once.
        """
        instance, loop = self._instance, asyncio.get_running_loop()
        assert instance is not None
        seconds = UNTIMED_S_MAX if self.seconds is None else self.seconds
        try:
            if kind is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._began_at + seconds):
                        await instance.wait_enough(IDLE_S, FIRST_S)
        finally:
            try:
                await instance.leave()
            finally:
                self._clock.is_seeding = False
                self._clock.seeded_s += loop.time() - self._began_at
