"""What goes wrong in a simulated job, and when. Chance decides, from a stream of its own."""

from collections.abc import Callable
from random import Random
from typing import Final

from tensorhub_simulator.rollouts.processes import ManagerProcess, RunnerProcess
from tensorhub_simulator.rollouts.world import RolloutWorld

FAULTS_S: Final = 12.0
"""So long things go wrong; then the job must come to its end."""
GROUPS: Final = 6


def _running(world: RolloutWorld) -> list[ManagerProcess | RunnerProcess]:
    every: list[ManagerProcess | RunnerProcess] = [*world.managers, *world.runners]
    return [each for each in every if each.is_up]


def _kill(world: RolloutWorld, random: Random) -> None:
    if processes := _running(world):
        world.kill(random.choice(processes))


def _kill_two(world: RolloutWorld, random: Random) -> None:
    processes = _running(world)
    for each in random.sample(processes, min(2, len(processes))):
        world.kill(each)


def _stop(world: RolloutWorld, random: Random) -> None:
    if processes := _running(world):
        world.stop(random.choice(processes), random.choice([0.3, 1.0, 10.0]))


def _publish(world: RolloutWorld, random: Random) -> None:
    # A trainer may publish faster than prompts are computed.
    for number in range(random.choice((1, 1, 4))):
        world.agenda.after(0.02 * number, world.publish)


def _restart_trainer(world: RolloutWorld, _random: Random) -> None:
    world.restart_trainer()


def _notice(world: RolloutWorld, random: Random) -> None:
    world.notice(random.choice(world.runners))


def _cancel(world: RolloutWorld, random: Random) -> None:
    world.cancel(f"p{random.randint(1, GROUPS)}")


def _cut(world: RolloutWorld, random: Random) -> None:
    world.cut(random.choice([0.5, 3.0, 10.0]))


def _rewind(world: RolloutWorld, random: Random) -> None:
    world.rewind()
    world.agenda.after(random.uniform(0.0, 1.0), world.publish)


FAULTS: Final[tuple[tuple[float, Callable[[RolloutWorld, Random], None]], ...]] = (
    (4, _kill),
    (1, _kill_two),
    (3, _stop),
    (2, _publish),
    (1, _restart_trainer),
    (1, _notice),
    (0.5, _cancel),
    (0.5, _cut),
    (0.5, _rewind),
)
"""Each fault with how often it strikes, beside the others. A new row changes the course of all seeds."""


class Faults:
    """What strikes one job, one fault after the other."""

    def __init__(self, world: RolloutWorld, seed: int) -> None:
        self._world, self._random = world, Random(f"faults {seed}")
        self._next()

    def _next(self) -> None:
        if self._world.agenda.now < FAULTS_S:
            self._world.agenda.after(self._random.uniform(0.1, 1.5), self._strike)

    def _strike(self) -> None:
        ((_, strike),) = self._random.choices(FAULTS, [weight for weight, _ in FAULTS])
        strike(self._world, self._random)
        self._next()
