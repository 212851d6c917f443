"""One training run: a hub with two runners, the trainer of tensorhub.demo.rl, and whatever kills them.

Invariants:
- However it ends, none of its processes is left.
- A trainer that ends is started again, as a supervisor does. One that nobody killed is a fault of the run.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.demo_rl import counted_engine
from benchmarks.demo_rl.tally import Run, Step, Tally
from tensorhub._control.registry_client import NatsAddress, RegistryClient
from tensorhub._rollouts.manager_client import ManagerClient
from tensorhub.demo.rl.clock import CONFIG
from tensorhub.demo.rl.trainer import GROUP_SIZE, GROUPS
from tensorhub.local import tether
from tensorhub.local.children import reason
from tensorhub.local.hub import LocalHub, LocalRollouts
from tensorhub_common.errors import RolloutUnavailable, TensorHubError
from tensorhub_common.protocol.rollout.questions import RolloutStatus

ROOT: Final = Path(__file__).parents[2]
RUNNERS: Final = 2
ENGINE: Final = "benchmarks.demo_rl.counted_engine:load"
JOB: Final = "default"
QUIET_MODEL: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
SHARED_SETTINGS: Final = ("TENSORHUB_SHM_DIR", "TENSORHUB_RUNNER_EXACT", "TENSORHUB_RUNNER_SLOTS")
"""What a run takes from the environment; other settings may be about another hub."""

LOOK_S: Final = 0.5
NOTICED_S: Final = 1.0
"""After this a runner that was killed is no more among those that the manager knows."""
RUN_S_MAX: Final = 3600.0
STOP_S: Final = 5.0
LIVES_MAX: Final = 5
LINE_BYTES_MAX: Final = 1 << 20

OnChange = Callable[["TrainingRun"], None]


class TrainingRun:
    """One run, and how far it is."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        steps: int,
        *,
        kill_every_s: float | None,
        device: str = "cpu",
        on_change: OnChange | None = None,
    ) -> None:
        """Prepare. `kill_every_s`: so often a runner is killed, on average; None: nothing is killed.

        Trainer and runners compute on `device`; on a GPU runners are in fast mode.
        """
        self.seed, self.steps, self.is_disturbed = seed, steps, kill_every_s is not None
        self.kills = Counter[str]()
        self.faults: list[str] = []
        self.last: Step | None = None
        self.status: RolloutStatus | None = None
        """As the manager saw it a moment ago; None: no manager answers."""
        self._folder, self._kill_every_s, self._on_change = folder, kill_every_s, on_change
        self._device = device
        self._tally = Tally(seed, GROUP_SIZE, is_disturbed=self.is_disturbed)
        self._chance = random.Random(seed)
        self._stepped = asyncio.Event()
        self._hub: LocalHub | None = None
        self._trainer: Process | None = None
        self._began: float | None = None
        """When the first prompts were submitted."""

    async def run(self) -> Run:
        """Train, and return what became of it. Raises `TensorHubError` where it can't be trained to the end."""
        CONFIG.save_pretrained(self._folder / "model")
        own = {name: text for name, text in os.environ.items() if not name.startswith("TENSORHUB_")}
        shared = {name: os.environ[name] for name in SHARED_SETTINGS if name in os.environ}
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**own, **shared, **QUIET_MODEL, "PYTHONPATH": paths, "TENSORHUB_RUNNER_DEVICE": self._device}
        if self._device != "cpu":
            environment["TENSORHUB_RUNNER_EXACT"] = "off"
        rollouts = LocalRollouts(RUNNERS, ENGINE, self._folder / "model", JOB)
        hub = LocalHub(self._folder / "hub", rollouts=rollouts, environment=environment)
        async with hub:
            self._hub = hub
            environment["TENSORHUB_DIR"] = str(self._folder / "hub")
            async with RegistryClient(JOB, NatsAddress(hub.hub.nats_all, Path(hub.hub.credentials))) as registry:
                await self._trained(ManagerClient(registry), environment)
            seconds = time.monotonic() - (self._began or 0.0)
            made = counted_engine.tokens_made(self._folder / "hub")
        return self._tally.run(self.steps * GROUPS, seconds, self.kills, made)

    async def _trained(self, manager: ManagerClient, environment: dict[str, str]) -> None:
        try:
            async with asyncio.timeout(RUN_S_MAX), asyncio.TaskGroup() as group:
                beside = [group.create_task(self._look(manager))]
                beside += [group.create_task(each) for each in self._killings()]
                await self._train(environment)
                for each in beside:
                    each.cancel()
        except TimeoutError:
            raise TensorHubError(f"seed {self.seed} was not trained within {RUN_S_MAX:g} s") from None
        finally:
            if self._trainer is not None and self._trainer.returncode is None:
                self._trainer.kill()
                await self._trainer.wait()

    # ------------------------------------------------------------------------------------------ the trainer

    async def _train(self, environment: dict[str, str]) -> None:
        """Start the trainer until it has ended well."""
        log = self._folder / "trainer.log"
        for _ in range(LIVES_MAX):
            killed_before = self.kills["trainer"]
            with log.open("ab") as stderr:
                log_start = stderr.tell()
                self._trainer = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", tether.__file__, str(os.getpid())),
                    *(sys.executable, "-P", "-m", "tensorhub.demo.rl.trainer", str(self._folder / "checkpoint")),
                    *(f"--steps={self.steps}", f"--seed={self.seed}", f"--device={self._device}"),
                    env=environment,
                    stdin=DEVNULL,
                    stdout=PIPE,
                    stderr=stderr,
                    limit=LINE_BYTES_MAX,
                )
            await self._follow(self._trainer)
            if await self._trainer.wait() == 0:
                return
            if self.kills["trainer"] == killed_before:
                self.faults.append(f"seed {self.seed}: the trainer ended by itself: {reason(log, log_start)}")
        raise TensorHubError(f"the trainer ended {LIVES_MAX} times: {reason(log, log_start)}")

    async def _follow(self, trainer: Process) -> None:
        assert trainer.stdout is not None
        while line := await trainer.stdout.readline():
            # The last line of a trainer that was killed may be cut.
            with contextlib.suppress(json.JSONDecodeError):
                self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        if self._began is None:
            self._began = time.monotonic()
        step = self._tally.take(event, time.monotonic() - self._began)
        if step is not None:
            self.last = step
            self._changed()
            self._stepped.set()
            self._stepped.clear()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self)

    # ------------------------------------------------------------------------------------------ kills

    async def _look(self, manager: ManagerClient) -> None:
        """Ask the manager again and again for its instances."""
        while True:
            try:
                deadline = asyncio.get_running_loop().time() + LOOK_S
                self.status = await manager.ask("status", None, RolloutStatus, deadline)
            except RolloutUnavailable:
                self.status = None
            self._changed()
            await asyncio.sleep(LOOK_S)

    def _killings(self) -> Iterator[Any]:
        if self._kill_every_s is not None:
            yield self._kill_runners(self._kill_every_s)
            yield self._kill_once("manager", self.steps // 3)
            yield self._kill_once("trainer", 2 * self.steps // 3)

    async def _kill_runners(self, every_s: float) -> None:
        """Kill runners at random moments, each time one of those that the manager knows."""
        assert self._hub is not None
        await self._until_step(1)
        while True:
            await asyncio.sleep(NOTICED_S + self._chance.expovariate(1 / max(LOOK_S, every_s - NOTICED_S)))
            while self.status is None or not self.status.instances:  # noqa: ASYNC110 (only asking again tells)
                await asyncio.sleep(LOOK_S)
            runner = self._chance.choice(self.status.instances).runner
            self._kill("runner", self._hub.hub.pids[runner])

    async def _kill_once(self, who: str, step: int) -> None:
        """Kill manager or trainer within the step after this one."""
        assert self._hub is not None
        await self._until_step(max(1, step))
        await asyncio.sleep(self._chance.uniform(0, LOOK_S))
        assert self._trainer is not None
        self._kill(who, self._trainer.pid if who == "trainer" else self._hub.hub.pids["rollout-0"])

    async def _until_step(self, step: int) -> None:
        while self.last is None or self.last.step < step:
            await self._stepped.wait()

    def _kill(self, who: str, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.kills[who] += 1
            self._changed()
