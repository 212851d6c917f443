"""What goes wrong in a simulated job, and when. Chance decides, from a stream of its own."""

from random import Random
from typing import Final

from tensorhub_simulator.rollouts.processes import ManagerProcess, RunnerProcess
from tensorhub_simulator.rollouts.world import RolloutWorld

FAULTS_S: Final = 12.0
"""So long things go wrong; then the job must come to its end."""
GROUPS: Final = 6


class Faults:
    """Kills, stops, notices of preemption, versions, restarts of the trainer, cancellations, cuts from NATS."""

    def __init__(self, world: RolloutWorld, seed: int) -> None:
        self._world, self._random = world, Random(f"faults {seed}")
        self._next()

    def _next(self) -> None:
        if self._world.agenda.now < FAULTS_S:
            self._world.agenda.after(self._random.uniform(0.1, 1.5), self._strike)

    def _strike(self) -> None:  # noqa: C901 (one case for each fault)
        world, random = self._world, self._random
        every: list[ManagerProcess | RunnerProcess] = [*world.managers, *world.runners]
        processes = [each for each in every if each.is_up]
        match random.choices(
            ("kill", "two", "stop", "publish", "trainer", "notice", "cancel", "cut", "rewind"),
            (4, 1, 3, 2, 1, 1, 0.5, 0.5, 0.5),
        ):
            case ["kill"] if processes:
                world.kill(random.choice(processes))
            case ["two"]:
                for each in random.sample(processes, min(2, len(processes))):
                    world.kill(each)
            case ["stop"] if processes:
                world.stop(random.choice(processes), random.choice([0.3, 1.0, 10.0]))
            case ["publish"]:
                world.publish()
            case ["rewind"]:
                world.rewind()
            case ["trainer"]:
                world.restart_trainer()
            case ["notice"]:
                world.notice(random.choice(world.runners))
            case ["cut"]:
                world.cut(random.choice([0.5, 3.0, 10.0]))
            case ["cancel"]:
                world.cancel(f"p{random.randint(1, GROUPS)}")
        self._next()
